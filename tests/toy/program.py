"""The toy stages: training state is a chain of digests, so that anything lost or doubled shows.

A rollout derives samples from the weights, the seed and its data cursor, and journals each group;
a train step digests the state before with all samples. `toy_steps` is a generator: it yields how
long it works (seconds) between effects, and returns the result. Run as a script it does the same
in real time:

    python program.py -u -m slurm_rl.stages ORDER.json        (all but the last is ignored)

On demand it fails: `<run>/toy/fail-<kind>-<iteration>.json` holds `{"how": …, "times": n}` with
how = user | system | again (a retry does not mend it) | crash | hang | lie (exit 0 and no result) | rank (a user's error of one rank,
after which srun ends the others and reports their SIGTERM). Where `TOY_FAIL_RATE` is set, as
`0.05:7`, that share of all attempts fails too (system or crash), drawn from the seed behind it.

While `<run>/toy/down` is there, the service that `score` and `eval-judged…` ask is down.

It waits at the end of its work while `TOY_HOLD` names a file that holds a smaller number than the
stage's place in the run: who disturbs a chain can then be sure that it does not end too early.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from slurm_rl.errors import (
    CorruptError,
    DataError,
    EngineError,
    ServiceDown,
    SlurmRlError,
    StorageError,
)
from slurm_rl.seeds import derive_seed
from slurm_rl.storage.damage import check_inputs
from slurm_rl.storage.digest import digest_bytes, digest_entries, digest_value
from slurm_rl.storage.durable import look_at_size, seal_files, write_file
from slurm_rl.storage.fs import POSIX, Fs
from slurm_rl.types import (
    DECISION_PREFIX,
    Input,
    Order,
    Result,
    canonical_json,
    dump_record,
    parse_order,
)

Steps = Generator[float, None, Result | None]

#: Seconds that a piece of work takes.
WORK_S = 4.0


class Stopped(EngineError):
    """The word of a rank that srun stopped because another was killed."""


class Crash(BaseException):
    """The program ends like one that was hit by SIGKILL."""


def toy_steps(order: Order, *, fs: Fs = POSIX) -> Steps:
    """The whole program; leaves `result.json` last. Raises the package's own errors."""
    yield WORK_S
    how = take_failure(order)
    if how == "lie":
        return None
    if how == "hang":
        while True:
            yield WORK_S
    if how == "crash":
        raise Crash
    if how is not None:
        blamed = DataError if how in ("user", "rank") else EngineError
        error = blamed(f"told to fail ({how})")
        if how == "survivor":
            error = Stopped("stopped by SIGTERM")
            error.exit_code = 137
        if how == "rank":
            error.exit_code = 143
        if how == "again":
            error.blame, error.place = "repeat", "program.py:1"  # type: ignore[attr-defined]
        raise error
    yield from wait_for_inputs(order, fs)
    settings = json.loads(fs.read(Path(order.settings_path)))
    result = yield from PROGRAMS[order.kind.partition("-")[0]](order, settings, fs)
    while place_of(order.kind, order.iteration) > read_hold():
        yield WORK_S
    write_file(Path(order.attempt_dir) / "result.json", dump_record(result), fs=fs)
    return result


def init_steps(order: Order, settings: dict[str, Any], fs: Fs) -> Generator[float, None, Result]:
    folder = Path(order.attempt_dir)
    names = ["weights", *(["critic"] if settings.get("critic") is not None else [])]
    for name in names:
        state = digest_value([settings["seed"], name] if name == "critic" else settings["seed"])
        write_state(folder / name, {"version": 0, "state": state}, fs)
    yield WORK_S
    files = seal_files(folder, [f"{name}/state.json" for name in names], fs=fs)
    weights = [entry for entry in files if entry.path.startswith("weights/")]
    return Result(files, {"weights": {"version": 0, "digest": digest_entries(weights)}})


