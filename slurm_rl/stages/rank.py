"""Which of a stage program's processes this is: what each asks before it imports anything."""

from __future__ import annotations

from collections.abc import Mapping


def current_rank(environment: Mapping[str, str]) -> int:
    """This process's rank: RANK (local launcher, torchrun), else srun's, else 0."""
    return int(environment.get("RANK") or environment.get("SLURM_PROCID") or 0)
