"""The seam between the rollout stage and what generates: records and the `Engine` protocol.

A request is a whole group, since its samples share a prompt and since a group is what is
journalled, filtered and trained on together; a turn of a conversation is a request with one
sample. Three engines exist: `embedded.EmbeddedEngine` (in this process), `sglang.SglangEngine`
(real servers) and `instant.InstantEngine` (made-up answers at once, for measuring what is around).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol


@dataclass(frozen=True, slots=True)
class Weights:
    """What is to be served: a Hugging Face directory, and the name it must answer to.

    probe: tokens and their log-probs as the trainer computed them when it exported these weights
    (`{"tokens": […], "logprobs": […]}`, one log-prob less than tokens); None for initial weights.

    Example: `Weights(Path("…/weights"), version=3, digest="xxh3:…", label="q3/v3/xxh3:…")`.
    """

    path: Path
    version: int
    digest: str
    label: str
    probe: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. `top_k` -1 means all; temperature 0 takes the likeliest token.

    max_new_tokens: of a whole response; what a request's prefixes hold is part of it.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One group: a prompt, and a seed for each of its samples.

    prefixes: response tokens that each sample has already, from an earlier rollout; () for none.
    session:  requests of one session go to one server, which keeps their prefix cached.
    """

    group_index: int
    prompt_tokens: tuple[int, ...]
    seeds: tuple[int, ...]
    prefixes: tuple[tuple[int, ...], ...] = ()
    session: str = ""

    def entry_tokens(self, index: int) -> tuple[int, ...]:
        """What sample `index` goes on from."""
        return self.prompt_tokens + self.prefixes[index] if self.prefixes else self.prompt_tokens

    def max_new_tokens(self, index: int, sampling: Sampling) -> int:
        """How many tokens sample `index` may still get; at least 1."""
        had = len(self.prefixes[index]) if self.prefixes else 0
        return max(1, sampling.max_new_tokens - had)


@dataclass(frozen=True, slots=True)
class Completion:
    """One sample as the engine reports it; what the request's prefix held is not in it.

    logprobs: of `tokens`, after temperature, before top-k, top-p and min-p.
    finish:   `stop` (an end token or a stop string, which `tokens` includes), `length`, `abort`
              (cut off by `Engine.abort`; `tokens` is what was there, perhaps nothing).
    label:    of the weights that made it, as the engine itself says.
    routed_experts: of all tokens that it stands on and its own, as `routing.write_routed` has
              them; "" where the engine was not told to say them, or where it was cut off.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length", "abort"]
    label: str
    routed_experts: str = ""


class Engine(Protocol):
    """Generates with exactly the weights it was told to serve, or raises EngineError."""

    @property
    def concurrency(self) -> int:
        """How many samples may be in flight before more of them only wait."""
        ...

    def start(self, weights: Weights) -> None:
        """Serve `weights`; on return the engine has checked that it does. Once."""
        ...

    def load_weights(self, weights: Weights) -> None:
        """Serve other weights of the same architecture. On an error the old ones stay."""
        ...

    async def generate(self, request: Request, sampling: Sampling) -> list[Completion]:
        """The completions of one request, in seed order. Any number may run at once.

        After `abort` they end early, with `finish` = `abort`. Raises EngineError.
        """
        ...

    async def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs of `tokens[1:]`, each given those before it, at temperature 1."""
        ...

    async def abort(self) -> None:
        """End what is in flight, and what is asked from now on, with what there is."""
        ...

    def metrics(self) -> dict[str, float]:
        """What the engine knows of itself, under `engine/…`: queueing, cache hits."""
        ...

    def stop(self) -> None:
        """Leave nothing running. May be called at any time, and twice."""
        ...
