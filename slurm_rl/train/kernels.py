"""Which of our Triton kernels this process can use.

They need a GPU, the package triton, and the C compiler with which it builds what launches them.
Where one is missing PyTorch's operations compute the same, and the log says once what is missing.
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

log = logging.getLogger(__name__)


def find_kernels(name: str) -> ModuleType | None:
    """The module `slurm_rl.train.<name>` of kernels; None where it cannot be used."""
    return importlib.import_module(f"slurm_rl.train.{name}") if _are_usable() else None


@functools.cache
def _are_usable() -> bool:
    if not torch.cuda.is_available():
        return False
    missing = what_is_missing()
    if missing:
        log.warning("%s is missing: PyTorch's operations in place of the fused kernels", missing)
    return not missing


def what_is_missing() -> str:
    """Besides a GPU; nothing: an empty string."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton"
    compilers = filter(None, (os.environ.get("CC"), "gcc", "clang"))
    if not any(shutil.which(name) for name in compilers):
        return "a C compiler (CC, gcc or clang), which triton needs,"
    return ""
