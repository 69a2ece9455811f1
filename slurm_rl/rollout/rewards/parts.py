"""From what rewards gave to a sample's reward: numbers, named parts, the sum. Pure."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurm_rl.errors import RewardError
from slurm_rl.rollout.rewards.functions import check_reward, is_storable, shorten
from slurm_rl.rollout.rewards.plan import Plan, Term, overlong_penalty
from slurm_rl.rollout.samples import Sample


@dataclass(frozen=True, slots=True)
class Part:
    """What one term gave one sample; `others`: further numbers, where it gave an object."""

    value: float
    others: Mapping[str, float] | None = None


def make_part(value: Any, term: Term, *, prompt: Any) -> Part:
    """What a reward function returned as a part.

    Of an object, `reward_key` names what counts; its other numbers are recorded. Raises
    RewardError for what is no finite number.
    """
    key = term.args.reward_key
    if key is None or not isinstance(value, dict) or key not in value:
        return Part(check_reward(value, function=term.function, prompt=prompt))
    others = {
        str(name): float(number)
        for name, number in value.items()
        if name != key and isinstance(number, numbers.Real) and is_storable(number)
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
    return sample.graded(reward, recorded)
