"""Everything that lets Megatron-core 0.16 run on tensors of a CPU; nothing where CUDA is.

Owns the stand-ins for what Megatron asks of torch without asking whether there is a GPU.
They are in place only inside `stand_ins()`, that is while a trainer works, and taken away
again: other code in the process (an engine, transformers) must find torch as it is. With
them left in place transformers loaded a model with garbage in its rotary embedding.

What is replaced, and where Megatron needs it:
    torch.compile                   `jit_fuser`; dynamo and inductor cost 2 s to import
    torch.cuda.current_device       buffers, memory, rotary embedding, point-to-point
    device="cuda" in factories      optimizer, gradient clipping, schedules
    Tensor.cuda, Tensor.type        tied embeddings, the distributed optimizer's dtype checks
    synchronize, empty_cache, …     nothing to wait for
    streams and events              experts' tokens travel on a stream of their own
    the CUDA random state           is the CPU's
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._device import _device_constructors

_CPU = torch.device("cpu")
_FACTORIES = ("tensor", "zeros", "ones", "empty", "empty_like", "zeros_like", "full", "arange")
_NOTHING_TO_DO = ("synchronize", "empty_cache", "set_device")
_depth = 0


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Megatron may be imported and used inside; a no-op where CUDA is present.

    May be nested. Not for threads: what it replaces is the process's.
    """
    global _depth
    if _depth or torch.cuda.is_available():
        yield
        return
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in _table()]
    _depth += 1
    try:
        for owner, name, replacement in _table():
            setattr(owner, name, replacement)
        yield
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)
        _depth -= 1


@contextlib.contextmanager
def megatron_imports() -> Iterator[None]:
    """Import Megatron, and what imports it, inside: with the stand-ins, quickly, quietly.

    Quickly: without garbage collection, a fifth of the time. Quietly: the warnings are of
    packages that Megatron would like to have (TransformerEngine, Apex).
    """
    enabled, is_first = gc.isenabled(), "megatron.core" not in sys.modules
    gc.disable()
    try:
        with warnings.catch_warnings(), stand_ins():
            warnings.simplefilter("ignore")
            if not torch.cuda.is_available():
                _replace_random_state()
            yield
    finally:
        if is_first:  # later, a trainer that is to be collected might be among the frozen
            gc.freeze()
        if enabled:
            gc.enable()


@functools.cache
def _table() -> tuple[tuple[Any, str, Any], ...]:
    """Owner, name, replacement. A function of its own each: dynamo refuses one under two
    names, and the same ones each time."""
    # torch collects its factories by identity, once: let it see the real ones.
    _device_constructors()
    return (
        (torch, "compile", _leave_as_is),
        *((torch, name, _on_cpu(getattr(torch, name))) for name in _FACTORIES),
        (torch.Tensor, "cuda", _stay),
        (torch.Tensor, "type", _type_as_on_cuda(torch.Tensor.type)),
        *((torch.cuda, name, _do_nothing()) for name in _NOTHING_TO_DO),
        (torch.cuda, "current_device", lambda: _CPU),
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "current_stream", _Stream),
        (torch.cuda, "stream", _enter),
        (torch.cuda, "get_rng_state", lambda device=None: torch.get_rng_state()),
        (torch.cuda, "set_rng_state", lambda state, device=None: torch.set_rng_state(state)),
        (torch.cuda, "manual_seed", lambda seed: torch.manual_seed(seed)),
    )


class _Stream:
    """There is one queue of work, and all of it is done."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record_event(self) -> _Stream:
        return self  # waiting for it is as waiting for the stream


def _enter(stream: Any) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext(stream)


def _leave_as_is(model: Any = None, **_: Any) -> Any:
    return model if model is not None else (lambda function: function)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return make


def _stay(self: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return self


def _type_as_on_cuda(plain: Callable[..., Any]) -> Callable[..., Any]:
    def type_of(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return plain(self, *args, **kwargs)
        return plain(self).replace("torch.", "torch.cuda.", 1)

    return type_of


def _do_nothing() -> Callable[..., None]:
    def nothing(*_: Any, **__: Any) -> None:
        return None

    return nothing


def _replace_random_state() -> None:
    # Megatron's own functions, in its own module: of no concern to others.
    import megatron.core.tensor_parallel.random as megatron_random

    def get_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> Any:
        return torch.get_rng_state()

    def set_state(state: Any, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(state)

    megatron_random._get_cuda_rng_state = get_state
    megatron_random._set_cuda_rng_state = set_state