def rollout_steps(order: Order, settings: dict[str, Any], fs: Fs) -> Generator[float, None, Result]:
    folder = Path(order.attempt_dir)
    weights = read_state(order.input("weights"), "weights/state.json", fs)
    batch = int(settings["rollout"]["rollout_batch_size"])
    copies = int(settings["rollout"]["n_samples_per_prompt"])
    first = order.inputs["previous"].content["cursor"]["position"] if order.iteration else 0
    mine = range(first + order.shard, first + batch, order.num_shards)
    done = read_journals(order)
    for position in mine:
        if position not in done:
            done[position] = [
                make_sample(settings["seed"], weights, order.iteration, position, copy)
                for copy in range(copies)
            ]
            yield WORK_S
        line = canonical_json({"position": position, "samples": done[position]})
        fs.append(folder / "journal.jsonl", digest_bytes(line).encode() + b" " + line + b"\n")
    lines = [canonical_json(sample) for position in mine for sample in done[position]]
    fs.create(folder / "samples.jsonl", b"".join(line + b"\n" for line in lines))
    if "TOY_DECIDES" in settings["rollout"].get("env", {}):
        decide(folder.parents[1], fs)
    files = seal_files(folder, ["samples.jsonl"], fs=fs)
    content = {
        "weights": order.input("weights").content["weights"],
        "cursor": {"position": first + batch},
        "num_samples": len(lines),
        "num_groups": len(mine),
        "seed": settings["seed"],
    }
    return Result(files, content, metrics={"reward": 1.0})


def decide(stage_dir: Path, fs: Fs) -> None:
    """Say that all groups of the stage are made: whoever is done may commit for the others. Here
    that is said early; they are the same whoever makes them."""
    path = stage_dir / f"{DECISION_PREFIX}toy.json"
    if path.name not in fs.list(stage_dir):
        with contextlib.suppress(FileExistsError):
            fs.create(path, b"{}")


def train_steps(order: Order, settings: dict[str, Any], fs: Fs) -> Generator[float, None, Result]:
    folder = Path(order.attempt_dir)
    rollout, checkpoint = order.input("rollout"), order.input("checkpoint")
    name = f"{'checkpoint' if order.iteration else 'weights'}/state.json"
    before = read_state(checkpoint, name, fs)
    samples = read_samples(rollout, fs)
    check_samples(samples, settings, order.iteration)
    trained_on: list[Any] = [before["state"], samples, settings["seed"]]
    if "score" in order.inputs:
        score = order.input("score")
        check_inputs(score, ["scores.json"], patience_s=0.0, fs=fs)
        scores = json.loads(fs.read(Path(score.files["scores.json"])))
        if scores != make_scores(samples):
            raise CorruptError(f"iteration {order.iteration}: scores of other samples")
        trained_on.append(scores)
    trained_on += read_signals(order, samples, fs)
    if before["version"] != order.iteration:
        raise CorruptError(f"iteration {order.iteration}: continues version {before['version']}")
    yield WORK_S
    after = {
        "version": order.iteration + 1,
        "state": digest_value(trained_on),
    }
    write_state(folder / "checkpoint", after, fs)
    yield WORK_S
    write_state(folder / "weights", after, fs)
    files = seal_files(folder, ["checkpoint/state.json", "weights/state.json"], fs=fs)
    weights = [entry for entry in files if entry.path.startswith("weights/")]
    trained = int(checkpoint.content.get("num_samples_trained", 0)) + len(samples)
    content = {
        "weights": {"version": order.iteration + 1, "digest": digest_entries(weights)},
        "cursor": rollout.content["cursor"],
        "optimizer_steps": order.iteration + 1,
        "num_samples_trained": trained,
    }
    return Result(files, content)


def reference_steps(
    order: Order, settings: dict[str, Any], fs: Fs
) -> Generator[float, None, Result]:
    """A reference that moves: its state is made of its last one and of the policy's."""
    folder, last = Path(order.attempt_dir), order.input("reference")
    policy = read_policy(order.input("weights"), fs)
    name = "weights" if last.kind == "init" else "reference"
    before = read_state(last, f"{name}/state.json", fs)
    if policy["version"] != order.iteration or before["version"] != max(0, order.iteration - 1):
        raise CorruptError(f"reference {order.iteration}: {policy['version']}, {before['version']}")
    yield WORK_S
    state = digest_value([before["state"], policy["state"]])
    write_state(folder / "reference", {"version": order.iteration, "state": state}, fs)
    signals = write_signals(order, state, fs)
    files = seal_files(folder, ["reference/state.json", signals], fs=fs)
    return Result(files, {"version": order.iteration})


