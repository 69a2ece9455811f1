"""How long an iteration's phases took, and what that is worth: tokens and FLOPs a second.

FLOPs are those of the model (`packing.token_costs`), whatever is recomputed or padded: a forward
pass, and twice as many for the backward pass. MFU is their share of the dense bfloat16 peak that
the device's maker gives; a device that is not in the table has none, and neither has a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slurm_rl.train.batch import Samples
from slurm_rl.train.packing import token_costs

#: Part of a device's name -> dense bfloat16 TFLOP/s; more special names first. From data sheets.
PEAKS_TFLOPS = {
    "B200": 2250.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "A40": 150.0,
    "A10G": 70.0,
    "A10": 125.0,
}


@dataclass(slots=True)
class Meter:
    """Seconds of each phase so far, by name."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add what happens inside to a phase; the device is waited for at both ends."""
        _synchronize()
        began = time.monotonic()
        try:
            yield
        finally:
            _synchronize()
            spent = time.monotonic() - began
            self.seconds[name] = self.seconds.get(name, 0.0) + spent

    def take(self) -> dict[str, float]:
        """The seconds since the last call, as `perf/<phase>_time`."""
        seconds, self.seconds = self.seconds, {}
        return {f"perf/{name}_time": spent for name, spent in seconds.items()}


def find_peak(name: str) -> float | None:
    """Dense bfloat16 TFLOP/s of a device by its name; None for one that is not known.

    >>> find_peak("NVIDIA H200")
    989.0
    """
    return next((peak for part, peak in PEAKS_TFLOPS.items() if part in name), None)


def forward_flops(config: Any, *, vocab_size: int, samples: Samples) -> float:
    """FLOPs of one forward pass over a whole rollout."""
    lengths = samples.prompt_lengths.astype(np.float64) + samples.response_lengths
    linear, quadratic = token_costs(config, vocab_size=vocab_size)
    return float((lengths * linear + lengths**2 * quadratic).sum())


def rate(
    config: Any, samples: Samples, *, phase: str, seconds: float, vocab_size: int, epochs: float
) -> dict[str, float]:
    """Tokens a second of a phase of updates, TFLOP/s of a rank, and MFU.

    epochs: passes over the rollout, each with its backward pass, which counts as two more.
    """
    if seconds <= 0:
        return {}
    tokens = float((samples.prompt_lengths.astype(np.int64) + samples.response_lengths).sum())
    flops = 3 * epochs * forward_flops(config, vocab_size=vocab_size, samples=samples)
    tflops = flops / seconds / dist.get_world_size() / 1e12
    found = {
        f"perf/{phase}_tok_per_s": epochs * tokens / seconds,
        f"perf/{phase}_tflops": tflops,
    }
    if torch.cuda.is_available():
        peak = find_peak(torch.cuda.get_device_name())
        found["perf/max_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
        if peak is not None:
            found[f"perf/{phase}_mfu"] = tflops / peak
    return found


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
