from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_rl.config.rollout_schema import EvalSet, Overlong
from slurm_rl.config.schema import Settings
from slurm_rl.errors import ConfigError, RewardError
from slurm_rl.rollout.rewards import find_reward, find_rewards
from slurm_rl.rollout.rewards.functions import check_reward
from slurm_rl.rollout.rewards.plan import Plans, overlong_penalty

Make = Callable[..., Settings]


@given(st.integers(0, 500), st.integers(1, 200), st.integers(1, 200), st.floats(0, 10))
def test_overlong_is_the_papers_three_pieces(
    length: int, buffer_len: int, rest: int, factor: float
) -> None:
    limit = buffer_len + rest
    value = overlong_penalty(
        length, limit=limit, overlong=Overlong(buffer_len=buffer_len, penalty_factor=factor)
    )
    if length <= limit - buffer_len:
        expected = 0.0
    elif length <= limit:
        expected = (limit - buffer_len - length) / buffer_len
    else:
        expected = -1.0
    assert value == pytest.approx(expected * factor)


def test_a_data_set_has_a_reward_and_a_limit_of_its_own(make: Make) -> None:
    settings = make(
        prompt_data=[
            {"name": "a", "path": "/a"},
            {"name": "b", "path": "/b", "rm_type": "gsm8k", "rollout_max_response_len": 99},
        ],
        rm_type="f1",
        overlong={"buffer_len": 2},
    )
    plans = Plans(settings)
    a, b, other = (plans.choose(name, None) for name in ("a", "b", "?"))
    assert [plan.terms[0].name for plan in (a, b, other)] == ["f1", "gsm8k", "f1"]
    assert [plan.limit for plan in (a, b, other)] == [6, 99, 6]
    own = plans.choose("b", "boxed_exact_match")
    assert (own.terms[0].name, own.limit) == ("boxed_exact_match", 99)
    assert own.overlong is not None
    assert plans.choose("b", "boxed_exact_match") is own


def test_an_evaluation_has_its_own_reward_and_is_not_shaped(make: Make) -> None:
    settings = make(
        rm_type=None,
        rewards=[{"rm_type": "f1", "weight": 2.0, "name": "overlap"}, {"rm_type": "gsm8k"}],
        overlong={"buffer_len": 2},
    )
    own = Plans(settings, EvalSet(prompt_data="/a", rm_type="gsm8k")).choose("data", None)
    assert [term.name for term in own.terms] == ["gsm8k"]
    plain = Plans(settings, EvalSet(prompt_data="/a")).choose("data", None)
    assert [(term.name, term.weight) for term in plain.terms] == [("overlap", 2.0), ("gsm8k", 1.0)]
    assert own.overlong is None and plain.overlong is None
    assert find_rewards(settings) == ["f1", "gsm8k"]


def test_each_term_sees_its_own_options(make: Make) -> None:
    rewards: list[dict[str, Any]] = [
        {"rm_type": "format", "options": {"pattern": "a"}},
        {"rm_type": "format", "name": "tags"},
    ]
    first, second = Plans(make(rewards=rewards)).choose("data", None).terms
    assert first.args.reward_options == {"pattern": "a"} and not first.is_quick
    assert second.args.reward_options == {} and second.is_quick
    assert first.args.seed == 1234 and first.args.n_samples_per_prompt == 4


def test_one_reward_must_be_named() -> None:
    for rm_type, path in ((None, None), ("f1", "a.b")):
        with pytest.raises(ConfigError, match="one of rm_type and custom_rm_path"):
            find_reward(rm_type=rm_type, custom_rm_path=path)
    with pytest.raises(ConfigError, match="'f2' is no built-in reward; there are exact_match"):
        find_reward(rm_type="f2", custom_rm_path=None)
    with pytest.raises(ConfigError, match="'boxed_judge' is no built-in reward"):
        find_reward(rm_type="boxed_judge", custom_rm_path=None)


@pytest.mark.parametrize("value", [10**400, 1e39, -1e39, math.inf, math.nan])
def test_a_number_that_a_sample_cannot_hold_is_a_failure(value):
    with pytest.raises(RewardError, match="returned"):
        check_reward(value, function=lambda args, sample: value, prompt="p")
    assert check_reward(3e38, function=lambda args, sample: 0, prompt="p") == 3e38
