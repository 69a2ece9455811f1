"""Groups before and after generation: seeds, keys, requests, and completions as samples. Pure.

Owns what a group is asked with, the key under which it is journalled, and the rule that a sample
of other weights, or without tokens, is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from slurm_rl.config.rollout_schema import Overrides
from slurm_rl.config.schema import Settings
from slurm_rl.config.shaping import settings_digest
from slurm_rl.errors import EngineError
from slurm_rl.rollout.data import Visit
from slurm_rl.rollout.engine import Completion, Request, Sampling, Weights
from slurm_rl.rollout.fast_json import dumps
from slurm_rl.rollout.samples import RoutedSample, Sample
from slurm_rl.seeds import derive_seeds
from slurm_rl.storage.digest import digest_bytes, digest_value
from slurm_rl.types import Order

#: What a data set's `Overrides` may say of sampling -> the field of `Sampling`.
_SAMPLING = {
    "rollout_max_response_len": "max_new_tokens",
    "rollout_temperature": "temperature",
    "rollout_top_p": "top_p",
    "rollout_top_k": "top_k",
    "rollout_min_p": "min_p",
    "rollout_stop": "stop",
}


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """A group before it is generated.

    key:     digests all that its samples depend on; it begins with what all groups share.
    carried: its samples as an earlier rollout left them; () for a new group. The request asks for
             those that were cut off, whose places are `asked`.
    """

    visit: Visit
    request: Request
    sampling: Sampling
    key: str
    carried: tuple[Sample, ...] = ()
    asked: tuple[int, ...] = ()

    @property
    def group_index(self) -> int:
        return self.visit.group_index


class Planner:
    """Turns visits into planned groups: a function of the settings, the weights and the place.

    overrides: data set -> what it sets for itself. context_len: most tokens of prompt and response
    together. start: the cursor at which the data is opened, with its fingerprint.
    `made_from` digests what all groups of a rollout depend on.
    """

    def __init__(
        self,
        order: Order,
        settings: Settings,
        weights: Weights,
        *,
        overrides: dict[str, Overrides],
        purpose: tuple[int | str, ...],
        context_len: int | None = None,
        start: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._seed, self._purpose = settings.seed, purpose
        self._context_len = context_len
        self._sampling = {name: plan_sampling(settings, own) for name, own in overrides.items()}
        self._nums = {
            name: own.n_samples_per_prompt or settings.rollout.n_samples_per_prompt
            for name, own in overrides.items()
        }
        self.made_from = digest_value(
            {
                "weights": weights.digest,
                "version": weights.version,
                "purpose": list(purpose),
                # A reward that was mended is another one.
                "code": Path(order.code_dir).name,
                "settings": settings_digest(settings),
                "overrides": {name: own.model_dump() for name, own in overrides.items()},
                "start": dict(start),
            }
        )
        self._prefix = self.made_from.rpartition(":")[2][:16] + "-"

    def is_alike(self, key: str) -> bool:
        """Whether a group of this key was made from what groups are made from here: settings,
        weights, code, and data. With its number that says which group it is."""
        return key.startswith(self._prefix)

    def plan(self, visit: Visit) -> PlannedGroup:
        """A new group."""
        name, index = visit.prompt.data_set, visit.group_index
        seeds = derive_seeds(self._seed, *self._purpose, index, num=self._nums[name])
        request = Request(index, visit.tokens, seeds)
        return PlannedGroup(visit, request, self._limit(visit), self._key(visit, request))

    def resume(self, visit: Visit, carried: Sequence[Sample]) -> PlannedGroup:
        """A group that an earlier rollout did not finish; `carried` are all of its samples."""
        sampling = self._limit(visit)
        limit = sampling.max_new_tokens
        asked = tuple(
            place
            for place, sample in enumerate(carried)
            if sample.status == "aborted" and sample.response_length < limit
        )
        request = Request(
            visit.group_index,
            visit.tokens,
            tuple(carried[place].seed for place in asked),
            tuple(carried[place].response_tokens for place in asked),
        )
        key = self._key(visit, request, carried)
        return PlannedGroup(visit, request, sampling, key, tuple(carried), asked)

    def _limit(self, visit: Visit) -> Sampling:
        """The sampling of a visit: no response may leave the context."""
        sampling = self._sampling[visit.prompt.data_set]
        if self._context_len is None:
            return sampling
        room = self._context_len - len(visit.tokens)
        if room >= sampling.max_new_tokens:
            return sampling
        return replace(sampling, max_new_tokens=max(1, room))

    def _key(self, visit: Visit, request: Request, carried: Sequence[Sample] = ()) -> str:
        parts = [
            self.made_from,
            visit.group_index,
            visit.prompt.data_set,
            visit.prompt.prompt,
            visit.prompt.label,
            visit.prompt.metadata,
            request.prompt_tokens,
            request.seeds,
            carried,
        ]
        return self._prefix + digest_bytes(dumps(parts)).rpartition(":")[2]


def plan_sampling(settings: Settings, own: Overrides) -> Sampling:
    """The sampling parameters of a data set: its own, else the rollout's."""
    rollout = settings.rollout
    values: dict[str, Any] = {"stop_token_ids": tuple(rollout.rollout_stop_token_ids)}
    for name, field in _SAMPLING.items():
        value = getattr(own, name)
        value = getattr(rollout, name) if value is None else value
        values[field] = tuple(value) if isinstance(value, list) else value
    return Sampling(**values)


