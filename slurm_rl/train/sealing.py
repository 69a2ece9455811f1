"""Files that ranks wrote together: fsynced and digested by their writers, listed by rank 0."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from slurm_rl.storage.durable import seal_files
from slurm_rl.types import FileEntry


def seal_shares(root: Path, names: Iterable[str], *, rank: int, num_ranks: int) -> list[FileEntry]:
    """Fsync and digest this rank's own among the files `names` below `root`; every rank calls it.

    Returns all ranks' entries by path on rank 0, nothing on the others.
    """
    entries = seal_files(root, [name for name in names if writer_of(name) == rank])
    gathered: list[Any] = [None] * num_ranks
    dist.gather_object(entries, gathered if rank == 0 else None, dst=0)
    if rank != 0:
        return []
    return sorted((entry for part in gathered for entry in part), key=lambda e: e.path)


def writer_of(name: str) -> int:
    """The rank that wrote a file: `__3_0.distcp` and `rank-3.pt` are rank 3's, others rank 0's."""
    match = re.fullmatch(r"__(\d+)_\d+\.distcp|rank-(\d+)\.pt", name.rsplit("/", 1)[-1])
    return int(match[1] or match[2]) if match else 0
