"""Weights: verified, copied to the node, probed. Real files, real locks, processes that are killed."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from slurm_rl.errors import ConfigError, CorruptError, EngineError
from slurm_rl.rollout.engine import Weights
from slurm_rl.rollout.instant import InstantEngine
from slurm_rl.rollout.staging import Copies, NoCopy, describe_copy
from slurm_rl.rollout.weights import check_probe, hold_weights, verify_weights
from slurm_rl.storage.digest import digest_entries
from slurm_rl.storage.durable import list_files, seal_files
from slurm_rl.types import FileEntry, Input

PROBE = {"tokens": [5, 6, 7], "logprobs": [-0.5, -0.5]}


def make_source(path: Path, *, seed: int = 0, size: int = 1000, probe: object = None) -> Input:
    """A committed attempt with weights of `size` bytes, and something that is not weights."""
    files = {
        "weights/config.json": b"{}",
        "weights/model-1.safetensors": bytes([seed % 256]) * size,
        "weights/extra/vocab.txt": b"v",
        "checkpoint/state": b"s",
    }
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    entries = seal_files(path, files)
    digest = digest_entries(e for e in entries if e.path.startswith("weights/"))
    facts = {"version": seed, "digest": digest, "probe": probe}
    content = {
        "files": [
            {"path": e.path, "size_bytes": e.size_bytes, "digest": e.digest} for e in entries
        ],
        "weights": facts,
    }
    paths = {name: str(path / name) for name in files}
    return Input("weights", seed, "train", "xxh3:c", str(path), paths, content)


def hold(source: Input, folder: Path, **options: float):  # type: ignore[no-untyped-def]
    return hold_weights(source, run_id="run", folder=str(folder), **options)


def copies(folder: Path) -> list[Path]:
    """Finished copies on the node."""
    root = folder / f"slurm-rl-{os.getuid()}"
    return sorted(p for p in root.glob("*") if p.is_dir() and not p.name.startswith(".tmp-"))


def left_over(folder: Path) -> list[Path]:
    return sorted((folder / f"slurm-rl-{os.getuid()}").glob(".tmp-*"))


def same_files(copy: Path, source: Input) -> bool:
    original = Path(source.path) / "weights"
    names = [n for n in list_files(copy) if n != ".slurm-rl.json"]
    return names == list_files(original) and all(
        (copy / n).read_bytes() == (original / n).read_bytes() for n in names
    )


# -- files


def test_the_weights_of_a_commit(tmp_path: Path) -> None:
    source = make_source(tmp_path / "a", seed=3, probe=PROBE)
    weights = verify_weights(source, run_id="run")
    digest = source.content["weights"]["digest"]
    assert weights == Weights(tmp_path / "a/weights", 3, digest, f"run/v3/{digest}", PROBE)


@pytest.mark.parametrize("where", [None, "node"])
def test_a_damaged_file_is_named_and_never_served(tmp_path: Path, where: str | None) -> None:
    source = make_source(tmp_path / "a")
    path = tmp_path / "a/weights/model-1.safetensors"
    path.write_bytes(b"\1" + path.read_bytes()[1:])
    folder = None if where is None else str(tmp_path / where)
    served = hold_weights(source, run_id="run", folder=folder)
    with pytest.raises(CorruptError, match=r"model-1\.safetensors: digest"), served:
        pytest.fail("served")
    assert where is None or copies(tmp_path / where) == []


def test_a_commit_without_weights(tmp_path: Path) -> None:
    source = Input("weights", 0, "rollout", "d", str(tmp_path), {}, {"files": []})
    with pytest.raises(CorruptError, match="the commit of rollout holds no weights"):
        verify_weights(source, run_id="run")


# -- copies


def test_a_copy_holds_the_files_and_is_made_once(tmp_path: Path) -> None:
    source = make_source(tmp_path / "a", seed=3, probe=PROBE)
    node = tmp_path / "node"
    with hold(source, node) as weights:
        assert copies(node) == [weights.path]
        assert same_files(weights.path, source)
        assert (weights.version, weights.probe) == (3, PROBE)
        assert weights.label == verify_weights(source, run_id="run").label
        inode = (weights.path / "config.json").stat().st_ino
        with hold(source, node) as again:
            assert again.path == weights.path
    # The committed files are not even read any more.
    (tmp_path / "a/weights/config.json").unlink()
    with hold(source, node) as later:
        assert (later.path / "config.json").stat().st_ino == inode
    assert (node / f"slurm-rl-{os.getuid()}").stat().st_mode & 0o777 == 0o700


def corrupt(copy: Path) -> None:
    path = copy / "model-1.safetensors"
    path.chmod(0o644)
    path.write_bytes(b"\7" + path.read_bytes()[1:])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "other bytes": corrupt,
    "shorter": lambda copy: os.truncate(copy / "model-1.safetensors", 10),
    "missing": lambda copy: (copy / "config.json").unlink(),
    "one more": lambda copy: (copy / "model-2.safetensors").write_bytes(b"stray"),
    "no manifest": lambda copy: (copy / ".slurm-rl.json").unlink(),
    "a broken manifest": lambda copy: (copy / ".slurm-rl.json").write_bytes(b'[["config'),
    "another's manifest": lambda copy: (copy / ".slurm-rl.json").write_bytes(b"[]"),
    "empty": lambda copy: [shutil.rmtree(copy), copy.mkdir()],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_stale_or_damaged_copy_is_made_anew(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    source, node = make_source(tmp_path / "a"), tmp_path / "node"
    with hold(source, node) as weights:
        os.chmod(weights.path / "model-1.safetensors", 0o644)
    DAMAGES[damage](weights.path)
    with hold(source, node) as again:
        assert again.path == weights.path
        assert same_files(again.path, source)
    assert "makes it anew" in caplog.text
    assert left_over(node) == []


def test_a_copy_of_other_weights_under_this_name_is_not_served(tmp_path: Path) -> None:
    """Version counters begin again with each run; what lies there is told by its digest."""
    old, new = make_source(tmp_path / "a", seed=1), make_source(tmp_path / "b", seed=2)
    node = tmp_path / "node"
    with hold(old, node) as first, hold(new, node) as second:
        assert first.path != second.path
    shutil.rmtree(second.path)
    shutil.copytree(first.path, second.path)  # a complete copy, in the wrong place
    with hold(new, node) as third:
        assert same_files(third.path, new)


@pytest.mark.parametrize("kind", ["writable by others", "a file", "a link"])
def test_a_folder_that_is_not_ours_alone_is_not_believed(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    source, node = make_source(tmp_path / "a"), tmp_path / "node"
    node.mkdir()
    root = node / f"slurm-rl-{os.getuid()}"
    if kind == "a file":
        root.touch()
    elif kind == "a link":
        (tmp_path / "elsewhere").mkdir()
        root.symlink_to(tmp_path / "elsewhere")
    else:
        root.mkdir()
        root.chmod(0o777)
    with hold(source, node) as weights:
        assert weights.path == tmp_path / "a/weights"
    assert "no copy of the weights here" in caplog.text


def test_a_variable_of_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_source(tmp_path / "a")
    monkeypatch.setenv("NODE_SCRATCH", str(tmp_path / "scratch"))
    with hold(source, Path("$NODE_SCRATCH/w")) as weights:
        assert weights.path.is_relative_to(tmp_path / "scratch/w")
    served = hold(source, Path("/x/$NO_SUCH"))
    with pytest.raises(ConfigError, match=r"\$NO_SUCH is not set on this node"), served:
        pytest.fail("served")


# -- room


def test_the_oldest_unused_copies_make_room(tmp_path: Path) -> None:
    node = tmp_path / "node"
    sources = [make_source(tmp_path / str(i), seed=i, size=100_000) for i in range(4)]
    with hold(sources[0], node) as zero:
        with hold(sources[1], node):
            pass
        # Room for two, unless said otherwise: 0 is in use, so 1 goes, though it is younger.
        with hold(sources[2], node) as two:
            assert copies(node) == sorted([zero.path, two.path])
    os.utime(zero.path / ".slurm-rl.json", (1, 1))
    with hold(sources[3], node) as three:
        assert copies(node) == sorted([two.path, three.path])
    with hold(sources[0], node, limit_gb=0.00035) as zero:
        assert copies(node) == sorted([zero.path, two.path, three.path])


def test_copies_in_use_are_never_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    node = tmp_path / "node"
    sources = [make_source(tmp_path / str(i), seed=i, size=100_000) for i in range(3)]
    with hold(sources[0], node) as zero, hold(sources[1], node) as one:
        with hold(sources[2], node) as two:
            assert two.path == tmp_path / "2/weights"
        assert same_files(zero.path, sources[0])
        assert same_files(one.path, sources[1])
    assert "taken by copies in use" in caplog.text


@pytest.mark.parametrize(
    ("limit_gb", "free", "message"),
    [(1e-6, 1 << 40, "more than stage_weights_gb allows"), (None, 1 << 20, "do not fit")],
)
def test_where_there_is_no_room_the_committed_files_are_served(
    tmp_path: Path,
    limit_gb: float | None,
    free: int,
    message: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, node = make_source(tmp_path / "a", size=100_000), tmp_path / "node"
    usage = shutil.disk_usage(tmp_path)._replace(free=free)
    monkeypatch.setattr("slurm_rl.rollout.staging.shutil.disk_usage", lambda path: usage)
    with hold_weights(source, run_id="run", folder=str(node), limit_gb=limit_gb) as weights:
        assert weights.path == tmp_path / "a/weights"
    assert message in caplog.text
    assert copies(node) == left_over(node) == []


def test_a_disk_that_fills_up_while_copying(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, node = make_source(tmp_path / "a"), tmp_path / "node"

    def fill(source: Path, target: Path) -> None:
        Path(target).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("slurm_rl.rollout.staging.shutil.copyfile", fill)
    with hold(source, node) as weights:
        assert weights.path == tmp_path / "a/weights"
    assert "No space left" in caplog.text
    assert copies(node) == left_over(node) == []


# -- several processes

COPIER = """
import logging, sys, time
logging.basicConfig(level=logging.INFO)
from pathlib import Path
sys.path.insert(0, {here!r})
import test_weights as t
source = t.make_input(sys.argv[1])
with t.hold(source, Path(sys.argv[2])) as weights:
    print(weights.path, flush=True)
    if len(sys.argv) > 3:
        time.sleep(float(sys.argv[3]))
