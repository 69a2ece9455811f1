"""What `slurm_rl/train/fused_layers.py` computes, by PyTorch: for a machine without a GPU.

The kernels themselves are compared with PyTorch's operations in tests/oracles (Triton's interpreter)
and tests/gpu. Here it is whether they are called with the right things.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import plain_layers
import torch

#: How often each was called since the last `used`.
CALLS: Counter[str] = Counter()


class RMSNormFunction:
    @staticmethod
    def apply(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        CALLS["norm"] += 1
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


class SwiGLUFunction:
    @staticmethod
    def apply(x: torch.Tensor) -> torch.Tensor:
        CALLS["swiglu"] += 1
        return plain_layers.swiglu(x)


class RotaryFunction:
    @staticmethod
    def apply(
        x: torch.Tensor, freqs: torch.Tensor, positions: torch.Tensor, is_interleaved: bool
    ) -> torch.Tensor:
        CALLS["rotary"] += 1
        assert positions.dtype == torch.int32
        angles = freqs.flatten(1)[positions.long()][:, None]
        return plain_layers.rotate(x, angles, is_interleaved)


@contextmanager
def used(yes: bool) -> Iterator[Counter[str]]:
    """Inside, models that are built use these, if `yes`; their calls are counted."""
    from slurm_rl.train import fused

    CALLS.clear()
    before: Any = fused.find_layers, fused.are_on
    if yes:
        fused.find_layers = lambda: sys.modules[__name__]
        fused.are_on = lambda options: options.fused
    try:
        yield CALLS
    finally:
        fused.find_layers, fused.are_on = before
