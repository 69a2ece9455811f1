"""The layer specification: Megatron's local modules with attention and norms of ours, or
TransformerEngine's.

Why not Megatron's own local attention: it builds the whole [s, s] matrix, and takes neither packed
sequences nor context parallelism; its RMSNorm refuses sequence parallelism. Parameter names are
those of Megatron's local spec, so that checkpoints and the table of names do not depend on this
module.
Runs on CPU and GPU; needs neither TransformerEngine nor Apex. On a GPU with Triton some of it goes
through kernels of our own (`fused.py`).

`train.megatron.transformer_impl: transformer_engine` takes Megatron's own spec of these modules
instead, as it is. It needs a GPU and the package. That way has been run by no test of this project;
`models/tensors.py` knows its parameters' names from Megatron's source.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import (
    LayerNormImpl,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from slurm_rl.train.attention import CausalAttention
from slurm_rl.train.fused import kernels_of


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose gradient Megatron sums over tensor ranks under sequence parallelism."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__(
            hidden_size,
            eps=eps,
            dtype=config.params_dtype,
            device=None if config.use_cpu_initialization else torch.cuda.current_device(),
        )
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010
        self._kernels = kernels_of(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._kernels is None:
            return super().forward(x)
        normed: torch.Tensor = self._kernels.RMSNormFunction.apply(x, self.weight, self.eps)
        return normed


def block_spec(
    config: TransformerConfig, *, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The decoder of this pipeline rank (or of one of its chunks): its layers and, on the last
    rank, the final norm."""
    with_te = config.transformer_impl == "transformer_engine"
    make = _te_layer_spec if with_te else _layer_spec
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    numbers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    has_experts = [_has_experts(config, number) for number in numbers]
    kinds = {kind: make(config, is_moe=kind) for kind in set(has_experts)}
    layers = [kinds[kind] for kind in has_experts]
    norm = LayerNormImpl if with_te else RMSNorm
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _has_experts(config: TransformerConfig, number: int) -> bool:
    """Whether the MLP of layer `number`, from 0, is a mixture of experts."""
    if config.num_moe_experts is None:
        return False
    pattern = config.moe_layer_freq
    return bool(pattern[number]) if isinstance(pattern, list) else number % pattern == 0


def _layer_spec(config: TransformerConfig, *, is_moe: bool) -> Any:
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if is_moe else None,
        moe_grouped_gemm=is_moe and config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = CausalAttention
    for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
        if getattr(attention, name, IdentityOp) is not IdentityOp:
            setattr(attention, name, RMSNorm)
    return layer


def _te_layer_spec(config: TransformerConfig, *, is_moe: bool) -> Any:
    return get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if is_moe else None,
        moe_grouped_gemm=is_moe and config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
    )
