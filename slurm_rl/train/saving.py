"""A role's files in an attempt's directory: `checkpoint/` and `weights/`, and who seals which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from slurm_rl.storage.durable import list_files
from slurm_rl.train import checkpoint, rng
from slurm_rl.train.forward import Engine
from slurm_rl.train.sealing import seal_shares
from slurm_rl.types import FileEntry

CHECKPOINT_DIR, WEIGHTS_DIR = "checkpoint", "weights"


def write_checkpoint(
    folder: Path, *, model: Any, engine: Engine, progress: checkpoint.Progress, rank: int
) -> None:
    """`folder/checkpoint`, with the random state as it is now; every rank calls it."""
    if rank == 0:
        (folder / CHECKPOINT_DIR).mkdir(parents=True)
    dist.barrier()
    # Other nodes may see it late; being told that it exists, they look again.
    (folder / CHECKPOINT_DIR).mkdir(parents=True, exist_ok=True)
    checkpoint.save(
        folder / CHECKPOINT_DIR,
        model=model,
        optimizer=engine.optimizer,
        scheduler=engine.scheduler,
        rng=rng.capture(),
        progress=progress,
    )


def seal_role(attempt_dir: Path, *, rank: int, num_ranks: int) -> list[FileEntry]:
    """Fsync and digest: each rank its own tensor files, rank 0 the rest. Entries on rank 0."""
    folders = (CHECKPOINT_DIR, WEIGHTS_DIR) if rank == 0 else (CHECKPOINT_DIR,)
    names = [f"{folder}/{name}" for folder in folders for name in list_files(attempt_dir / folder)]
    return seal_shares(attempt_dir, names, rank=rank, num_ranks=num_ranks)
