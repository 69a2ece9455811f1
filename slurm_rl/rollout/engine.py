"""The seam between the rollout stage and what generates: records and the `Engine` protocol.

A request is a whole group, since its samples share a prompt and since a group is what is
journalled, filtered and trained on together. Two engines exist: `embedded.EmbeddedEngine`
(in this process) and `sglang.SglangEngine` (real servers).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class Weights:
    """What is to be served: a Hugging Face directory, and the name it must answer to.

    Example: `Weights(Path("…/weights"), version=3, digest="xxh3:…", label="q3/v3/xxh3:…")`.
    """

    path: Path
    version: int
    digest: str
    label: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. `top_k` -1 means all; `max_new_tokens` counts response tokens."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One group: a prompt, and a seed for each of its samples."""

    group_index: int
    prompt_tokens: tuple[int, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """One sample as the engine reports it.

    logprobs: of `tokens`, after temperature, before top-k and top-p.
    finish:   `stop` (an end token or a stop string, which `tokens` includes), `length`, `abort`.
    label:    of the weights that made it, as the engine itself says.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length", "abort"]
    label: str


Group = tuple[Request, list[Completion]]


class Engine(Protocol):
    """Generates with exactly the weights it was told to serve, or raises EngineError."""

    def start(self, weights: Weights) -> None:
        """Serve `weights`; on return the engine has checked that it does. Once."""
        ...

    def load_weights(self, weights: Weights) -> None:
        """Serve other weights of the same architecture. On an error the old ones stay."""
        ...

    def generate(self, requests: Iterable[Request], sampling: Sampling) -> Iterator[Group]:
        """Each request with its completions in seed order, as groups finish (in any order)."""
        ...

    def stop(self) -> None:
        """Leave nothing running. May be called at any time, and twice."""
        ...