class Finisher:
    """Turns completions into samples. `masks_old`: tokens of earlier weights are not trained on."""

    def __init__(self, weights: Weights, tokenizer: Any, *, masks_old: bool = False) -> None:
        self._weights = weights
        self._masks_old = masks_old
        self._decode = make_decode(tokenizer)

    def finish(self, group: PlannedGroup, completions: Sequence[Completion]) -> list[Sample]:
        """The samples of a group without reward, after what was carried over.

        One that was cut off has the status `aborted`. EngineError for one that is of other
        weights, or that has no tokens though it was not cut off.
        """
        for completion in completions:
            if completion.label != self._weights.label:
                raise EngineError(f"a sample of {completion.label}, not of {self._weights.label}")
            if completion.finish != "abort" and not completion.tokens:
                raise EngineError(f"group {group.group_index}: the engine gave no whole answer")
        if not group.carried:
            texts = self._decode([found.tokens for found in completions])
            made = zip(completions, texts, strict=True)
            return [self._make(group, k, found, text) for k, (found, text) in enumerate(made)]
        new = dict(zip(group.asked, completions, strict=True))
        return [self._go_on(group, had, new.get(k)) for k, had in enumerate(group.carried)]

    def _make(self, group: PlannedGroup, index: int, found: Completion, text: str) -> Sample:
        visit, prompt = group.visit, group.visit.prompt
        # Without: what was cut off, or an engine that was not told to say them.
        routed = (found.routed_experts,) if found.routed_experts else ()
        return (RoutedSample if routed else Sample)(  # by place, which is twice as quick as by name
            visit.group_index,
            index,
            visit.tokens,
            found.tokens,
            found.logprobs,
            (1,) * len(found.tokens),
            prompt.prompt,
            text,
            prompt.label,
            None,
            _STATUS[found.finish],
            self._weights.version,
            group.request.seeds[index],
            prompt.metadata,
            {},
            (),
            -1,
            prompt.data_set,
            *routed,
        )

    def _go_on(self, group: PlannedGroup, had: Sample, found: Completion | None) -> Sample:
        """A carried sample after its continuation; without one it was at its end already."""
        version = self._weights.version
        versions = had.token_versions or (had.weights_version,) * had.response_length
        tokens, logprobs = had.response_tokens, had.rollout_logprobs
        status = "truncated" if had.status == "aborted" else had.status
        mask = (0,) * had.response_length if self._masks_old else had.loss_mask
        if found is not None:
            tokens, logprobs = tokens + found.tokens, logprobs + found.logprobs
            versions = versions + (version,) * len(found.tokens)
            mask = mask + (1,) * len(found.tokens)
            status = _STATUS[found.finish]
        return replace(
            had,
            response_tokens=tokens,
            rollout_logprobs=logprobs,
            loss_mask=mask,
            response=self._decode([tokens])[0],
            status=status,
            weights_version=version,
            token_versions=versions,
            reward=None,
            rewards={},
        )


def make_decode(tokenizer: Any) -> Callable[[Sequence[Sequence[int]]], list[str]]:
    """A function from several samples' tokens to their texts, special tokens left out.

    The tokenizers library's own call costs a fifth of `decode`, and says the same where nothing is
    cleaned up afterwards. (Its call for many at once starts threads, which costs more than it
    saves.)
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or getattr(tokenizer, "clean_up_tokenization_spaces", True):
        return lambda many: [tokenizer.decode(one, skip_special_tokens=True) for one in many]
    return lambda many: [backend.decode(one, skip_special_tokens=True) for one in many]


_STATUS = {"stop": "completed", "length": "truncated", "abort": "aborted"}
