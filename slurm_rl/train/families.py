"""Names and layouts of weights, Hugging Face <-> Megatron, as one table.

A rule says how one Megatron parameter is made of Hugging Face tensors and how it is split
over tensor-parallel ranks. Both directions are pure functions on tensors; files are
`weights.py`'s, collectives are `export.py`'s.

    kind      Megatron parameter                       split over tensor ranks
    whole     the tensor itself                        every rank has all of it
    columns   the tensor itself                        along dimension 1
    vocab     the tensor, padded with zero rows        along dimension 0
    gate_up   [gate; up] of the rank's own rows        along dimension 0, each half
    qkv       for each key-value group: its queries,   along dimension 0, by groups
              its key, its value (weights and biases)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from slurm_rl.errors import ConfigError, ModelError
from slurm_rl.train.geometry import Geometry
from slurm_rl.train.weights import WeightsLayout

#: Reads rows (axis 0) or columns (axis 1) start:stop of a named Hugging Face tensor; the
#: whole tensor if axis is None.
Read = Callable[[str, int | None, int, int], torch.Tensor]
Kind = Literal["whole", "columns", "vocab", "gate_up", "qkv"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One Megatron parameter. `layer` is None outside the decoder layers (global numbers)."""

    megatron: str
    hf: tuple[str, ...]
    kind: Kind
    layer: int | None = None

    def local_name(self, layer_offset: int) -> str:
        """The parameter's name on a pipeline rank whose first layer is `layer_offset`."""
        if self.layer is None:
            return self.megatron
        return f"decoder.layers.{self.layer - layer_offset}.{self.megatron}"


_ATTENTION = ("q", "k", "v")


def list_rules(geometry: Geometry) -> Iterator[Rule]:
    """Every parameter of the model, in the order of its layers; the same on every rank."""
    yield Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab")
    for layer in range(geometry.num_layers):
        yield from _layer_rules(geometry, layer)
    yield Rule("decoder.final_layernorm.weight", ("model.norm.weight",), "whole")
    if not geometry.tied:
        yield Rule("output_layer.weight", ("lm_head.weight",), "vocab")


def _layer_rules(geometry: Geometry, layer: int) -> Iterator[Rule]:
    hf = f"model.layers.{layer}."

    def rule(megatron: str, names: tuple[str, ...], kind: Kind) -> Rule:
        return Rule(megatron, tuple(hf + name for name in names), kind, layer)

    yield rule("input_layernorm.weight", ("input_layernorm.weight",), "whole")
    for part in ["weight"] + ["bias"] * geometry.qkv_bias:
        names = tuple(f"self_attn.{x}_proj.{part}" for x in _ATTENTION)
        yield rule(f"self_attention.linear_qkv.{part}", names, "qkv")
    if geometry.qk_norm:
        for x in "qk":
            names = (f"self_attn.{x}_norm.weight",)
            yield rule(f"self_attention.{x}_layernorm.weight", names, "whole")
    yield rule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), "columns")
    yield rule("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), "whole")
    gate_up = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
    yield rule("mlp.linear_fc1.weight", gate_up, "gate_up")
    yield rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), "columns")


def check_layout(geometry: Geometry, *, tp_size: int, pp_size: int) -> None:
    """ConfigError unless the model can be split so: groups, widths and layers evenly."""
    for value, what, size, key in (
        (geometry.num_groups, "num_key_value_heads", tp_size, "tensor"),
        (geometry.ffn_hidden_size, "intermediate_size", tp_size, "tensor"),
        (geometry.num_layers, "num_hidden_layers", pp_size, "pipeline"),
    ):
        if value % size:
            raise ConfigError(
                f"train.megatron.{key}_model_parallel_size = {size} does not divide the model's "
                f"{what} = {value}",
                hint="choose a divisor",
            )


def check_tensors(geometry: Geometry, *, folder: Path, layout: WeightsLayout) -> None:
    """ModelError unless the files hold exactly the model's tensors.

    With tied embeddings a copy of them as `lm_head.weight` is accepted.
    """
    wanted = {name for rule in list_rules(geometry) for name in rule.hf}
    optional = {"lm_head.weight"} if geometry.tied else set()
    for what, names in (
        ("is missing", wanted - set(layout.dtypes)),
        ("is not part of such a model", set(layout.dtypes) - wanted - optional),
    ):
        if names:
            raise ModelError(
                f"{folder}: tensor {min(names)} {what} (one of {len(names)})",
                hint=f"config.json says {geometry.family}, {geometry.num_layers} layers, "
                f"embeddings {'tied' if geometry.tied else 'not tied'}",
            )


def read_shard(
    rule: Rule, read: Read, *, geometry: Geometry, tp_rank: int, tp_size: int
) -> torch.Tensor:
    """What tensor rank `tp_rank` of `tp_size` holds of the parameter, in the files' dtype."""
    g = geometry

    def part(name: str, axis: int, length: int) -> torch.Tensor:
        step = length // tp_size
        return read(name, axis, tp_rank * step, (tp_rank + 1) * step)

    if rule.kind == "whole":
        return read(rule.hf[0], None, 0, 0)
    if rule.kind == "vocab":
        return _read_vocab(rule, read, geometry=g, tp_rank=tp_rank, tp_size=tp_size)
    if rule.kind == "gate_up":
        return torch.cat([part(name, 0, g.ffn_hidden_size) for name in rule.hf])
    if rule.kind == "columns":
        is_attention = "linear_proj" in rule.megatron
        return part(rule.hf[0], 1, g.num_heads * g.head_dim if is_attention else g.ffn_hidden_size)
    q = part(rule.hf[0], 0, g.num_heads * g.head_dim)
    k, v = (part(name, 0, g.num_groups * g.head_dim) for name in rule.hf[1:])
    groups = g.num_groups // tp_size
    blocks = [t.reshape(groups, -1, *t.shape[1:]) for t in (q, k, v)]
    return torch.cat(blocks, dim=1).reshape(-1, *q.shape[1:])


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
        halves = [shard.chunk(2) for shard in shards]
        return {name: torch.cat([h[i] for h in halves]) for i, name in enumerate(rule.hf)}
    full = torch.cat(shards)
    if rule.kind == "qkv":
        blocks = full.reshape(g.num_groups, -1, *full.shape[1:])
        queries = g.num_heads // g.num_groups * g.head_dim
        parts = blocks.split([queries, g.head_dim, g.head_dim], dim=1)
        return {n: p.reshape(-1, *full.shape[1:]) for n, p in zip(rule.hf, parts, strict=True)}
    return {rule.hf[0]: full[: g.vocab_size]}


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
