"""What a sample's reward is made of: terms, weights and shaping, by data set. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

from slurm_rl.config.derive import data_sets
from slurm_rl.config.reward_checks import name_of, reward_sources
from slurm_rl.config.rollout_schema import Overlong, Overrides, Reward, Rollout
from slurm_rl.config.row_rules import RowFault, check_reward_name
from slurm_rl.config.schema import Settings
from slurm_rl.errors import DataError, RewardError
from slurm_rl.rollout.rewards.functions import BuiltIn, RewardFunction, find_built_in, find_reward


@dataclass(frozen=True, slots=True)
class Term:
    """One summand. `args` is what its function gets: all settings, and its own options."""

    name: str
    weight: float
    function: BuiltIn | RewardFunction
    args: Any

    @property
    def is_quick(self) -> bool:
        """Whether it is so cheap that it runs at once, on the event loop."""
        function = self.function
        if not isinstance(function, BuiltIn) or function.quick is None:
            return False
        return function.slow is None or not self.args.reward_options


@dataclass(frozen=True, slots=True)
class Plan:
    """The reward of one data set.

    is_sum:  whether the terms are weighted and each is recorded; else there is one term.
    overlong, limit: DAPO's shaping and the response limit that it counts from.
    """

    terms: tuple[Term, ...]
    is_sum: bool
    limit: int
    overlong: Overlong | None

    @property
    def is_quick(self) -> bool:
        return all(term.is_quick for term in self.terms)


class Plans:
    """The plan of each data set, and of a sample that names its own reward."""

    def __init__(
        self, settings: Settings, overrides: Overrides | None = None, **given: Any
    ) -> None:
        """given: what rewards find in `args` besides the settings."""
        self._base = {**dict(settings), **dict(settings.rollout), **given}
        self._default = self._plan(settings, overrides, is_shaped=overrides is None)
        self._by_set: dict[str, Plan] = {}
        self._by_name: dict[tuple[str, str], Plan] = {}
        if overrides is None and not isinstance(settings.rollout.prompt_data, str):
            self._by_set = {
                entry.name: self._plan(settings, entry, is_shaped=True)
                for entry in data_sets(settings)
            }

    def choose(self, data_set: str, rm_type: Any) -> Plan:
        """The plan for a sample. rm_type: what its metadata says, or None. Raises DataError.

        Rows are looked at when they are read: this is for what the user's code put there.
        """
        plan = self._by_set.get(data_set, self._default)
        if rm_type is None:
            return plan
        key = (data_set, str(rm_type))
        if key not in self._by_name:
            try:
                check_reward_name(rm_type)
            except RowFault as fault:
                rule = f"a sample of the data set {data_set!r}: {fault.rule}"
                raise DataError(rule, hint=fault.fix) from fault
            term = self._term(find_built_in(rm_type), str(rm_type))
            self._by_name[key] = Plan((term,), False, plan.limit, plan.overlong)
        return self._by_name[key]

    def _plan(self, settings: Settings, own: Overrides | None, *, is_shaped: bool) -> Plan:
        """The reward that `own` names, else the one of `rollout`."""
        rollout = settings.rollout
        limit = rollout.rollout_max_response_len
        if own is not None and own.rollout_max_response_len is not None:
            limit = own.rollout_max_response_len
        overlong = rollout.overlong if is_shaped else None
        if own is not None and (own.rm_type is not None or own.custom_rm_path is not None):
            return Plan((self._find(own),), False, limit, overlong)
        if rollout.rewards:
            terms = tuple(
                self._find(reward, reward.name, reward.weight, reward.options)
                for reward in rollout.rewards
            )
            return Plan(terms, True, limit, overlong)
        if rollout.rm_type is None and rollout.custom_rm_path is None:
            return Plan((self._term(no_reward, "none"),), False, limit, overlong)
        return Plan((self._find(rollout),), False, limit, overlong)

    def _find(
        self,
        source: Rollout | Overrides | Reward,
        name: str | None = None,
        weight: float = 1.0,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> Term:
        rm_type, dotted = source.rm_type, source.custom_rm_path
        function = find_reward(rm_type=rm_type, custom_rm_path=dotted)
        return self._term(function, name or name_of(rm_type, dotted), weight, options)

    def _term(
        self,
        function: BuiltIn | RewardFunction,
        name: str,
        weight: float = 1.0,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> Term:
        args = SimpleNamespace(**self._base, reward_options=dict(options))
        return Term(name, weight, function, args)


def no_reward(args: Any, sample: Any) -> float:
    """Stands where the settings name no reward, since samples bring their own. Raises."""
    raise RewardError(
        "no reward is named, and the sample came without one",
        hint="set it in the generate function or the environment, or name one as rollout.rm_type",
    )


def find_rewards(settings: Settings) -> list[str]:
    """Names and dotted paths of all rewards of the rollout and the evaluations, each found. Raises
    as `Plans`."""
    for own in (None, *settings.eval.values()):
        Plans(settings, own)
    named = {source.custom_rm_path or source.rm_type for _, source in reward_sources(settings)}
    return sorted(name for name in named if name is not None)


def overlong_penalty(length: int, *, limit: int, overlong: Overlong) -> float:
    """DAPO's soft penalty (arXiv 2503.14476, eq. 13), times the factor.

    0 up to `limit - buffer_len` tokens, then falling in a line to -factor at `limit`, and -factor
    beyond it.
    """
    excess = length - (limit - overlong.buffer_len)
    share = min(1.0, max(0.0, excess / overlong.buffer_len))
    return -share * overlong.penalty_factor if share else 0.0