def teacher_steps(order: Order, settings: dict[str, Any], fs: Fs) -> Generator[float, None, Result]:
    """It knows nothing but the rollout."""
    yield WORK_S
    name = write_signals(order, "teacher", fs)
    return Result(seal_files(Path(order.attempt_dir), [name], fs=fs), {"version": 0})


def critic_steps(order: Order, settings: dict[str, Any], fs: Fs) -> Generator[float, None, Result]:
    """Values of the rollout by the state before, and the state after."""
    folder, source = Path(order.attempt_dir), order.input("checkpoint")
    name = "critic" if source.kind == "init" else "checkpoint"
    before = read_state(source, f"{name}/state.json", fs)
    samples = read_samples(order.input("rollout"), fs)
    check_samples(samples, settings, order.iteration)
    if before["version"] != order.iteration:
        raise CorruptError(f"critic {order.iteration}: continues version {before['version']}")
    seen = read_signals(order, samples, fs)
    yield WORK_S
    after = digest_value([before["state"], samples, seen])
    write_state(folder / "checkpoint", {"version": order.iteration + 1, "state": after}, fs)
    names = ["checkpoint/state.json", write_signals(order, before["state"], fs)]
    return Result(seal_files(folder, names, fs=fs), {"version": order.iteration + 1})


def write_signals(order: Order, state: str, fs: Fs) -> str:
    """What a model in `state` says of the rollout; the name of the file."""
    samples = read_samples(order.input("rollout"), fs)
    found = {"samples": digest_value(samples), "signals": digest_value([state, samples])}
    fs.create(Path(order.attempt_dir) / "signals.json", canonical_json(found))
    return "signals.json"


def read_signals(order: Order, samples: list[dict[str, Any]], fs: Fs) -> list[Any]:
    """What other stages said of these samples. Raises CorruptError if it was of others."""
    found = []
    for role in ("reference", "teacher", "critic"):
        source = order.inputs.get(role)
        if source is None or "signals.json" not in source.files:
            continue
        check_inputs(source, ["signals.json"], patience_s=0.0, fs=fs)
        said = json.loads(fs.read(Path(source.files["signals.json"])))
        if said["samples"] != digest_value(samples):
            raise CorruptError(f"{order.kind} {order.iteration}: {role} of other samples")
        found.append(said["signals"])
    return found


def read_policy(source: Input, fs: Fs) -> dict[str, Any]:
    return read_state(source, "weights/state.json", fs)


def score_steps(order: Order, settings: dict[str, Any], fs: Fs) -> Generator[float, None, Result]:
    """Grade every sample of the rollout, with the help of a service."""
    folder = Path(order.attempt_dir)
    samples = read_samples(order.input("rollout"), fs)
    yield from ask_service(order)
    fs.create(folder / "scores.json", canonical_json(make_scores(samples)))
    files = seal_files(folder, ["scores.json"], fs=fs)
    content = {"num_samples": len(samples), "cursor": order.input("rollout").content["cursor"]}
    return Result(files, content, metrics={"reward": 1.0})


def eval_steps(order: Order, settings: dict[str, Any], fs: Fs) -> Generator[float, None, Result]:
    """A number that says which weights it was measured on."""
    folder, name = Path(order.attempt_dir), order.kind.partition("-")[2]
    weights = read_state(order.input("weights"), "weights/state.json", fs)
    if weights["version"] != order.iteration:
        raise CorruptError(f"{order.kind} of version {order.iteration}: has {weights['version']}")
    if name.startswith("judged"):
        yield from ask_service(order)
    yield WORK_S
    found = {"version": weights["version"], "state": digest_value([name, weights["state"]])}
    fs.create(folder / "found.json", canonical_json(found))
    files = seal_files(folder, ["found.json"], fs=fs)
    content = {"weights": order.input("weights").content["weights"]}
    return Result(files, content, metrics={f"eval/{name}": float(weights["version"])})


