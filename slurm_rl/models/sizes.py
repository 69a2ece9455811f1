"""Whether the sizes that a `config.json` gives can be those of a decoder. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from slurm_rl.models.headers import DTYPES

if TYPE_CHECKING:
    from slurm_rl.models.geometry import Geometry

#: What every family needs to be told.
REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)
#: Whole numbers, at least one; None where the family has a way without.
_AT_LEAST_ONE = (
    *REQUIRED,
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_group",
    "topk_group",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
#: Numbers above zero.
_ABOVE_ZERO = ("rms_norm_eps", "rope_theta", "partial_rotary_factor")


def problem_of_numbers(config: Mapping[str, Any]) -> str:
    """What is wrong with a number of a config by itself; "" if nothing."""
    for key in REQUIRED:
        if key in config and config[key] is None:
            return f"{key} = null is no whole number of at least 1"
    for key in _AT_LEAST_ONE:
        value = config.get(key)
        if value is not None and not (type(value) is int and value >= 1):
            return f"{key} = {value!r} is no whole number of at least 1"
    for key in _ABOVE_ZERO:
        value = config.get(key)
        if value is not None and not (type(value) in (int, float) and value > 0):
            return f"{key} = {value!r} is no number above 0"
    return ""


def problem_of_shape(geometry: Geometry, *, has_head_dim: bool) -> str:
    """What of a shape contradicts another part of it; "" if nothing.

    has_head_dim: whether the config says how wide a head is.
    """
    return next(_contradictions(geometry, has_head_dim=has_head_dim), "")


def _contradictions(geometry: Geometry, *, has_head_dim: bool) -> Iterator[str]:
    g, moe, mla = geometry, geometry.moe, geometry.mla
    if g.dtype not in DTYPES.values():
        yield f"dtype = {g.dtype!r} is not supported; only {', '.join(DTYPES.values())} are"
    if g.num_heads % g.num_groups:
        groups = f"num_key_value_heads = {g.num_groups}"
        yield f"num_attention_heads = {g.num_heads} is no multiple of {groups}"
    if g.hidden_size % g.num_heads and not has_head_dim and mla is None:
        heads = f"num_attention_heads = {g.num_heads}"
        yield f"hidden_size = {g.hidden_size} is no multiple of {heads}, and head_dim is missing"
    rotated = int(g.head_dim * g.rotary_percent) if mla is None else mla.qk_rope_head_dim
    if rotated < 2 or rotated % 2:
        yield f"{rotated} numbers of each head are rotated, which is no multiple of 2"
    if moe is not None and moe.top_k > moe.num_experts:
        yield f"num_experts_per_tok = {moe.top_k} is more than the {moe.num_experts} experts"
    if moe is not None and moe.num_groups is not None and moe.num_experts % moe.num_groups:
        yield f"n_group = {moe.num_groups} does not divide the {moe.num_experts} experts"
