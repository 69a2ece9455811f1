"""What holds while the trainer works: stand-ins, quiet, determinism, words for a full disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from slurm_rl.errors import SpaceError
from slurm_rl.train import cpu

#: Less than this left after a failed write: that was the reason.
_FULL_BYTES = 1 << 20


@contextlib.contextmanager
def explaining_a_full_disk(folder: Path) -> Iterator[None]:
    """torch and safetensors report a full disk as one of a dozen errors; look at the disk."""
    try:
        yield
    except Exception as error:
        free_bytes = shutil.disk_usage(folder).free
        if free_bytes < _FULL_BYTES:
            raise SpaceError(
                f"{folder}: the checkpoint does not fit: {free_bytes} bytes are left",
                hint="free space or quota in the run's file system, then `slurm-rl resume`",
            ) from error
        raise


def prepare_determinism() -> None:
    """What must be in the environment before CUDA starts, and before the first group is made."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "Ring")


@contextlib.contextmanager
def deterministic_scope() -> Iterator[None]:
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    # One thread: how a sum is split over threads changes its last bits.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict)
        memory.fill_uninitialized_memory = fill


@contextlib.contextmanager
def megatron_scope() -> Iterator[None]:
    """Where Megatron is called: on a CPU with its stand-ins, and without the warnings that
    torch and Megatron give each other's calls."""
    with warnings.catch_warnings(), cpu.stand_ins():
        for package in ("torch", "megatron"):
            warnings.filterwarnings("ignore", module=rf"{package}(\.|$)")
        yield