def ask_service(order: Order) -> Generator[float, None, None]:
    """Raises ServiceDown if it does not answer for a while."""
    down = Path(order.run_dir) / "toy" / "down"
    for _ in range(2):
        yield WORK_S
        if not down.exists():
            return
    raise ServiceDown("judge did not answer", service="judge")


def make_scores(samples: list[dict[str, Any]]) -> list[Any]:
    """A function of the samples alone, whichever shard they came from."""
    return [[s["position"], s["copy"], digest_value(s["text"])[-4:]] for s in samples]


def set_service(run_dir: Path, *, is_down: bool) -> None:
    """Take the service down, or bring it back."""
    (run_dir / "toy").mkdir(exist_ok=True)
    if is_down:
        (run_dir / "toy" / "down").touch()
    else:
        (run_dir / "toy" / "down").unlink(missing_ok=True)


PROGRAMS = {
    "init": init_steps,
    "rollout": rollout_steps,
    "score": score_steps,
    "reference": reference_steps,
    "teacher": teacher_steps,
    "critic": critic_steps,
    "train": train_steps,
    "eval": eval_steps,
}


def make_sample(
    seed: int, weights: dict[str, Any], iteration: int, position: int, copy: int
) -> dict[str, Any]:
    """One sample: a function of nothing but its arguments."""
    drawn = derive_seed(seed, "sample", iteration, position, copy)
    text = digest_bytes(f"{weights['state']} {drawn}".encode())
    return {"position": position, "copy": copy, "text": text, "version": weights["version"]}


def check_samples(samples: list[dict[str, Any]], settings: dict[str, Any], iteration: int) -> None:
    """Every sample of the batch once, from the very weights that the lag says. Raises CorruptError."""
    batch = int(settings["rollout"]["rollout_batch_size"])
    copies = int(settings["rollout"]["n_samples_per_prompt"])
    wanted = [
        (position, copy)
        for position in range(iteration * batch, (iteration + 1) * batch)
        for copy in range(copies)
    ]
    found = [(sample["position"], sample["copy"]) for sample in samples]
    if found != wanted:
        raise CorruptError(f"iteration {iteration}: samples {found}, wanted {wanted}")
    wanted_version = max(0, iteration - int(settings["chain"]["lag"]))
    if {sample["version"] for sample in samples} != {wanted_version}:
        raise CorruptError(f"iteration {iteration}: samples of other weights than {wanted_version}")


def write_state(folder: Path, state: dict[str, Any], fs: Fs) -> None:
    fs.mkdir(folder)
    fs.create(folder / "state.json", canonical_json(state))


def wait_for_inputs(order: Order, fs: Fs) -> Generator[float, None, None]:
    """As real stages do before they read: what shows late is waited for, in the clock's time."""
    left_s = 45.0
    while look_at_size(Path(order.attempt_dir) / "order.json", -1, fs=fs) < 0 < left_s:
        left_s -= 1.0
        yield 1.0
    for source in order.inputs.values():
        for entry in source.content["files"]:
            path = Path(source.files[entry["path"]])
            while look_at_size(path, entry["size_bytes"], fs=fs) != entry["size_bytes"]:
                if left_s <= 0:
                    break
                left_s -= 1.0
                yield 1.0


def read_state(source: Input, name: str, fs: Fs) -> dict[str, Any]:
    """A committed state, its digest checked against what was committed."""
    check_inputs(source, [name], patience_s=0.0, fs=fs)
    state: dict[str, Any] = json.loads(fs.read(Path(source.files[name])))
    return state


def read_samples(rollout: Input, fs: Fs) -> list[dict[str, Any]]:
    check_inputs(rollout, rollout.files, patience_s=0.0, fs=fs)
    lines = [
        json.loads(line)
        for path in rollout.named("samples.jsonl")
        for line in fs.read(Path(path)).splitlines()
    ]
    return sorted(lines, key=lambda sample: (sample["position"], sample["copy"]))


