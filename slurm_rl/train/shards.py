"""Cuts Hugging Face tensors into what each tensor-parallel rank holds, and joins them again.

By the rules of `models/tensors.py`; both directions are pure functions on tensors. Files are
`weights.py`'s, collectives are `export.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from slurm_rl.models.geometry import Geometry
from slurm_rl.models.tensors import Rule

#: Reads rows (axis 0) or columns (axis 1) start:stop of a named Hugging Face tensor; the
#: whole tensor if axis is None.
Read = Callable[[str, int | None, int, int], torch.Tensor]


def read_shard(
    rule: Rule, read: Read, *, geometry: Geometry, tp_rank: int, tp_size: int
) -> torch.Tensor:
    """What tensor rank `tp_rank` of `tp_size` holds of the parameter, in the files' dtype."""
    if rule.kind == "whole":
        return read(rule.hf[0], None, 0, 0)
    if rule.kind == "vocab":
        return _read_vocab(rule, read, geometry=geometry, tp_rank=tp_rank, tp_size=tp_size)

    def part(name: str, axis: int, length: int, first: int = 0) -> torch.Tensor:
        step = length // tp_size
        return read(name, axis, first + tp_rank * step, first + (tp_rank + 1) * step)

    if rule.kind == "columns":
        return part(rule.hf[0], 1, rule.shapes[0][1])
    if rule.kind == "gate_up" and len(rule.hf) == 1:
        half = rule.shapes[0][0] // 2
        return torch.cat([part(rule.hf[0], 0, half, first) for first in (0, half)])
    parts = [part(name, 0, s[0]) for name, s in zip(rule.hf, rule.shapes, strict=True)]
    if rule.kind == "qkv":
        groups = geometry.num_groups // tp_size
        blocks = [t.reshape(groups, -1, *t.shape[1:]) for t in parts]
        return torch.cat(blocks, dim=1).reshape(-1, *parts[0].shape[1:])
    return torch.cat(parts)


def join_shards(
    rule: Rule, shards: list[torch.Tensor], *, geometry: Geometry
) -> dict[str, torch.Tensor]:
    """Hugging Face tensors from the shards of all tensor ranks, in order; the inverse of
    `read_shard`. Vocabulary padding is cut off."""
    g = geometry
    if rule.kind == "whole":
        return {rule.hf[0]: shards[0]}
    if rule.kind == "columns":
        return {rule.hf[0]: torch.cat(shards, dim=1)}
    if rule.kind == "gate_up":
        pairs = [shard.chunk(2) for shard in shards]
        halves = [torch.cat([pair[i] for pair in pairs]) for i in (0, 1)]
        parts = halves if len(rule.hf) == 2 else [torch.cat(halves)]
        return dict(zip(rule.hf, parts, strict=True))
    full = torch.cat(shards)
    if rule.kind == "qkv":
        blocks = full.reshape(g.num_groups, -1, *full.shape[1:])
        queries = g.num_heads // g.num_groups * g.head_dim
        cut = blocks.split([queries, g.head_dim, g.head_dim], dim=1)
        return {n: p.reshape(-1, *full.shape[1:]) for n, p in zip(rule.hf, cut, strict=True)}
    return {rule.hf[0]: full[: rule.shapes[0][0]]}


def _read_vocab(
    rule: Rule, read: Read, *, geometry: Geometry, tp_rank: int, tp_size: int
) -> torch.Tensor:
    rows = geometry.padded_vocab(tp_size) // tp_size
    start = min(tp_rank * rows, geometry.vocab_size)
    stop = min(start + rows, geometry.vocab_size)
    if start == stop:
        # A rank that holds nothing but padding still needs the width and the dtype.
        tensor = read(rule.hf[0], 0, 0, 1)[:0]
    else:
        tensor = read(rule.hf[0], 0, start, stop)
    padding = tensor.new_zeros(rows - (stop - start), *tensor.shape[1:])
    return torch.cat([tensor, padding])
