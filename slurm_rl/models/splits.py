"""Whether a model can be laid out over ranks as the settings ask: what must divide what. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slurm_rl.errors import ConfigError
from slurm_rl.models.geometry import Geometry
from slurm_rl.models.layout import Layout

_TENSOR = "tensor_model_parallel_size"
_PIPELINE = "pipeline_model_parallel_size"
_EXPERTS = "expert_model_parallel_size"
_EXPERT_TENSOR = "expert_tensor_parallel_size"
_VIRTUAL = "virtual_pipeline_model_parallel_size"


@dataclass(frozen=True, slots=True)
class Misfit:
    """A setting of Megatron's that the model cannot have, why, and the way out."""

    key: str
    value: int
    rule: str
    fix: str


def check_split(geometry: Geometry, layout: Layout, *, sequence_parallel: bool) -> None:
    """ConfigError unless the model can be laid out so."""
    for misfit in find_misfits(geometry, layout, sequence_parallel=sequence_parallel):
        raise ConfigError(
            f"train.megatron.{misfit.key} = {misfit.value} {misfit.rule}", hint=misfit.fix
        )


def find_misfits(
    geometry: Geometry, layout: Layout, *, sequence_parallel: bool
) -> Iterator[Misfit]:
    """Groups, widths, experts and layers must be split evenly; one line for each that is not."""
    if geometry.moe is None and layout.experts > 1:
        rule = "has no effect: the model has no experts"
        yield Misfit(_EXPERTS, layout.experts, rule, "leave it out")
    if geometry.moe is not None and layout.tensor > 1 and not sequence_parallel:
        rule = (
            "is without sequence_parallel: tensor ranks would send each token to its experts twice"
        )
        yield Misfit(_TENSOR, layout.tensor, rule, "set sequence_parallel: true beside it")
    for value, what, size, key in (
        *_tensor_divisions(geometry, layout),
        *_expert_divisions(geometry, layout),
        (geometry.num_layers, "num_hidden_layers", layout.pipeline, _PIPELINE),
    ):
        if value % size:
            rule = f"does not divide the model's {what} = {value}"
            yield Misfit(key, size, rule, "choose a divisor")
    stages = layout.pipeline * layout.chunks
    if layout.chunks > 1 and geometry.num_layers % stages:
        rule = f"× {_PIPELINE} = {stages} does not divide the model's num_hidden_layers = "
        yield Misfit(_VIRTUAL, layout.chunks, f"{rule}{geometry.num_layers}", "choose a divisor")


#: A number of the model's, what it is, what must divide it, and the setting of that.
_Division = tuple[int, str, int, str]


def _tensor_divisions(geometry: Geometry, layout: Layout) -> Iterator[_Division]:
    g, mla, size = geometry, geometry.mla, layout.tensor
    yield g.num_heads, "num_attention_heads", size, _TENSOR
    yield g.num_groups, "num_key_value_heads", size, _TENSOR
    yield g.ffn_hidden_size, "intermediate_size", size, _TENSOR
    if mla is not None:
        yield mla.q_lora_rank or 0, "q_lora_rank", size, _TENSOR
        latent = mla.kv_lora_rank + mla.qk_rope_head_dim
        yield latent, "kv_lora_rank + qk_rope_head_dim", size, _TENSOR


def _expert_divisions(geometry: Geometry, layout: Layout) -> Iterator[_Division]:
    moe = geometry.moe
    if moe is None:
        return
    yield moe.num_experts, "number of experts", layout.experts, _EXPERTS
    key = _TENSOR if layout.expert_tensor is None else _EXPERT_TENSOR
    yield moe.expert_ffn_size, "experts' width", layout.expert_tensor or layout.tensor, key
    yield moe.shared_ffn_size or 0, "shared experts' width", layout.tensor, _TENSOR
