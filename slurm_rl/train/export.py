"""The trained weights as a Hugging Face directory that transformers and SGLang load.

Owns the way from shards, over any tensor-, pipeline- and expert-parallel layout, to whole tensors
on rank 0. The names are `models/tensors.py`'s, the files `weights.py`'s. What else the source held
(config, tokenizer, chat template) goes along unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from slurm_rl.models.geometry import Geometry
from slurm_rl.models.tensors import Rule, list_rules
from slurm_rl.train.loading import local_rules, tensor_place
from slurm_rl.train.shards import join_shards
from slurm_rl.train.weights import WeightsLayout, read_companions, write_weights

__all__ = ["export_weights", "read_companions"]

#: A parameter of the whole model: its name in the rules, layer and expert.
_Key = tuple[str, int | None, int | None]


def export_weights(
    folder: Path,
    *,
    model: Any,
    geometry: Geometry,
    layout: WeightsLayout,
    companions: dict[str, bytes],
) -> None:
    """Write the model (or this rank's chunks of it) into `folder` (made here), on rank 0; every
    rank calls it.

    Tensors keep the files, dtypes and names of `layout`: unchanged weights give the same
    bytes. They come file by file, so that rank 0 holds no more than about one file. A crash midway
    leaves files that nothing names yet.
    """
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


@dataclass(frozen=True, slots=True)
class _Shard:
    """One rank's part of a parameter: which one of how many, and what arrives on rank 0."""

    rank: int
    index: int
    size: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def _gather(
    model: Any, *, geometry: Geometry, layout: WeightsLayout
) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors by name, on rank 0; the other ranks hand over their parts and yield none."""
    local = {_key(rule): (rule, tensor.data) for rule, tensor in local_rules(geometry, model)}
    sources, rank = _sources(local), dist.get_rank()
    for rule in _by_file(list(list_rules(geometry)), layout):
        shards = []
        for source in sources[_key(rule)]:
            own = local[_key(rule)][1] if source.rank == rank else None
            shard = _to_first(source, own)
            if shard is not None:
                shards.append(shard)
        if rank == 0:
            whole = join_shards(rule, shards, geometry=geometry)
            yield from whole.items()
            if "lm_head.weight" in layout.dtypes and geometry.tied and rule.kind == "vocab":
                yield "lm_head.weight", whole[rule.hf[0]]


def _key(rule: Rule) -> _Key:
    return rule.megatron, rule.layer, rule.expert


def _by_file(rules: list[Rule], layout: WeightsLayout) -> list[Rule]:
    """The rules, those of a file together, whatever order the files' makers had."""
    home = {t: i for i, members in enumerate(layout.files.values()) for t in members}
    return sorted(rules, key=lambda rule: min(home[name] for name in rule.hf))


def _sources(local: dict[_Key, tuple[Rule, torch.Tensor]]) -> dict[_Key, list[_Shard]]:
    """For each parameter the ranks that hand over its parts, in the parts' order.

    Of the ranks that have the same part, the first.
    """
    own: dict[_Key, _Shard] = {}
    data = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    experts = parallel_state.get_expert_data_parallel_rank()
    for key, (rule, tensor) in local.items():
        if (data if rule.expert is None else experts) == 0:  # replicas need not be named
            index, size = tensor_place(rule)
            if rule.kind == "whole":
                index, size = 0, 1
            own[key] = _Shard(dist.get_rank(), index, size, tuple(tensor.shape), tensor.dtype)
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, own)
    found: dict[_Key, dict[int, _Shard]] = {}
    for part in held:
        for key, shard in part.items():
            found.setdefault(key, {}).setdefault(shard.index, shard)
    for key, parts in found.items():
        assert sorted(parts) == list(range(next(iter(parts.values())).size)), f"{key}: {parts}"
    return {key: [parts[i] for i in sorted(parts)] for key, parts in found.items()}


def _to_first(source: _Shard, own: torch.Tensor | None) -> torch.Tensor | None:
    """The part on rank 0, sent by the rank that has it; None on the others."""
    rank = dist.get_rank()
    if source.rank == 0:
        return own
    if rank == source.rank:
        assert own is not None
        dist.send(own.contiguous(), dst=0)
        return None
    if rank != 0:
        return None
    device = torch.cuda.current_device()
    received = torch.empty(source.shape, dtype=source.dtype, device=device)
    dist.recv(received, src=source.rank)
    return received
