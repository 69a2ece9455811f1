"""Where a layer's small operations go through the kernels of `fused_layers.py`.

On a GPU with Triton, unless the role's `fused_kernels` is false: RMSNorm, SwiGLU (where Megatron's
`bias_activation_fusion` is on, then by default) and rotary embedding. Elsewhere, and for what the
kernels do not know (latent attention, scaled angles), PyTorch's and Megatron's own operations. Both
are the same functions; the kernels round once where the others round after each operation.
Megatron's own fusions need TransformerEngine, or compile anew in each process, for longer than a
small step takes.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer import attention, mlp
from megatron.core.transformer.moe import shared_experts
from megatron.core.transformer.transformer_config import TransformerConfig

from slurm_rl.train import kernels
from slurm_rl.train.attention import chunk_order
from slurm_rl.train.options import MegatronOptions


def find_layers() -> Any:
    """`fused_layers`, None where it cannot be used (`kernels.py`)."""
    return kernels.find_kernels("fused_layers")


def are_on(options: MegatronOptions) -> bool:
    """Whether a model of these options uses the kernels; every rank calls it."""
    return options.fused and kernels.agreed()


def fuses_swiglu(options: MegatronOptions, *, on: bool) -> bool:
    """The default of Megatron's `bias_activation_fusion`: what that way would leave out, and what
    is not ours, stays as Megatron has it. on: see `are_on`."""
    own = options.transformer
    is_plain = own.get("activation_func_clamp_value") is None
    is_plain = is_plain and not own.get("activation_func_fp8_input_store")
    return on and is_plain and own.get("transformer_impl", "local") == "local"


def switch(config: TransformerConfig, *, on: bool) -> None:
    """Whether models of this configuration use the kernels."""
    setattr(config, "fused_kernels", on)  # noqa: B010
    if on and config.transformer_impl == "local":
        _install()


def kernels_of(config: Any) -> Any:
    """The kernels of a model's layers; None for PyTorch's operations."""
    is_local = getattr(config, "transformer_impl", "local") == "local"
    return find_layers() if is_on(config) and is_local else None


def vocab_kernels(config: Any) -> Any:
    """`fused_vocab` for a model of this configuration; None for PyTorch's operations."""
    return kernels.find_kernels("fused_vocab") if is_on(config) else None


def is_on(config: Any) -> bool:
    """Whether a model of this configuration uses the kernels."""
    return bool(getattr(config, "fused_kernels", False))


_plain_rotary = attention.apply_rotary_pos_emb


def _install() -> None:
    """Megatron's modules look their functions up by these names."""
    attention.apply_rotary_pos_emb = rotary
    for module in (mlp, shared_experts):
        module.bias_swiglu_impl = swiglu
    mlp.weighted_bias_swiglu_impl = weighted_swiglu


def swiglu(x: torch.Tensor, bias: torch.Tensor | None, *_: Any) -> torch.Tensor:
    """Megatron's `bias_swiglu_impl`: [..., 2F] -> [..., F]."""
    x = x if bias is None else x + bias
    found: torch.Tensor = find_layers().SwiGLUFunction.apply(x)
    return found


def weighted_swiglu(
    x: torch.Tensor, bias: torch.Tensor | None, weights: torch.Tensor, *_: Any
) -> torch.Tensor:
    """Megatron's `weighted_bias_swiglu_impl`: an expert's [t, 2F] -> [t, F], times the router's
    probabilities [t, 1]."""
    return (swiglu(x, bias) * weights).to(x.dtype)


def rotary(
    t: torch.Tensor,
    freqs: torch.Tensor,
    config: TransformerConfig,
    cu_seqlens: torch.Tensor | None = None,
    mscale: float = 1.0,
    cp_group: Any = None,
) -> torch.Tensor:
    """Megatron's `apply_rotary_pos_emb`: t [s, b, heads, d], or packed [t, heads, d]."""
    layers = kernels_of(config)
    if layers is None or mscale != 1.0 or config.multi_latent_attention:
        plain: torch.Tensor = _plain_rotary(t, freqs, config, cu_seqlens, mscale, cp_group)
        return plain
    if cu_seqlens is None:
        positions_T = _repeated(t.shape[0], t.shape[1], device=t.device)
    else:
        lengths = tuple(b - a for a, b in itertools.pairwise(cu_seqlens.tolist()))
        positions_T = packed_positions(
            lengths,
            cp_rank=parallel_state.get_context_parallel_rank(),
            cp_size=parallel_state.get_context_parallel_world_size(),
            device=t.device,
        )
    rows = t.reshape(-1, *t.shape[-2:])
    found: torch.Tensor = layers.RotaryFunction.apply(
        rows, freqs, positions_T, bool(config.rotary_interleaved)
    )
    return found.view(t.shape)


@functools.lru_cache(maxsize=64)
def packed_positions(
    lengths: tuple[int, ...], *, cp_rank: int, cp_size: int, device: torch.device
) -> torch.Tensor:
    """Where each token of a context rank is in its sequence, int32, in the rank's order.

    Example: packed_positions((3, 2), cp_rank=0, cp_size=1): 0, 1, 2, 0, 1.
    """
    whole_T = torch.cat([torch.arange(length) for length in lengths])
    if cp_size > 1:
        places = chunk_order(lengths, cp_rank=cp_rank, cp_size=cp_size, device=torch.device("cpu"))
        whole_T = whole_T[places]
    return whole_T.to(torch.int32).to(device)


@functools.lru_cache(maxsize=64)
def _repeated(length: int, num: int, *, device: torch.device) -> torch.Tensor:
    """Positions of [s, b] tokens laid end to end; angles come for this context rank already."""
    return torch.arange(length, dtype=torch.int32, device=device).repeat_interleave(num)
