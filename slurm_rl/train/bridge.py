"""Conversion by mbridge instead of our own table: for families that `families_table.py` lacks.

mbridge builds Megatron's model with TransformerEngine's modules, so that this runs where both are
installed, on a GPU, and nowhere else. Which families it knows, and how well, is mbridge's.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurm_rl.errors import ConfigError

_NEEDED = ("mbridge", "transformer_engine")


def check_bridge() -> None:
    """ConfigError, saying what to install, unless mbridge can be used here."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"--through mbridge needs {' and '.join(missing)}, not installed here",
            hint="pip install mbridge 'transformer-engine[pytorch]' on a machine with a GPU, or "
            "leave --through out",
        )


def hf_to_megatron(source: Path, target: Path) -> None:
    """As `convert.hf_to_megatron`, of any family that mbridge knows."""
    with _world():
        from slurm_rl.train.checkpoint import save_model
        from slurm_rl.train.chunks import Chunks

        bridge, models = _build(source)
        bridge.load_weights(models, str(source))
        target.mkdir()
        save_model(target, model=Chunks(models) if len(models) > 1 else models[0], facts={})


def megatron_to_hf(source: Path, target: Path, *, like: Path) -> None:
    """As `convert.megatron_to_hf`, of any family that mbridge knows."""
    with _world():
        from slurm_rl.train.checkpoint import load_model

        bridge, models = _build(like)
        load_model(source, model=models[0])
        target.mkdir()
        bridge.save_weights(models, str(target))


def _build(folder: Path) -> tuple[Any, list[Any]]:
    bridge = importlib.import_module("mbridge").AutoBridge.from_pretrained(str(folder))
    return bridge, list(bridge.get_model(wrap_with_ddp=False))


@contextlib.contextmanager
def _world() -> Iterator[None]:
    """This process alone, with collectives for tensors of both kinds."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from torch._C._distributed_c10d import HashStore

    torch.cuda.set_device(0)
    backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(0)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
