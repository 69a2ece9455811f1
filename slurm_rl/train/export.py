"""The trained weights as a Hugging Face directory that transformers and SGLang load.

Owns the way from tensor- and pipeline-parallel shards to whole tensors on rank 0. The names
and layouts are `families.py`'s, the files `weights.py`'s. What else the source directory held
(config, tokenizer, chat template) goes along unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from slurm_rl.train.families import Rule, join_shards, list_rules
from slurm_rl.train.geometry import Geometry
from slurm_rl.train.loading import local_rules
from slurm_rl.train.weights import INDEX, WeightsLayout, write_weights

#: Names of the ways to store weights: never taken along, since they would be stale.
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")


def read_companions(folder: Path) -> dict[str, bytes]:
    """What lies in a Hugging Face directory beside its weights: name -> bytes."""
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != INDEX and path.suffix not in _WEIGHT_SUFFIXES
    }


def export_weights(
    folder: Path,
    *,
    model: Any,
    geometry: Geometry,
    layout: WeightsLayout,
    companions: dict[str, bytes],
) -> None:
    """Write the model into `folder` (made here); every rank calls it, rank 0 writes.

    Tensors keep the files, dtypes and names of `layout`: unchanged weights give the same
    bytes. A crash midway leaves files that nothing names yet.
    """
    if parallel_state.get_data_parallel_rank(with_context_parallel=True) != 0:
        return
    stream = _gather(model, geometry=geometry, layout=layout)
    if dist.get_rank() != 0:
        for _ in stream:
            pass
        return
    folder.mkdir()
    for name, data in companions.items():
        (folder / name).write_bytes(data)
    for _ in write_weights(folder, stream, layout=layout):
        pass


@torch.no_grad()
def _gather(
    model: Any, *, geometry: Geometry, layout: WeightsLayout
) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole Hugging Face tensors, one Megatron parameter at a time; on tensor rank 0."""
    local = {
        (rule.layer, rule.megatron): parameter for rule, parameter in local_rules(geometry, model)
    }
    owners = _owners(list(local))
    dtype = next(iter(local.values())).dtype
    for rule in list_rules(geometry):
        key = (rule.layer, rule.megatron)
        whole: dict[str, torch.Tensor] = {}
        if owners[key] == parallel_state.get_pipeline_model_parallel_rank():
            whole = join_shards(rule, _all_shards(local[key].data), geometry=geometry)
        if parallel_state.get_tensor_model_parallel_rank() == 0:
            yield from _send_to_first(rule, whole, owner=owners[key], layout=layout, dtype=dtype)
            if (
                geometry.tied
                and key[1].startswith("embedding")
                and "lm_head.weight" in layout.dtypes
            ):
                yield "lm_head.weight", whole[rule.hf[0]]


def _owners(keys: list[Any]) -> dict[Any, int]:
    """Which pipeline rank has a parameter; the first one, where two have it."""
    group = parallel_state.get_pipeline_model_parallel_group()
    held: list[Any] = [None] * group.size()
    dist.all_gather_object(held, keys, group=group)
    return {key: rank for rank in reversed(range(len(held))) for key in held[rank]}


def _all_shards(shard: torch.Tensor) -> list[torch.Tensor]:
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(shards, shard.contiguous(), group=group)
    return shards


def _send_to_first(
    rule: Rule,
    whole: dict[str, torch.Tensor],
    *,
    owner: int,
    layout: WeightsLayout,
    dtype: torch.dtype,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Hand the tensors from the pipeline rank that has them to the first one."""
    group = parallel_state.get_pipeline_model_parallel_group()
    for name in rule.hf:
        tensor = whole.get(name)
        if owner != 0:
            if tensor is None:
                shape, device = layout.shapes[name], torch.cuda.current_device()
                tensor = torch.empty(shape, dtype=dtype, device=device)
            tensor = tensor.contiguous()
            dist.broadcast(tensor, src=dist.get_global_rank(group, owner), group=group)
        if tensor is not None:
            yield name, tensor
