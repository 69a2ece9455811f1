"""Chaos on a real Slurm: a chain of toy stages under a schedule of faults, and what it came to.

    python tools/chaos.py --faults 60 --iterations 20 --seed 1 [--report FILE]

Starts a Slurm of four nodes (tools/slurm_cluster.sh; needs root), runs the chain once undisturbed
with the local launcher for the digests to compare with, and once on Slurm while it injects faults
drawn from the seed, every kind at least once. It acts as the person beside the run: mends what it
broke after a while, and types `slurm-rl resume` after a pause or a halt; nothing else. Exit code 0
only if every kind was injected and survived, every digest equals the reference's, `slurm-rl verify`
finds all as committed, and the queue is empty. The run lies on a small file system of its own.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools")]

from faults import inject_cluster, inject_jobs  # noqa: E402
from faults.person import Person, Stuck, say  # noqa: E402
from faults.report import (  # noqa: E402
    Evidence,
    Injected,
    compare_digests,
    find_failures,
    render_report,
)
from faults.schedule import Fault, draw_for, draw_schedule  # noqa: E402
from faults.site import Site  # noqa: E402
from slurm.cluster import Cluster, running  # noqa: E402
from toy.commands import ToyRun  # noqa: E402
from toy.model import write_model  # noqa: E402

INJECT: dict[str, inject_jobs.Inject] = {
    "preempt": inject_jobs.preempt,
    "requeue-running": inject_jobs.requeue_running,
    "requeue-completed": inject_jobs.requeue_completed,
    "scancel": inject_jobs.cancel,
    "node-poweroff": inject_cluster.power_off,
    "kill-slurmd": inject_cluster.kill_slurmd,
    "hang-slurmd": inject_cluster.hang_slurmd,
    "kill-controller": inject_cluster.kill_controller,
    "kill-controller-at-submission": inject_cluster.kill_controller_at_submission,
    "controller-silent": inject_cluster.silence_controller,
    "hold": inject_jobs.hold,
    "kill-supervisor": inject_jobs.kill_supervisor,
    "kill-payload": inject_jobs.kill_payload,
    "disk-full": inject_jobs.fill_disk,
    "corrupt-uncommitted": inject_jobs.corrupt_uncommitted,
    "corrupt-committed": inject_jobs.corrupt_committed,
}

#: Seconds without the moment for a fault, or without the end, after which the run is stuck.
STUCK_S = 150.0
#: Seconds that a moment is waited for before the chain is let go on by a stage.
PATIENCE_S = 12.0
DEADLINE_S = 90.0  # of a stage's attempt
WORK_S = 0.25  # seconds of a toy stage's second: a stage works three of ours


def write_run(folder: Path, inputs: Path, iterations: int, **changes: object) -> ToyRun:
    """The configuration of the chain; how its jobs are run is no part of its content."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    run = ToyRun(folder)
    chain = {"heartbeat_s": 0.5, "lease_s": 5, "retry_delay_s": 1, "submit_deadline_s": 10}
    chain |= {"tick_s": 8, "max_attempts": 8, "exclude_s": 0}
    env = {"TOY_SECOND": WORK_S, **changes.pop("env", {})}  # type: ignore[dict-item]
    run.write(
        num_rollout=iterations, chain=chain, env=env, hf_checkpoint=str(inputs / "model"),
        rollout__prompt_data=str(inputs / "prompts.jsonl"), train__num_ranks=2, **changes,
    )  # fmt: skip
    return run


def write_inputs(folder: Path) -> Path:
    """The model and the prompts of both runs: where they lie is part of the content."""
    folder.mkdir()
    write_model(folder / "model")
    (folder / "prompts.jsonl").write_text('{"prompt": "a", "label": "b"}\n')
    return folder


@contextmanager
def small_disk(folder: Path, size_mb: int = 24) -> Iterator[Path]:
    """A file system that can be filled."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "tmpfs", folder], check=True)
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def undisturbed(run: ToyRun) -> Iterator[Callable[[], float]]:
    """The reference, by the local launcher, beside all else; its seconds, once it has ended."""
    began = time.time()
    process = run.start("submit", str(run.config), "--wait")

    def finish() -> float:
        out, err = process.communicate(timeout=600)
        if process.returncode:
            raise RuntimeError(f"the undisturbed run failed: {out}{err}")
        return max(path.stat().st_mtime for path in run.root.rglob("COMMIT")) - began

    try:
        yield finish
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(30)


def inject(person: Person, fault: Fault, rng: random.Random) -> Injected:
    """Wait for the fault's moment, and do it. Raises Stuck."""
    site = person.site
    site.allow(fault.allowed)
    person.wait(lambda: site.progress() >= fault.due, f"commit number {fault.due}", STUCK_S)
    asked, allowed = time.monotonic(), fault.allowed

    def look() -> Injected | None:
        nonlocal asked, allowed
        at_s = site.elapsed_s()
        note = None if person.stop_reason() else INJECT[fault.kind](person, rng)
        if note is None and time.monotonic() - asked > PATIENCE_S:
            asked, allowed = time.monotonic(), allowed + 1
            site.allow(allowed)
        return None if note is None else Injected(fault.kind, at_s, note)

    found = person.wait(look, f"moment for {fault.kind}", STUCK_S)
    assert isinstance(found, Injected)
    say(site, f"fault {fault.number + 1}, {fault.kind}: {found.note}")
    return found


