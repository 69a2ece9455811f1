"""What the fused kernels compute, by PyTorch's operations, in the precision of what they are given."""

from __future__ import annotations

import torch


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """[..., 2F] -> [..., F]."""
    gate, value = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * value


def rotate(x: torch.Tensor, angles: torch.Tensor, is_interleaved: bool) -> torch.Tensor:
    """x [T, heads, d] by angles [T, 1, r]; columns from r on pass."""
    size = angles.shape[-1]
    t, rest = x[..., :size], x[..., size:]
    if is_interleaved:
        turned = torch.stack((-t[..., 1::2], t[..., ::2]), -1).flatten(-2)
    else:
        turned = torch.cat((-t[..., size // 2 :], t[..., : size // 2]), -1)
    return torch.cat((t * angles.cos() + turned * angles.sin(), rest), -1)
