"""The layer specification: Megatron's local modules, with PyTorch's fused attention.

Why not Megatron's own local attention: it builds the whole [s, s] matrix, and its RMSNorm
refuses sequence parallelism. Parameter names are those of Megatron's local spec, so that
checkpoints and `families.py` do not depend on this module. Runs on CPU and GPU; needs
neither TransformerEngine nor Apex. Context parallelism and packed (thd) input are refused.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional


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


class CausalAttention(MegatronModule):
    """Scaled dot-product attention; the causal mask alone, so padding must come last."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """query [s, b, heads, d], key and value [s, b, groups, d] -> [s, b, heads × d]."""
        assert packed_seq_params is None and attention_mask is None
        length, batch = query.shape[:2]
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        out = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.permute(2, 0, 1, 3).reshape(length, batch, -1)


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """The decoder of this pipeline rank: its layers and, on the last rank, the final norm."""
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = CausalAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    layers = [layer] * get_num_layers_to_build(config)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)
