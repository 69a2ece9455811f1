"""PyTorch's variable-length attention, as far as this PyTorch and this machine have it.

Owns how it is called: its first versions knew no scale, or named the mask otherwise, and whether it
takes fewer heads of keys than of queries is not said everywhere. What it does not take is made up
for outside, exactly.
"""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any

import torch


def adapt_varlen(kernel: Any, *, takes_groups: bool = False) -> Any:
    """`kernel`, causal, as `attention.attend_varlen` calls it: `attend(query, key, value, ends of
    queries, ends of keys, longest queries, longest keys, scale=)`, with fewer heads of keys.

    takes_groups: whether it takes those as they are, without a word.
    """
    taken = set(inspect.signature(kernel).parameters)
    causal = {"window_size": (-1, 0)} if "window_size" in taken else {"is_causal": True}

    def attend(query: Any, key: Any, value: Any, *bounds: Any, scale: float) -> torch.Tensor:
        options: dict[str, Any] = dict(causal)
        if "scale" in taken:
            options["scale"] = scale
        else:
            query = query * (scale * math.sqrt(query.shape[-1]))
        times = query.shape[1] // key.shape[1]
        if times > 1 and "enable_gqa" in taken:
            options["enable_gqa"] = True
        elif times > 1 and not takes_groups:
            key, value = (t.repeat_interleave(times, dim=1) for t in (key, value))
        out: torch.Tensor = kernel(query, key, value, *bounds, **options)
        return out

    return attend


@functools.cache
def find_kernel() -> Any:
    """The kernel of this process's GPU, None without. The first call asks it what it takes:
    not before the process has its device."""
    if not torch.cuda.is_available():
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return adapt_varlen(varlen_attn, takes_groups=takes_groups(varlen_attn, device="cuda"))


def takes_groups(kernel: Any, *, device: str) -> bool:
    """Whether `kernel`, given fewer heads of keys, attends as if they were repeated, and gives
    their gradients: tried on a few random tokens."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((6, 4, 16), (6, 2, 16), (6, 2, 16), (6, 4, 16))
    query, key, value, above = (
        torch.randn(shape, generator=generator).to(device, torch.bfloat16) for shape in shapes
    )
    ends = torch.tensor([0, 2, 6], dtype=torch.int32, device=device)
    found = []
    for way in (False, True):
        own = [t.clone().requires_grad_() for t in (query, key, value)]
        attend = adapt_varlen(kernel, takes_groups=way)
        try:
            with torch.enable_grad():
                out = attend(*own, ends, ends, 4, 4, scale=0.25)
                out.backward(above)
        except (RuntimeError, ValueError, TypeError):
            return False
        found.append([out.detach(), *(t.grad for t in own)])
    return all(
        a is not None and b is not None and torch.allclose(a, b, atol=0.05)
        for a, b in zip(*found, strict=True)
    )