def read_journals(order: Order) -> dict[int, list[dict[str, Any]]]:
    """Finished groups of earlier attempts; a torn or damaged line is left out."""
    found = {}
    for folder in order.earlier_attempts:
        path = Path(folder) / "journal.jsonl"
        for line in path.read_bytes().splitlines() if path.exists() else []:
            digest, _, text = line.partition(b" ")
            if digest != digest_bytes(text).encode():
                continue
            raw = json.loads(text)
            found[int(raw["position"])] = raw["samples"]
    return found


def take_failure(order: Order) -> str | None:
    """How to fail now, if a flag file says so and is not used up."""
    path = Path(order.run_dir) / "toy" / f"fail-{order.kind}-{order.iteration}.json"
    if not path.exists():
        return draw_failure(order, os.environ.get("TOY_FAIL_RATE", ""))
    flag = json.loads(path.read_bytes())
    for number in range(flag.get("times", 1)):
        try:
            path.with_suffix(f".used-{number}").touch(exist_ok=False)
            return str(flag["how"])
        except FileExistsError:
            continue
    return None


def draw_failure(order: Order, wanted: str) -> str | None:
    """Whether this attempt is one of the `rate` that fail, drawn from `rate:seed`, and how."""
    if not wanted:
        return None
    rate, _, seed = wanted.partition(":")
    epoch = Path(order.attempt_dir).name.partition("-")[0]
    drawn = derive_seed(int(seed), "fail", order.kind, order.iteration, order.shard, epoch)
    if drawn % 10_000 >= float(rate) * 10_000:
        return None
    return "crash" if drawn // 10_000 % 2 else "system"


def place_of(kind: str, iteration: int) -> int:
    """The place of a stage in its run: 0 for init, then 1, 2, … in the order of the chain. Nobody
    holds evaluations back."""
    if kind == "init" or kind.startswith("eval-"):
        return 0
    return 2 * iteration + (2 if kind == "train" else 1)


def read_hold() -> float:
    """The place of the last stage that may end now; infinity where nobody holds any back."""
    path = os.environ.get("TOY_HOLD")
    # Whoever writes it anew leaves it empty for a moment.
    return float(Path(path).read_text() or 0) if path else math.inf


def fail_stage(run_dir: Path, kind: str, iteration: int, *, how: str, times: int = 1) -> None:
    """Ask the next `times` attempts at a stage to fail."""
    folder = run_dir / "toy"
    folder.mkdir(exist_ok=True)
    flag = json.dumps({"how": how, "times": times})
    (folder / f"fail-{kind}-{iteration}.json").write_text(flag)


def leave_failure(order: Order, error: SlurmRlError | OSError, fs: Fs) -> int:
    """`failure.json` as the real entry point leaves it, if it can; the exit status."""
    failure = {
        "blame": getattr(error, "blame", "system"),
        "error": type(error).__name__,
        "message": getattr(error, "message", str(error)),
        "hint": getattr(error, "hint", ""),
        "place": getattr(error, "place", ""),
        "service": getattr(error, "service", ""),
    }
    with contextlib.suppress(OSError, StorageError):
        write_file(Path(order.attempt_dir) / "failure.json", canonical_json(failure), fs=fs)
    return getattr(error, "exit_code", 1)


def main(arguments: list[str]) -> int:
    """The script: `TOY_SECOND` real seconds for each second of work (0.02 unless set)."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    order = parse_order(Path(arguments[-1]).read_bytes())
    if int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0) != 0:
        # As a rank in a collective: it ends when the work is done, or when it is ended.
        while not (Path(order.attempt_dir) / "result.json").exists():
            time.sleep(0.05)
        return 0
    second = float(os.environ.get("TOY_SECOND", "0.02"))
    try:
        for work_s in toy_steps(order):
            time.sleep(work_s * second)
    except Crash:
        os.kill(os.getpid(), signal.SIGKILL)
    except SlurmRlError as error:
        print(error, file=sys.stderr)
        return leave_failure(order, error, POSIX)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
