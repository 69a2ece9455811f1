"""An engine that makes up its answers at once: for measuring and testing what is around engines,
and where a pipeline must have one and asks it nothing (`supervised.py`).

Owns a rule alone: an answer's length and tokens are a function of its seed and of the position in
the response, so that a sample which goes on from a prefix ends as it would have. It serves no
weights, and no configuration can choose it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

from slurm_rl.errors import EngineError
from slurm_rl.rollout.engine import Completion, Request, Sampling, Weights

_PRIME = 1_000_003


class InstantEngine:
    """See the module.

    num_tokens: the least and the most tokens of an answer (cut at the request's limit).
    vocabulary: tokens are below it, if the longest answer is.
    delay_s:    how long each request takes; 0 gives way to others once, and answers.
    """

    def __init__(
        self,
        *,
        num_tokens: tuple[int, int] = (8, 8),
        vocabulary: int = 1000,
        concurrency: int = 1024,
        delay_s: float = 0.0,
    ) -> None:
        self._shortest, self._longest = num_tokens
        self._vocabulary = vocabulary
        self._concurrency = concurrency
        self._delay_s = delay_s
        self._label = ""
        self._cut = asyncio.Event()
        self._num_requests = 0

    @property
    def concurrency(self) -> int:
        return self._concurrency

    def start(self, weights: Weights) -> None:
        self._label, self._cut = weights.label, asyncio.Event()

    def load_weights(self, weights: Weights) -> None:
        self.start(weights)

    async def generate(self, request: Request, sampling: Sampling) -> list[Completion]:
        """The completions that the seeds mean; empty ones, cut off, after `abort`."""
        if not self._label:
            raise EngineError("the instant engine has no weights")
        label, cut = self._label, self._cut
        if self._delay_s == 0:
            await asyncio.sleep(0)
        else:
            try:
                async with asyncio.timeout(self._delay_s):
                    await cut.wait()
            except TimeoutError:
                pass
        self._num_requests += 1
        if cut.is_set():
            return [Completion((), (), "abort", label)] * len(request.seeds)
        return [self._complete(request, i, sampling, label) for i in range(len(request.seeds))]

    async def logprobs(self, tokens: Sequence[int]) -> list[float]:
        return [-0.5] * (len(tokens) - 1)

    async def abort(self) -> None:
        self._cut.set()

    def metrics(self) -> dict[str, float]:
        return {"engine/requests": float(self._num_requests)}

    def stop(self) -> None:
        self._label = ""

    def _complete(self, request: Request, index: int, sampling: Sampling, label: str) -> Completion:
        seed = request.seeds[index]
        had = len(request.prefixes[index]) if request.prefixes else 0
        wanted = self._shortest + seed % (self._longest - self._shortest + 1)
        num = max(1, min(wanted - had, request.max_new_tokens(index, sampling)))
        finish: Literal["stop", "length"] = "stop" if had + num >= wanted else "length"
        first = seed * _PRIME % max(1, self._vocabulary - self._longest) + had
        return Completion(tuple(range(first, first + num)), (-0.5,) * num, finish, label)
