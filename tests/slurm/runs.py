"""Runs of toy stages whose jobs are a real Slurm's."""

from __future__ import annotations

import sys
from pathlib import Path

from toy.commands import ToyRun


def open_run(folder: Path) -> ToyRun:
    """A run in a folder that the nodes' users may enter."""
    for path in (folder, folder.parent):
        path.chmod(0o755)
    return ToyRun(folder)


def write(run: ToyRun, **changes: object) -> None:
    """Two iterations in the partition that may be preempted, unless `changes` say otherwise."""
    usual = {
        "launcher": "slurm",
        "num_rollout": 2,
        "host_python": sys.executable,
        "slurm": {"partition": "low", "time": "00:05:00", "cpus_per_task": 1},
        "env": {"TOY_SECOND": "0.5"},
    }
    run.write(**usual | changes)
