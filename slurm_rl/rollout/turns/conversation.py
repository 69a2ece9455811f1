"""What one conversation is made of, and how what it left becomes a sample.

A conversation is one of a group's: number k of it draws from the group's k-th seed, and all
samples that it gives share k as their `rollout_index`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from slurm_rl.config.schema import Settings
from slurm_rl.rollout.samples import RoutedSample, Sample
from slurm_rl.rollout.turns.session import Session
from slurm_rl.rollout.turns.template import ChatTemplate
from slurm_rl.rollout.turns.transcript import Transcript

if TYPE_CHECKING:
    from slurm_rl.rollout.groups import PlannedGroup


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation before it begins.

    index: its number in the group. version: of the weights.
    args:  what the user's code gets: settings of the rollout and the top level, `session`,
           `tokenizer`.
    """

    settings: Settings
    group: PlannedGroup
    index: int
    session: Session
    template: ChatTemplate
    tokenizer: Any
    version: int
    args: SimpleNamespace

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        return tuple(self.group.request.prompt_tokens)

    def open(self, prompt_tokens: tuple[int, ...] | None = None) -> Transcript:
        """A transcript from the data's own prompt, or from another."""
        prompt = self.prompt_tokens if prompt_tokens is None else prompt_tokens
        self.session.begin(prompt)
        return Transcript(self.session, self.template, prompt_tokens=prompt)

    def sample(
        self,
        *,
        prompt_tokens: tuple[int, ...],
        response_tokens: tuple[int, ...],
        rollout_logprobs: tuple[float, ...],
        loss_mask: tuple[int, ...],
        **fields: Any,
    ) -> Sample:
        """A sample of this conversation; `sample_index` is still to be counted."""
        prompt = self.group.visit.prompt
        known: dict[str, Any] = {
            "prompt": prompt.prompt,
            "label": prompt.label,
            "metadata": prompt.metadata,
        }
        routed = ""
        if self.settings.rollout.use_rollout_routing_replay:
            trained = max((i for i, m in enumerate(loss_mask) if m), default=None)
            needed = 0 if trained is None else len(prompt_tokens) + trained
            whole = (*prompt_tokens, *response_tokens)
            routed = self.session.routing_of(whole, num_needed=needed)
        if routed:
            known["routed_experts"] = routed
        return (RoutedSample if routed else Sample)(
            self.group.group_index,
            0,
            prompt_tokens,
            response_tokens,
            rollout_logprobs,
            loss_mask,
            weights_version=self.version,
            seed=self.group.request.seeds[self.index],
            rollout_index=self.index,
            data_set=prompt.data_set,
            **known | fields,
        )

    def finish(
        self,
        talk: Transcript,
        *,
        status: str,
        reward: float | None,
        notes: Mapping[str, Any],
        **fields: Any,
    ) -> Sample:
        """A whole transcript as one sample.

        Its `response` is the last answer, which rewards look at: what a tool said is not the
        model's merit. All that was said is `metadata["messages"]`.
        """
        said = [m["content"] for m in talk.messages if m["role"] == "assistant"]
        metadata = {**self.group.visit.prompt.metadata, "messages": talk.messages, **notes}
        return self.sample(
            prompt_tokens=talk.prompt_tokens,
            response_tokens=tuple(talk.response_tokens),
            rollout_logprobs=tuple(talk.logprobs),
            loss_mask=tuple(talk.loss_mask),
            response=said[-1] if said else "",
            status=status,
            reward=reward,
            metadata=metadata,
            **fields,
        )

    def cut_off(self) -> Sample:
        """What is left of a conversation that the engine cut off: its place. It starts again."""
        return self._without_answer("aborted")

    def given_up(self) -> Sample:
        """What is left of a conversation of a group that is dropped, since its code failed."""
        return self._without_answer("failed")

    def _without_answer(self, status: str) -> Sample:
        return self.sample(
            prompt_tokens=self.prompt_tokens,
            response_tokens=(),
            rollout_logprobs=(),
            loss_mask=(),
            status=status,
        )
