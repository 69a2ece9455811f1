"""Which of our Triton kernels this process can use.

They need a GPU, the package triton, and what it builds launchers with: a C compiler, Python's
headers, a folder for its cache. So they are tried once, on a few numbers. Where that fails the log
says once why, and PyTorch's operations compute the same, on all ranks (`agreed`).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import shutil
from types import ModuleType

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)


def find_kernels(name: str) -> ModuleType | None:
    """The module `slurm_rl.train.<name>` of kernels; None where it cannot be used."""
    return importlib.import_module(f"slurm_rl.train.{name}") if _are_usable() else None


def agreed() -> bool:
    """Whether every rank can use them; all ranks call it. One that could not would not only round
    otherwise: what the others sum over tensor ranks would be something else."""
    if not torch.cuda.is_available():
        return False
    mine = torch.tensor(_are_usable(), dtype=torch.int32, device=torch.cuda.current_device())
    if dist.is_initialized():
        dist.all_reduce(mine, op=dist.ReduceOp.MIN)
    return bool(mine)


@functools.cache
def _are_usable() -> bool:
    if not torch.cuda.is_available():
        return False
    problem = what_is_missing() or _try()
    if problem:
        log.warning("%s: PyTorch's operations in place of the fused kernels", problem)
    return not problem


def what_is_missing() -> str:
    """Besides a GPU; nothing: an empty string."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is missing"
    compilers = filter(None, (os.environ.get("CC"), "gcc", "clang"))
    if not any(shutil.which(name) for name in compilers):
        return "a C compiler (CC, gcc or clang), which triton needs, is missing"
    return ""


def _try() -> str:
    """What one small kernel fails with: a header or a library that is not there, a cache that
    cannot be written, a GPU that this triton does not know."""
    try:
        layers = importlib.import_module("slurm_rl.train.fused_layers")
        layers.SwiGLUFunction.apply(torch.ones(1, 2, device=torch.cuda.current_device()))
        torch.cuda.synchronize()
    except Exception as error:  # a compiler's or a driver's, whatever it is
        first = str(error).strip().partition("\n")[0]
        return f"a kernel cannot be built or run ({type(error).__name__}: {first})"
    return ""
