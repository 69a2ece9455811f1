"""The trainer's own random state, apart from whatever else runs in the process.

A trainer draws from the same generators as an engine in the same process would. So it keeps
its state as a value: put in place when it works, taken away when it stops. The state is a
flat dictionary of bytes, so that the same state always gives the same bytes on disk.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel

_MT_WORDS = 624


@dataclass(frozen=True, slots=True)
class RngState:
    """States of Python, numpy, torch (CPU), CUDA and Megatron's tracker, as bytes."""

    states: dict[str, bytes]


def seeded_state(seed: int) -> RngState:
    """The state of a fresh trainer. Megatron's tracker differs by tensor and pipeline rank."""
    outside = capture()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    fresh = capture()
    restore(outside)
    return fresh


def capture() -> RngState:
    """The state of every generator now."""
    _, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    assert name == "MT19937"
    states = {
        "python": np.array([*words, gauss is not None], np.int64).tobytes()
        + np.array([gauss or 0.0]).tobytes(),
        "numpy": np.array([*keys, position, has_gauss], np.int64).tobytes()
        + np.array([cached]).tobytes(),
        "torch": _to_bytes(torch.get_rng_state()),
        "cuda": _to_bytes(torch.cuda.get_rng_state()),
    }
    for key, state in tensor_parallel.get_cuda_rng_tracker().get_states().items():
        states[f"tracker/{key}"] = _to_bytes(state)
    return RngState(dict(sorted(states.items())))


def restore(state: RngState) -> None:
    """Put every generator into `state`."""
    integers = np.frombuffer(state.states["python"][:-8], np.int64).tolist()
    gauss = float(np.frombuffer(state.states["python"][-8:], np.float64)[0])
    random.setstate((3, tuple(integers[:-1]), gauss if integers[-1] else None))
    integers = np.frombuffer(state.states["numpy"][:-8], np.int64)
    cached = float(np.frombuffer(state.states["numpy"][-8:], np.float64)[0])
    keys = integers[:_MT_WORDS].astype(np.uint32)
    np.random.set_state(("MT19937", keys, int(integers[-2]), int(integers[-1]), cached))
    torch.set_rng_state(_to_tensor(state.states["torch"]))
    torch.cuda.set_rng_state(_to_tensor(state.states["cuda"]))
    tracked = {
        key.split("/", 1)[1]: _to_tensor(value)
        for key, value in state.states.items()
        if key.startswith("tracker/")
    }
    tensor_parallel.get_cuda_rng_tracker().set_states(tracked)


def _to_bytes(state: Any) -> bytes:
    return bytes(state.cpu().numpy().tobytes())


def _to_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
