"""A decoder layer whose attention and MLP are normed once more before they are added (GLM-4).

Megatron's layer has no place for such a norm. Owns the two norms and where they are applied;
everything else of the layer, and its checkpoint, is Megatron's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer


def add_post_norms(block: TransformerBlockSubmodules) -> None:
    """Make every layer of `block` one with these norms, of the class of the final norm."""
    for layer in block.layer_specs:
        layer.module = PostNormLayer
        layer.params = {**(layer.params or {}), "post_norm": block.layer_norm}


class PostNormLayer(TransformerLayer):
    """See the module. Adds `post_self_attn_layernorm` and `post_mlp_layernorm`."""

    def __init__(self, config: Any, submodules: Any, *, post_norm: Any, **others: Any) -> None:
        super().__init__(config, submodules, **others)
        self.post_self_attn_layernorm = self._norm(post_norm)
        self.post_mlp_layernorm = self._norm(post_norm)
        self.self_attn_bda = _norm_then_add(self.post_self_attn_layernorm)
        self.mlp_bda = _norm_then_add(self.post_mlp_layernorm)

    def _norm(self, post_norm: Any) -> Any:
        config = self.config
        return build_module(
            post_norm,
            config=config,
            hidden_size=config.hidden_size,
            eps=config.layernorm_epsilon,
        )


def _norm_then_add(norm: torch.nn.Module) -> Callable[[bool, bool], Callable[..., Any]]:
    """In place of Megatron's bias-dropout-add, which is built with no size to make a norm of."""

    def choose(training: bool, fused: bool) -> Callable[..., Any]:
        add = get_bias_dropout_add(training, False)

        def norm_then_add(output: Any, residual: torch.Tensor, dropout: float) -> Any:
            value, bias = output
            normed = norm(value if bias is None else value + bias)
            return add((normed, None), residual, dropout)

        return norm_then_add

    return choose
