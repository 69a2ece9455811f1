"""Megatron in one process, on the CPU, with no run around it: for `slurm-rl convert`.

Owns the process groups of a world of one, and takes them down again.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

from slurm_rl.train import cpu


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside, models can be built, loaded, exported and saved, by this process alone.

    Where a GPU is to be left out, CUDA_VISIBLE_DEVICES must say so before torch is imported.
    """
    import torch.distributed as dist

    with cpu.megatron_imports():
        from megatron.core import parallel_state
        from torch._C._distributed_c10d import HashStore
    with warnings.catch_warnings(), cpu.stand_ins():
        for package in ("torch", "megatron"):
            warnings.filterwarnings("ignore", module=rf"{package}(\.|$)")
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        try:
            parallel_state.initialize_model_parallel()
            yield
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
