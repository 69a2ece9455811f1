"""A conversation's handle on the engine: one server, one seed, one budget of tokens.

Owns what a request of a conversation may ask for, and the check of what came back. It knows no
roles and no templates: tokens go in, tokens come out.

The seed of a call derives from the conversation's seed and from the tokens that it goes on from,
not from a counter of calls: calls of one conversation that run at once then draw the same,
whichever of them comes first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import xxhash

from slurm_rl.errors import EngineError, RewardError, SlurmRlError
from slurm_rl.rollout.engine import Completion, Engine, Request, Sampling, Weights
from slurm_rl.rollout.routing import cover, num_shared, replace_start
from slurm_rl.rollout.turns.own_time import OwnTime
from slurm_rl.seeds import derive_seed


class ConversationCut(Exception):
    """This conversation is over; whoever goes on asking gets this."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a sample may hold.

    response: tokens after its prompt, those of tools and environments included.
    context:  tokens in all; None: as many as the engine takes.
    vocabulary: ids are below it.
    """

    response: int
    context: int | None
    vocabulary: int


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model said in one go. `finish` is `length` too where there was no room at all.

    Example: `Turn((9, 2), (-0.1, -0.7), "yes", "stop")`.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish: Literal["stop", "length", "abort"]


class Session:
    """See the module. `name` is the engine's: requests under it go to one server.

    aborted: the engine cut a turn off. failure: the error that a call met, which no code of the
    user's may hide. num_tokens: generated so far. own_time: of who asks, between the answers.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        tokenizer: Any,
        weights: Weights,
        sampling: Sampling,
        limits: Limits,
        group_index: int,
        index: int,
        seed: int,
        prompt: Sequence[int],
    ) -> None:
        self.name = f"{group_index}/{index}"
        self.seed = seed
        self.sampling = sampling
        self.limits = limits
        self.aborted = False
        self.failure: SlurmRlError | None = None
        self.num_tokens = 0
        #: Tokens of each line of talk and their routing; of calls that went on from others, the
        #: last.
        self._routed: list[tuple[tuple[int, ...], str]] = []
        self.own_time = OwnTime()
        self._engine = engine
        self._tokenizer = tokenizer
        self._weights = weights
        self._group_index = group_index
        self._prompts = [tuple(prompt)]
        self._num_asked: Counter[int] = Counter()

    def begin(self, prompt: Sequence[int]) -> None:
        """What follows `prompt` counts as response from now on."""
        self._prompts.insert(0, tuple(prompt))

    def room(self, tokens: Sequence[int]) -> int:
        """How many more tokens a sample may get that holds `tokens` so far; 0 or less: none.

        Tokens that go on from no prompt that is known are a prompt of their own.
        """
        known = (p for p in self._prompts if tuple(tokens[: len(p)]) == p)
        prompt = next(known, None)
        room = self.limits.response - (0 if prompt is None else len(tokens) - len(prompt))
        return room if self.limits.context is None else min(room, self.limits.context - len(tokens))

    async def generate(
        self,
        tokens: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
    ) -> Turn:
        """The model's next words after `tokens`; those of the prompt come first.

        Temperature and truncation are the rollout's: the trainer computes log-probs at them.
        Raises EngineError; RewardError for tokens that are none; ConversationCut after an abort, or
        after the code's deadline.
        """
        context = tuple(tokens)
        self._check_tokens(context)
        if self.aborted or self.own_time.is_over:
            raise ConversationCut(self.name)
        room = self.room(context)
        if all(context[: len(p)] != p for p in self._prompts):
            self._prompts.append(context)
        if room <= 0:
            return Turn((), (), "", "length")
        own = self.sampling
        sampling = replace(
            own,
            max_new_tokens=room if max_new_tokens is None else max(1, min(room, max_new_tokens)),
            stop=own.stop if stop is None else tuple(stop),
            stop_token_ids=own.stop_token_ids if stop_token_ids is None else tuple(stop_token_ids),
        )
        request = Request(
            self._group_index, context, (self._draw_seed(context),), session=self.name
        )
        try:
            with self.own_time.stopped():
                completions = await self._engine.generate(request, sampling)
            return self._accept(completions, context, limit=sampling.max_new_tokens)
        except SlurmRlError as error:
            self.failure = error
            raise

    def routing_of(self, tokens: Sequence[int], *, num_needed: int) -> str:
        """The routing of `tokens`, as the engine said it in a call that begins as they do.

        num_needed: so many of them must be such; the rest may be anything. "" where none is needed
        and none is known. RewardError where no call has so many.
        """
        # The last token that a call gave was never fed to the model.
        shared = [(min(num_shared(t, tokens), len(t) - 1), text) for t, text in self._routed]
        known, text = max(shared, key=lambda item: item[0], default=(0, ""))
        if known < num_needed:
            raise RewardError(
                f"session {self.name}: the engine's routing is known of the first {known} tokens of"
                f" a sample, and {num_needed} are needed up to its last trained one",
                hint="train only on tokens that session.generate gave, each after the tokens it was"
                " given, or take out rollout.use_rollout_routing_replay",
            )
        return cover(text, known=known, num_tokens=len(tokens)) if text else ""

    def _keep_routing(self, tokens: tuple[int, ...], routed: str) -> None:
        """Of tokens that an earlier call gave, its ids stay: its log-probs were computed by them,
        and a later call that reads the tokens again may choose otherwise."""
        if not routed:
            return
        earlier = [item for item in self._routed if tokens[: len(item[0])] == item[0]]
        for begun, text in earlier:
            routed = replace_start(routed, text, num=len(begun) - 1)
        self._routed = [item for item in self._routed if item not in earlier]
        self._routed.append((tokens, routed))

    def _draw_seed(self, context: tuple[int, ...]) -> int:
        text = ",".join(map(str, context))
        digest = xxhash.xxh3_64_intdigest(text.encode())
        num = self._num_asked[digest]  # the same words a second time get another answer
        self._num_asked[digest] += 1
        return derive_seed(self.seed, "turn", digest, num)

    def _accept(
        self, completions: Sequence[Completion], context: tuple[int, ...], *, limit: int
    ) -> Turn:
        if len(completions) != 1:
            raise EngineError(f"session {self.name}: {len(completions)} answers to one request")
        (completion,) = completions
        tokens, logprobs, finish = completion.tokens, completion.logprobs, completion.finish
        if completion.label != self._weights.label:
            raise EngineError(f"a turn of {completion.label}, not of {self._weights.label}")
        if len(tokens) != len(logprobs) or len(tokens) > limit:
            raise EngineError(
                f"session {self.name}: {len(tokens)} tokens with {len(logprobs)} log-probs,"
                f" where {limit} were asked for"
            )
        if finish == "abort":
            self.aborted = True
        elif not tokens:
            raise EngineError(f"session {self.name}: the engine gave no whole answer")
        self.num_tokens += len(tokens)
        self._keep_routing((*context, *tokens), completion.routed_experts)
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return Turn(tuple(tokens), tuple(logprobs), text, finish)

    def _check_tokens(self, tokens: tuple[int, ...]) -> None:
        top = self.limits.vocabulary
        wrong = [t for t in tokens if not isinstance(t, int) or not 0 <= t < top]
        if wrong or not tokens:
            problem = f"the token {wrong[0]!r}" if wrong else "no tokens"
            error = RewardError(
                f"session.generate was given {problem}",
                hint=f"give token ids below {top}, those of the prompt first",
            )
            self.failure = error
            raise error
