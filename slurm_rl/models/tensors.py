"""Names and shapes of weights, Hugging Face <-> Megatron, as one table.

A rule says which Hugging Face tensors a Megatron parameter is made of, and how it is split over
tensor-parallel ranks. What a family calls its tensors is `families_table.py`'s; cutting and joining
the tensors themselves is `train/shards.py`'s. It imports neither torch nor Megatron.

    kind      Megatron parameter                       split over tensor ranks
    whole     the tensor itself                        every rank has all of it
    columns   the tensor itself                        along dimension 1
    rows      the tensor itself                        along dimension 0
    vocab     the tensor, padded with zero rows        along dimension 0
    gate_up   [gate; up] of the rank's own rows, from  along dimension 0, each half
              two tensors or from one that has both
    qkv       for each key-value group: its queries,   along dimension 0, by groups
              its key, its value (weights and biases)

An expert's parameters are split over the expert-tensor-parallel ranks, and are of one
expert-parallel rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slurm_rl.errors import ModelError
from slurm_rl.models.families_table import FAMILIES, Names
from slurm_rl.models.geometry import Geometry

Kind = Literal["whole", "columns", "rows", "vocab", "gate_up", "qkv"]
Shape = tuple[int, ...]

#: Families whose checkpoints come with a layer beyond the last one, to predict several tokens.
_PREDICTING = ("deepseek_v3", "glm4_moe")
#: What TransformerEngine's spec, which fuses a norm with the linear layer after it and the experts
#: with each other, calls a layer's parameters.
_TE_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
    "mlp.experts.local_experts.{e}.linear_fc1.weight": "mlp.experts.linear_fc1.weight{e}",
    "mlp.experts.local_experts.{e}.linear_fc2.weight": "mlp.experts.linear_fc2.weight{e}",
}


@dataclass(frozen=True, slots=True)
class Rule:
    """One Megatron parameter, and the names and shapes of the tensors that it is made of.

    `layer` is None outside the decoder layers, `expert` outside the experts (global numbers). In
    `megatron` the expert's number is `{e}`.
    """

    megatron: str
    hf: tuple[str, ...]
    kind: Kind
    shapes: tuple[Shape, ...]
    layer: int | None = None
    expert: int | None = None

    def local_names(self, layer: int | None = None, expert: int | None = None) -> tuple[str, ...]:
        """What the parameter may be called in a model whose own numbers are these."""
        prefix = "" if layer is None else f"decoder.layers.{layer}."
        own = (self.megatron, _TE_NAMES.get(self.megatron, self.megatron))
        return tuple(prefix + name.replace("{e}", str(expert)) for name in dict.fromkeys(own))


def list_rules(geometry: Geometry) -> Iterator[Rule]:
    """Every parameter of the model, in the order of its layers; the same on every rank."""
    g = geometry
    table, vector = ((g.vocab_size, g.hidden_size),), ((g.hidden_size,),)
    yield Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab", table)
    for layer in range(g.num_layers):
        yield from _layer_rules(g, layer)
    yield Rule("decoder.final_layernorm.weight", ("model.norm.weight",), "whole", vector)
    if g.value_head:
        head = ((1, g.hidden_size),)
        yield Rule("output_layer.weight", ("score.weight",), "whole", head)
        yield Rule("output_layer.bias", ("score.bias",), "whole", ((1,),))
    elif not g.tied:
        yield Rule("output_layer.weight", ("lm_head.weight",), "vocab", table)


class _Layer:
    """Makes the rules of one decoder layer."""

    def __init__(self, layer: int) -> None:
        self._layer = layer

    def rule(
        self, megatron: str, kind: Kind, *tensors: tuple[str, Shape], expert: int | None = None
    ) -> Rule:
        hf = tuple(f"model.layers.{self._layer}.{name}" for name, _ in tensors)
        shapes = tuple(shape for _, shape in tensors)
        return Rule(megatron, hf, kind, shapes, self._layer, expert)

    def norm(self, megatron: str, name: str, size: int) -> Rule:
        return self.rule(f"{megatron}.weight", "whole", (f"{name}.weight", (size,)))


def _layer_rules(geometry: Geometry, number: int) -> Iterator[Rule]:
    g, layer, names = geometry, _Layer(number), FAMILIES[geometry.family].names
    yield layer.norm("input_layernorm", "input_layernorm", g.hidden_size)
    yield from _attention_rules(g, layer) if g.mla is None else _latent_rules(g, layer)
    if g.post_norms:
        yield layer.norm("post_self_attn_layernorm", names.post_attention_norm, g.hidden_size)
    yield layer.norm("pre_mlp_layernorm", names.pre_mlp_norm, g.hidden_size)
    if g.is_moe_layer(number):
        yield from _moe_rules(g, layer, names)
    else:
        yield from _mlp_rules(g, layer, names)
    if g.post_norms:
        yield layer.norm("post_mlp_layernorm", names.post_mlp_norm, g.hidden_size)


def _attention_rules(geometry: Geometry, layer: _Layer) -> Iterator[Rule]:
    g = geometry
    queries, keys = g.num_heads * g.head_dim, g.num_groups * g.head_dim
    rows = {"q": queries, "k": keys, "v": keys}
    for part in ["weight"] + ["bias"] * g.qkv_bias:
        width = (g.hidden_size,) if part == "weight" else ()
        tensors = [(f"self_attn.{x}_proj.{part}", (size, *width)) for x, size in rows.items()]
        yield layer.rule(f"self_attention.linear_qkv.{part}", "qkv", *tensors)
    if g.qk_norm:
        for x in "qk":
            yield layer.norm(f"self_attention.{x}_layernorm", f"self_attn.{x}_norm", g.head_dim)
    out = ("self_attn.o_proj.weight", (g.hidden_size, queries))
    yield layer.rule("self_attention.linear_proj.weight", "columns", out)


def _latent_rules(geometry: Geometry, layer: _Layer) -> Iterator[Rule]:
    g, mla = geometry, geometry.mla
    assert mla is not None

    def rows(megatron: str, name: str, *shape: int) -> Rule:
        weight = (f"self_attn.{name}.weight", shape)
        return layer.rule(f"self_attention.{megatron}.weight", "rows", weight)

    queries = g.num_heads * mla.qk_head_dim
    if mla.q_lora_rank is None:
        yield rows("linear_q_proj", "q_proj", queries, g.hidden_size)
    else:
        rank = mla.q_lora_rank
        yield rows("linear_q_down_proj", "q_a_proj", rank, g.hidden_size)
        yield layer.norm("self_attention.q_layernorm", "self_attn.q_a_layernorm", rank)
        yield rows("linear_q_up_proj", "q_b_proj", queries, rank)
    down, rank = mla.kv_lora_rank + mla.qk_rope_head_dim, mla.kv_lora_rank
    yield rows("linear_kv_down_proj", "kv_a_proj_with_mqa", down, g.hidden_size)
    yield layer.norm("self_attention.kv_layernorm", "self_attn.kv_a_layernorm", rank)
    up = g.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    yield rows("linear_kv_up_proj", "kv_b_proj", up, rank)
    out = ("self_attn.o_proj.weight", (g.hidden_size, g.num_heads * mla.v_head_dim))
    yield layer.rule("self_attention.linear_proj.weight", "columns", out)


def _mlp_rules(geometry: Geometry, layer: _Layer, names: Names) -> Iterator[Rule]:
    hidden, width = geometry.hidden_size, geometry.ffn_hidden_size
    if names.gate_up:
        both = (f"{names.gate_up}.weight", (2 * width, hidden))
        yield layer.rule("mlp.linear_fc1.weight", "gate_up", both)
    else:
        halves = [(f"{name}.weight", (width, hidden)) for name in (names.gate, names.up)]
        yield layer.rule("mlp.linear_fc1.weight", "gate_up", *halves)
    yield layer.rule("mlp.linear_fc2.weight", "columns", (f"{names.down}.weight", (hidden, width)))


def _moe_rules(geometry: Geometry, layer: _Layer, names: Names) -> Iterator[Rule]:
    hidden, moe = geometry.hidden_size, geometry.moe
    assert moe is not None
    router = (f"{names.router}.weight", (moe.num_experts, hidden))
    yield layer.rule("mlp.router.weight", "whole", router)
    if moe.expert_bias:
        bias = (names.router_bias, (moe.num_experts,))
        yield layer.rule("mlp.router.expert_bias", "whole", bias)
    width = moe.expert_ffn_size
    inward = (names.expert_gate, names.expert_up)
    for e in range(moe.num_experts):
        halves = [(f"{name.format(e=e)}.weight", (width, hidden)) for name in inward]
        own = "mlp.experts.local_experts.{e}."
        yield layer.rule(own + "linear_fc1.weight", "gate_up", *halves, expert=e)
        down = (f"{names.expert_down.format(e=e)}.weight", (hidden, width))
        yield layer.rule(own + "linear_fc2.weight", "columns", down, expert=e)
    if moe.shared_ffn_size is not None:
        yield from _shared_rules(geometry, layer, names, width=moe.shared_ffn_size)


def _shared_rules(geometry: Geometry, layer: _Layer, names: Names, *, width: int) -> Iterator[Rule]:
    hidden, own = geometry.hidden_size, "mlp.shared_experts."
    halves = [(f"{names.shared}.{x}_proj.weight", (width, hidden)) for x in ("gate", "up")]
    yield layer.rule(own + "linear_fc1.weight", "gate_up", *halves)
    down = (f"{names.shared}.down_proj.weight", (hidden, width))
    yield layer.rule(own + "linear_fc2.weight", "columns", down)
    if geometry.moe is not None and geometry.moe.shared_gate:
        gate = (f"{names.shared_gate}.weight", (1, hidden))
        yield layer.rule(own + "gate_weight", "whole", gate)


def check_tensors(geometry: Geometry, *, folder: Path, shapes: Mapping[str, Shape]) -> None:
    """ModelError unless the files hold exactly the model's tensors, in the model's shapes.

    With tied embeddings a copy of them as `lm_head.weight` is accepted.
    """
    wanted = hf_shapes(geometry)
    optional = {"lm_head.weight"} if geometry.tied else set()
    beyond = f"model.layers.{geometry.num_layers}."
    if geometry.family in _PREDICTING and any(name.startswith(beyond) for name in shapes):
        raise ModelError(
            f"{folder}: tensors {beyond}* are of a layer for multi-token prediction, which is not "
            "supported",
            hint="take them, and num_nextn_predict_layers in config.json, out of a copy",
        )
    for what, names in (
        ("is missing", wanted.keys() - shapes.keys()),
        ("is not part of such a model", shapes.keys() - wanted.keys() - optional),
    ):
        if names:
            raise ModelError(
                f"{folder}: tensor {min(names)} {what} (one of {len(names)})",
                hint=f"config.json says {geometry.family}, {geometry.num_layers} layers, "
                f"embeddings {'tied' if geometry.tied else 'not tied'}",
            )
    for name, shape in shapes.items():
        if name in wanted and shape != wanted[name]:
            raise ModelError(
                f"{folder}: tensor {name} has shape {list(shape)}, but config.json makes it "
                f"{list(wanted[name])}",
                hint="the weights are of another model than config.json",
            )


def hf_shapes(geometry: Geometry) -> dict[str, Shape]:
    """Each Hugging Face tensor of the model and its shape, in the order of the layers."""
    return {
        name: shape
        for rule in list_rules(geometry)
        for name, shape in zip(rule.hf, rule.shapes, strict=True)
    }
