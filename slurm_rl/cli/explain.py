"""explain: why a run is not moving, in a person's words, and what to type."""

from __future__ import annotations

from pathlib import Path

from slurm_rl.chain.advance import look
from slurm_rl.cli.runs import find_run
from slurm_rl.cli.status import collect_status
from slurm_rl.cli.terminal import say


def explain_run(path: Path) -> None:
    """Print each reason on a line of its own."""
    opened = find_run(path)
    for reason in collect_status(opened, look(opened.chain))["waiting"]:
        say(reason)
