"""From what rewards gave to a sample's reward: numbers, named parts, the sum. Pure.

The user's rewards get copies of samples (`hand_over`). What they change in the metadata is taken
back if it is JSON; whatever else they change is not.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slurm_rl.errors import RewardError
from slurm_rl.rollout.plain_json import NotPlain, copy_object
from slurm_rl.rollout.rewards.functions import (
    as_number,
    check_reward,
    describe,
    is_storable,
    shorten,
)
from slurm_rl.rollout.rewards.plan import Plan, Term, overlong_penalty
from slurm_rl.rollout.samples import Sample


@dataclass(frozen=True, slots=True)
class Part:
    """What one term gave one sample.

    others:   further numbers, where it gave an object.
    metadata: as the user's function left it; None: as it was.
    """

    value: float
    others: Mapping[str, float] | None = None
    metadata: Mapping[str, Any] | None = None


def hand_over(sample: Sample) -> Sample:
    """A copy for the user's code: samples of a group share what they have from their row."""
    return replace(
        sample,
        prompt=copy.deepcopy(sample.prompt),
        label=copy.deepcopy(sample.label),
        metadata=copy.deepcopy(sample.metadata),
        rewards=dict(sample.rewards),
    )


def take_back(value: Any, term: Term, given: Sample, *, sample: Sample) -> Part:
    """What the user's function returned for `given`, the copy of `sample`, and what it changed in
    its metadata.

    Raises RewardError, also for metadata that is no JSON.
    """
    part = make_part(value, term, prompt=sample.prompt)
    try:
        if given.metadata == sample.metadata:
            return part
    except Exception:  # it holds what cannot be compared, as an array: it was changed
        pass
    try:
        return replace(part, metadata=copy_object(given.metadata, name="metadata"))
    except NotPlain as problem:
        raise RewardError(
            f"reward {describe(term.function)} left in a sample's metadata what cannot be kept:"
            f" {problem.where} {problem.why}",
            hint="put texts, finite numbers, lists and objects there",
        ) from None


def make_part(value: Any, term: Term, *, prompt: Any) -> Part:
    """What a reward function returned as a part.

    Of an object, `reward_key` names what counts; its other numbers are recorded. Raises
    RewardError for what is no finite number.
    """
    key = term.args.reward_key
    if key is None or not isinstance(value, Mapping):
        return Part(check_reward(value, function=term.function, prompt=prompt))
    if key not in value:
        names = ", ".join(map(str, value)) or "nothing"
        raise RewardError(
            f"reward {describe(term.function)} returned an object without {key!r} (it has"
            f" {names[:100]}) for the prompt {shorten(prompt)}",
            hint="return it, or name another entry as rollout.reward_key",
        )
    found = {str(name): as_number(number) for name, number in value.items() if name != key}
    others = {
        name: float(number)
        for name, number in found.items()
        if number is not None and is_storable(number)
    }
    return Part(check_reward(value[key], function=term.function, prompt=prompt), others)


def finish(sample: Sample, plan: Plan, parts: Sequence[Part]) -> Sample:
    """The sample with its reward: the weighted sum of the parts, and the overlong penalty."""
    reward, recorded = 0.0, {}
    for term, part in zip(plan.terms, parts, strict=True):
        reward += term.weight * part.value
        if plan.is_sum or plan.overlong is not None:
            recorded[term.name] = part.value
        for name, number in (part.others or {}).items():
            recorded[f"{term.name}/{name}" if plan.is_sum else name] = number
    if plan.overlong is not None:
        penalty = overlong_penalty(sample.response_length, limit=plan.limit, overlong=plan.overlong)
        recorded["overlong"] = penalty
        reward += penalty
    if not is_storable(reward):
        raise RewardError(
            f"the weighted sum of the rewards is {reward} for the prompt {shorten(sample.prompt)}",
            hint="lower the weights, or return smaller numbers",
        )
    metadata = _put_together(sample.metadata, parts)
    if metadata is not sample.metadata:
        sample = replace(sample, metadata=metadata)
    return sample.graded(reward, recorded)


def _put_together(before: dict[str, Any], parts: Sequence[Part]) -> dict[str, Any]:
    """The metadata with what each term changed in it; of two that changed one entry the later."""
    now = before
    for part in parts:
        if part.metadata is None:
            continue
        changed = {k: v for k, v in part.metadata.items() if k not in before or before[k] != v}
        gone = before.keys() - part.metadata.keys()
        now = {k: v for k, v in now.items() if k not in gone} | changed
    return now
