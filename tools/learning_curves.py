"""Learning curves of every algorithm on the quickstart's task, and the page that shows them.

    python tools/learning_curves.py [NAME …]     makes the runs that docs/learning.json lacks
    python tools/learning_curves.py --plot       draws docs/learning.svg from it, and puts the table
                                                 into docs/learning.md

A run is the quickstart with other settings: the stages of its graph, one after the other in this
one process, in a directory that is deleted afterwards. It ends as soon as a rollout's mean reward
is at the target, or with its budget. Each reward is written down as it comes. A tool that was
killed leaves out the runs that had ended and begins the one that had not anew, which gives the same
rewards: all runs are deterministic.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from learning.algorithms import ALGORITHMS, NAMES, TARGET, Algorithm
from learning.curves import (
    Curve,
    draw_curves,
    missing_runs,
    read_curves,
    render_curves,
    render_table,
    with_table,
)
from learning.stages import Run

from slurm_rl.config.load import load_settings
from slurm_rl.storage.digest import digest_value
from slurm_rl.storage.durable import write_file

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "quickstart.yaml"
RESULTS, PLOT, PAGE = (ROOT / "docs" / f"learning.{kind}" for kind in ("json", "svg", "md"))
#: A student cannot be better than what it learns from.
TEACHER_TARGET = 0.98


def make_curves(path: Path, names: Sequence[str]) -> None:
    """Make the runs that are missing; `path` has each reward as soon as there is one."""
    curves = read_curves(path)
    for algorithm, seed in missing_runs(curves, names):
        teacher = make_teacher() if algorithm.has_teacher else Path()
        began = time.process_time()
        rewards: list[float] = []
        for reward in train(algorithm, seed=seed, teacher=teacher):
            rewards.append(reward)
            cpu_s = round(time.process_time() - began, 1)
            curve = Curve(algorithm.recorded(), list(rewards), cpu_s, describe_machine())
            curves.setdefault(algorithm.name, {})[seed] = curve
            write_file(path, render_curves(curves).encode())
            print(
                f"{algorithm.name} seed {seed} update {len(rewards) - 1}: {reward:.4f}", flush=True
            )
        print(f"{algorithm.name} seed {seed}: {curve.updates()} updates, {cpu_s:.0f} s of CPU")


def train(
    algorithm: Algorithm, *, seed: int, teacher: Path = Path(), until: float = TARGET
) -> Iterator[float]:
    """The mean reward of each rollout until one is at `until`, or the budget is used up."""
    with tempfile.TemporaryDirectory() as name, open_run(algorithm, name, seed, teacher) as run:
        for reward in run.rewards():
            yield reward
            if reward >= until:
                return


def make_teacher() -> Path:
    """A model that was trained with another seed until it was better than the target; made once."""
    folder = ROOT / "runs" / f"learning-teacher-{digest_value(ALGORITHMS[0].recorded())[-8:]}"
    if folder.exists():
        return folder
    with tempfile.TemporaryDirectory() as name, open_run(ALGORITHMS[0], name, 0) as run:
        rewards = enumerate(run.rewards())
        updates = next((i for i, reward in rewards if reward >= TEACHER_TARGET), None)
        if updates is None:
            raise SystemExit(f"the teacher did not reach {TEACHER_TARGET}")
        weights = run.resolve("weights", run.graph.weights(updates))
        half = folder.with_suffix(".half")
        shutil.rmtree(half, ignore_errors=True)
        shutil.copytree(Path(weights.path) / "weights", half)
    half.rename(folder)
    return folder


def open_run(
    algorithm: Algorithm, folder: str, seed: int, teacher: Path = Path()
) -> contextlib.closing[Run]:
    """A run in `folder`, closed at the end of the `with`."""
    overrides = algorithm.overrides(seed=seed, folder=Path(folder), teacher=teacher)
    return contextlib.closing(Run(load_settings(CONFIG, overrides), Path(folder) / "run"))


def describe_machine() -> str:
    """Processor and versions, as the page states them."""
    packages = [f"{name} {metadata.version(name)}" for name in ("torch", "megatron-core")]
    models = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    processor = models[0].strip() if models else platform.machine()
    return ", ".join([processor, f"Python {platform.python_version()}", *packages])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--plot", action="store_true", help="draw what there is; run nothing")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(NAMES))
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(NAMES)}")
    if not options.plot:
        make_curves(RESULTS, options.names or NAMES)
        return
    curves = read_curves(RESULTS)
    draw_curves(curves, PLOT)
    write_file(PAGE, with_table(PAGE.read_text(encoding="utf-8"), render_table(curves)).encode())


if __name__ == "__main__":
    main()