"""


def make_input(path: str) -> Input:
    """As `make_source` made it, from its folder."""
    fields = json.loads((Path(path) / "input.json").read_text())
    return Input(**fields)


def start(source: Input, node: Path, *more: str) -> subprocess.Popen[str]:
    fields = {name: getattr(source, name) for name in Input.__slots__}
    (Path(source.path) / "input.json").write_text(json.dumps(fields))
    program = COPIER.format(here=str(Path(__file__).parent))
    return subprocess.Popen(
        [sys.executable, "-c", program, source.path, str(node), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_one_process_of_a_node_copies_and_the_others_wait(tmp_path: Path) -> None:
    source, node = make_source(tmp_path / "a", size=20_000_000), tmp_path / "node"
    running = [start(source, node) for _ in range(4)]
    said = [process.communicate(timeout=60) for process in running]
    assert [process.returncode for process in running] == [0] * 4, said
    assert {out.strip() for out, _ in said} == {str(copies(node)[0])}
    assert same_files(copies(node)[0], source)
    assert left_over(node) == []
    log = "".join(err for _, err in said)
    assert (log.count(":copied 0.02 GB "), log.count(", verified")) == (1, 3)


@pytest.mark.slow
def test_killed_at_any_moment_nothing_half_is_served(tmp_path: Path) -> None:
    source, node = make_source(tmp_path / "a", size=200_000_000), tmp_path / "node"
    entries = [
        FileEntry(e["path"].removeprefix("weights/"), e["size_bytes"], e["digest"])
        for e in source.content["files"]
        if e["path"].startswith("weights/")
    ]
    seen_partial = 0
    for attempt in range(12):
        process = start(source, node, "30")
        # Killed a little later each time, from the moment on at which it begins to write.
        deadline = time.monotonic() + 60
        while not left_over(node) and not copies(node):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.0005)
        time.sleep(0.004 * attempt)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        seen_partial += bool(left_over(node))
        for copy in copies(node):  # by its name it is complete
            assert describe_copy(copy, entries) == ""
        if attempt % 4 == 3:
            with hold(source, node) as weights:
                assert weights.path == copies(node)[0]
                assert same_files(weights.path, source)
            assert left_over(node) == []
            shutil.rmtree(weights.path)
    assert seen_partial >= 3, "it was never killed in the middle"


def test_a_copier_that_hangs_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    source, node = make_source(tmp_path / "a"), tmp_path / "node"
    with hold(source, node) as weights:
        lock = weights.path.with_name(f"{weights.path.name}.lock")
    shutil.rmtree(weights.path)
    holder = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX);"
        " print(flush=True); time.sleep(60)"
    )
    entries = [
        FileEntry(e["path"].removeprefix("weights/"), e["size_bytes"], e["digest"])
        for e in source.content["files"]
        if e["path"].startswith("weights/")
    ]
    sources = {entry.path: tmp_path / "a/weights" / entry.path for entry in entries}
    argv = [sys.executable, "-c", holder, str(lock)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        copy = Copies(node, patience_s=0.3).take(sources, entries)
        with pytest.raises(NoCopy, match=r"has not copied .* within 0\.3 s"), copy:
            pytest.fail("served")
        process.kill()
    with Copies(node, patience_s=0.3).take(sources, entries) as path:
        assert same_files(path, source)


# -- probe


class Scorer(InstantEngine):
    """Says of a text what it is told to."""

    def __init__(self, found: list[float]) -> None:
        super().__init__()
        self._found = found

    async def logprobs(self, tokens: Sequence[int]) -> list[float]:
        assert list(tokens) == PROBE["tokens"]
        return self._found


class Replicas(Scorer):
    async def logprobs_of_each(self, tokens: Sequence[int]) -> list[list[float]]:
        return [[-0.5, -0.5], self._found, [-0.5, -0.5]]


def probe(
    found: list[float], *, kind: type[Scorer] = Scorer, probe: object = PROBE
) -> float | None:
    weights = Weights(Path("/m"), 3, "xxh3:1", "run/v3/xxh3:1", probe)  # type: ignore[arg-type]
    return asyncio.run(check_probe(kind(found), weights, tolerance=0.25))


def test_the_probe_is_the_mean_gap() -> None:
    assert probe([-0.6, -0.7]) == pytest.approx(0.15)
    assert probe([-0.4, -0.6]) == pytest.approx(0.1), "gaps do not cancel"
    assert probe([], probe=None) is None


def test_other_weights_are_refused_with_both_values() -> None:
    for kind in (Scorer, Replicas):
        with pytest.raises(EngineError, match=r"are -2\.0000 on average.*were -0\.5000.*0\.25"):
            probe([-1.0, -3.0], kind=kind)


@pytest.mark.parametrize("found", [[-0.5], [-0.5, float("nan")], []])
def test_an_engine_that_does_not_answer_the_probe_is_refused(found: list[float]) -> None:
    with pytest.raises(EngineError, match="log-probs of the probe"):
        probe(found)


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"tokens": [1, 2], "logprobs": []},
        {"tokens": [1], "logprobs": []},
        {"tokens": [1, 2], "logprobs": [float("nan")]},
        {"tokens": [1, 2], "logprobs": ["a"]},
    ],
)
def test_a_probe_that_makes_no_sense_is_damage(wrong: dict[str, object]) -> None:
    with pytest.raises(CorruptError, match="probe is not tokens and log-probs"):
        probe([], probe=wrong)
