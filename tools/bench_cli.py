"""Times of the login-node commands, and how they depend on a run's length.

    python tools/bench_cli.py [--iterations 10000]

Makes two runs of empty commits, a short one and a long one, and prints: `slurm-rl --help`;
`slurm-rl status` on the long run; one `advance` on both, with the ratio.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from slurm_rl.chain.advance import advance
from slurm_rl.chain.graph import Graph, build_graph
from slurm_rl.config.load import load_config
from slurm_rl.launch.build import open_run
from slurm_rl.storage.commits import publish_commit
from slurm_rl.storage.fs import PosixFs
from slurm_rl.storage.rundir import RunDir, RunIdentity, create_run, new_run_id
from slurm_rl.types import Slot, StageRef

ROOT = Path(__file__).resolve().parents[1]


class HastyFs(PosixFs):
    """A file system without fsync: these runs are thrown away."""

    def fsync(self, path: Path) -> None: ...

    def fsync_dir(self, path: Path) -> None: ...


def make_committed_run(folder: Path, num_iterations: int) -> Path:
    """A run whose first `num_iterations` iterations are committed, with more to do."""
    overrides = [f"run.dir={folder}", f"run.name=n{num_iterations}", "launcher=local"]
    loaded = load_config(ROOT / "configs" / "quickstart.yaml", overrides)
    settings = loaded.settings.model_copy(update={"num_rollout": num_iterations + 100})
    run = RunDir(settings.run_dir, fs=HastyFs())
    dumped = settings.model_dump(mode="json")
    identity = RunIdentity(new_run_id(), settings.run.name, time.time(), "", "", dumped, "")
    create_run(run, identity)
    graph = build_graph(settings)
    digests: dict[StageRef, str] = {}
    for iteration in range(num_iterations):
        for node in graph.stages(iteration):
            ref = StageRef(iteration, node.kind)
            digests[ref] = _commit(run, graph, ref, digests)
    (run.control_dir / "PAUSE").write_text("a benchmark starts no jobs")
    return run.root


def _commit(run: RunDir, graph: Graph, ref: StageRef, digests: dict[StageRef, str]) -> str:
    from slurm_rl.storage.digest import digest_value

    parents = {role: digests[parent] for role, parent in graph.parents(ref).items()}
    content = {"stage": ref.kind, "iteration": ref.iteration, "parents": parents, "files": []}
    metrics = {"rollout/raw_reward": 0.5} if ref.kind == "rollout" else {}
    slot = Slot(ref.iteration, ref.kind, 0)
    run.fs.mkdir(run.slot_dir(slot))
    provenance = {"attempt": "a0001-0", "ended": time.time(), "metrics": metrics}
    publish_commit(run, slot, content=content, provenance=provenance)
    return digest_value(content)


def time_command(*argv: str, repeat: int = 7) -> float:
    """Median wall time of a command in seconds."""
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def time_advance(root: Path, repeat: int = 20) -> float:
    """Median time of one advance in this process, in seconds; the run is paused."""
    chain = open_run(root).chain
    chain = dataclasses.replace(chain, clock=time.time)
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        advance(chain)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=10_000)
    iterations = parser.parse_args().iterations
    program = str(Path(sys.executable).with_name("slurm-rl"))
    print(f"slurm-rl --help: {time_command(program, '--help'):.3f} s (wanted: below 0.4)")
    with tempfile.TemporaryDirectory() as name:
        short = make_committed_run(Path(name), 10)
        long = make_committed_run(Path(name), iterations)
        took = time_command(program, "status", str(long))
        print(f"status, {iterations} committed iterations: {took:.3f} s (wanted: below 1)")
        ten, many = time_advance(short), time_advance(long)
        print(f"advance: {ten * 1e3:.2f} ms at 10 iterations, {many * 1e3:.2f} ms at {iterations};")
        print(f"ratio {many / ten:.2f} (wanted: 1)")


if __name__ == "__main__":
    main()