def disturb(
    person: Person, schedule: tuple[Fault, ...], seed: int
) -> tuple[list[Injected], list[str]]:
    """The whole schedule, then the end; what was injected, and what went wrong."""
    site, injected = person.site, []
    try:
        for fault in schedule:
            rng = draw_for(seed, fault)
            injected.append(inject(person, fault, rng))
            pause_s = time.monotonic() + rng.uniform(0.3, 3.0)
            person.wait(lambda until=pause_s: time.monotonic() > until, "end of a pause", 60.0)
        site.repair(all_of_it=True)
        site.release()
        person.wait(lambda: site.progress() >= site.num_stages, "end of the run", STUCK_S)
        person.wait(lambda: site.left() == [], "empty queue", 90.0)
    except (Stuck, AssertionError) as error:
        site.repair(all_of_it=True)
        say(site, f"FAILED: {error}")
        explain(site)
        return injected, [str(error)]
    return injected, []


def explain(site: Site) -> None:
    """What a person would look at first."""
    print(site.call("squeue", "-t", "all", "-o", "%.6i %.32j %.10T %.6M %.20E %R"))
    print(site.call("sinfo", "-N", "-o", "%N %P %T %E"))
    for word in ("status", "explain"):
        done = site.run.command(word, str(site.root))
        print(f"slurm-rl {word}: {done.stdout}{done.stderr}")


def run_chaos(folder: Path, options: argparse.Namespace) -> Evidence:
    """Everything but the printing of the report."""
    inputs = write_inputs(folder / "inputs")
    reference = write_run(folder / "reference", inputs, options.iterations, launcher="local")
    num_stages = 1 + 2 * options.iterations
    schedule = draw_schedule(options.seed, num_faults=options.faults, num_stages=num_stages)
    hold = folder / "hold"
    hold.write_text(str(schedule[0].allowed))
    cluster = Cluster(folder / "cluster", num_nodes=4, knobs={"GPUS": "1"})
    with (
        undisturbed(reference) as finish_reference,
        small_disk(folder / "disk") as disk,
        running(cluster),
    ):
        run = write_slurm_run(disk / "work", inputs, options.iterations, hold)
        person = Person(Site(cluster, run, hold, num_stages))
        told = run.command("submit", str(run.config))
        if told.returncode:
            raise RuntimeError(f"slurm-rl submit: {told.stderr}")
        injected, problems = disturb(person, schedule, options.seed)
        evidence = collect(person, injected, problems, reference, finish_reference())
        if options.keep:
            subprocess.run(["cp", "-a", run.root, cluster.root / "log", options.keep], check=False)
        return evidence


def write_slurm_run(folder: Path, inputs: Path, iterations: int, hold: Path) -> ToyRun:
    """The run that is disturbed: train stages of two nodes, one GPU each."""
    return write_run(
        folder,
        inputs,
        iterations,
        launcher="slurm",
        slurm={"partition": "low", "time": "00:20:00", "cpus_per_task": 1},
        rollout__slurm={"gpus_per_node": 1},
        train__slurm={"nodes": 2, "ntasks_per_node": 1, "gpus_per_node": 1},
        host_python=sys.executable,
        env={"TOY_HOLD": str(hold)},
        # A controller that dies while a step is made can leave an srun that waits for ever.
        rollout__deadline_s=DEADLINE_S,
        train__deadline_s=DEADLINE_S,
    )


def collect(
    person: Person,
    injected: list[Injected],
    problems: list[str],
    reference: ToyRun,
    undisturbed_s: float,
) -> Evidence:
    """What can be read off the run now that it is over."""
    site = person.site
    if person.type("verify"):
        problems = [*problems, "slurm-rl verify finds damage"]
    found = site.run.digests()
    return Evidence(
        injected=injected,
        stops=person.stops,
        attempts=site.attempts(),
        commits=[path.stat().st_mtime - site.began for path in site.commits()],
        num_stages=site.num_stages,
        num_submissions=site.num_submissions(),
        undisturbed_s=undisturbed_s,
        differences=compare_digests(
            {slot: digest for slot, digest in reference.digests().items() if slot in found}, found
        ),
        left=site.left() or [],
        problems=problems,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, help="write the report here too")
    parser.add_argument(
        "--keep", type=Path, help="copy the run and the logs of Slurm to this folder"
    )
    options = parser.parse_args()
    if os.getuid() != 0:
        parser.error("needs root: it makes namespaces and mounts a file system")
    # So that the cluster and the mount are taken down.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        Path(name).chmod(0o755)
        if options.keep:
            options.keep.mkdir(parents=True, exist_ok=True)
        evidence = run_chaos(Path(name), options)
    text = f"seed {options.seed}\n\n{render_report(evidence)}\n"
    print(text, end="")
    if options.report:
        options.report.write_text(text)
    return 1 if find_failures(evidence) else 0


if __name__ == "__main__":
    sys.exit(main())
