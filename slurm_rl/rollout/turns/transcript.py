"""One sample of a conversation while it grows: whose token each one is, and its log-prob.

Owns the layout. The model's tokens have mask 1 and the engine's log-probs; what a tool, an
environment or a template put in has mask 0 and log-prob 0. Nothing is ever taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from slurm_rl.rollout.turns.session import Session, Turn
from slurm_rl.rollout.turns.template import ChatTemplate, Message


class Transcript:
    """See the module. `messages` is what was said after the prompt, for people to read.

    finish: how the last turn ended; "" before the first.
    """

    def __init__(
        self, session: Session, template: ChatTemplate, *, prompt_tokens: Sequence[int]
    ) -> None:
        self.prompt_tokens = tuple(prompt_tokens)
        self.response_tokens: list[int] = []
        self.logprobs: list[float] = []
        self.loss_mask: list[int] = []
        self.messages: list[dict[str, Any]] = []
        self.finish: Literal["stop", "length", "abort", ""] = ""
        self._session = session
        self._template = template

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt's, and all that followed."""
        return (*self.prompt_tokens, *self.response_tokens)

    async def say(self, **options: Any) -> Turn:
        """Let the model speak; what it says is part of the sample. `Session.generate`'s options."""
        turn = await self._session.generate(self.tokens, **options)
        self.add_turn(turn)
        return turn

    def add_turn(self, turn: Turn) -> None:
        """Append what the model said to exactly `tokens`."""
        self.response_tokens += turn.tokens
        self.logprobs += turn.logprobs
        self.loss_mask += [1] * len(turn.tokens)
        self.finish = turn.finish
        self.messages.append({"role": "assistant", "content": turn.text})

    def add_tokens(self, tokens: Sequence[int]) -> bool:
        """Append tokens that others wrote; False, and nothing, if no token would have room then."""
        if self._session.room((*self.tokens, *tokens)) < 1:
            return False
        self.response_tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        self.loss_mask += [0] * len(tokens)
        return True

    def add_messages(self, messages: str | Sequence[Message]) -> bool:
        """As `add_tokens`, through the chat template; a text is the user's, or raw without one."""
        last = self.response_tokens[-1] if self.response_tokens else -1
        if not self.add_tokens(self._template.encode_added(messages, last=last)):
            return False
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        self.messages += [dict(message) for message in messages]
        return True
