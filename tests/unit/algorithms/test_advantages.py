"""Advantages of samples against numbers worked out by hand."""

import math
import statistics

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm_rl.algorithms.advantages import centred_rewards, group_advantages, rloo_advantages

#: A busy machine is no failure.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def advantages(rewards, groups, **options):
    return group_advantages(
        torch.tensor(rewards), group_index_B=torch.tensor(groups), **options
    ).tolist()


def rloo(rewards, groups):
    return rloo_advantages(torch.tensor(rewards), group_index_B=torch.tensor(groups)).tolist()


def close(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-6), (found, expected)


def test_two_rewards_by_hand():
    # mean 0.5; unbiased deviation sqrt((0.25 + 0.25) / 1) = 0.70710678
    expected = 0.5 / (0.70710678 + 1e-6)
    close(advantages([1.0, 0.0], [7, 7]), [expected, -expected])


def test_three_rewards_by_hand():
    # mean 2; deviation sqrt((1 + 0 + 1) / 2) = 1
    close(advantages([1.0, 2.0, 3.0], [0, 0, 0]), [-1 / 1.000001, 0.0, 1 / 1.000001])


def test_groups_do_not_touch_each_other_and_may_interleave_and_differ_in_size():
    mixed = advantages([1.0, 5.0, 3.0, 0.0, 0.0], [0, 1, 0, 1, 1])
    first = advantages([1.0, 3.0], [0, 0])
    second = advantages([5.0, 0.0, 0.0], [1, 1, 1])
    close(mixed, [first[0], second[0], first[1], second[1], second[2]])


def test_a_group_of_one_is_zero_not_nan():
    close(advantages([3.0], [0]), [0.0])
    close(rloo([3.0, 1.0], [0, 5]), [0.0, 0.0])


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_equal_rewards_give_exactly_zero(size):
    # 0.1 has no exact float, and a third of three of them need not be one of them.
    assert advantages([0.1] * size, [0] * size) == [0.0] * size
    assert rloo([0.1] * size, [0] * size) == [0.0] * size


def test_without_the_division_it_is_centred_only():
    close(advantages([1.0, 0.0], [0, 0], divide_by_std=False), [0.5, -0.5])


def test_leave_one_out_by_hand():
    # 1 - (0 + 0) / 2 = 1;  0 - (1 + 0) / 2 = -0.5
    close(rloo([1.0, 0.0, 0.0], [3, 3, 3]), [1.0, -0.5, -0.5])
    # 1 - 4 = -3;  4 - 1 = 3
    close(rloo([1.0, 4.0], [0, 0]), [-3.0, 3.0])


def test_no_samples_give_no_advantages():
    empty, none = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    for function in (group_advantages, rloo_advantages, centred_rewards):
        assert function(empty, group_index_B=none).shape == (0,)


def test_integer_rewards_become_float_and_float64_stays():
    groups = torch.tensor([0, 0])
    for function in (group_advantages, rloo_advantages, centred_rewards):
        assert function(torch.tensor([1, 0]), group_index_B=groups).dtype == torch.float32
        wide = function(torch.tensor([1.0, 0.0]).double(), group_index_B=groups)
        assert wide.dtype == torch.float64


@unhurried
@given(
    rewards=st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=8),
    shift=st.floats(-5, 5, width=32),
)
def test_a_constant_added_to_all_rewards_changes_nothing(rewards, shift):
    groups = [0] * len(rewards)
    plain = advantages(rewards, groups, divide_by_std=False)
    shifted = advantages([r + shift for r in rewards], groups, divide_by_std=False)
    assert torch.allclose(torch.tensor(plain), torch.tensor(shifted), atol=1e-5)


samples = st.lists(st.tuples(st.floats(-10, 10, width=32), st.integers(-2, 3)), max_size=12)


@unhurried
@given(samples)
def test_each_group_is_what_python_statistics_say(pairs):
    rewards, groups = [p[0] for p in pairs], [p[1] for p in pairs]
    expected, left_out = [], []
    for reward, group in pairs:
        own = [r for r, g in pairs if g == group]
        deviation = statistics.stdev(own) if len(own) > 1 else 0.0
        expected.append((reward - statistics.fmean(own)) / (deviation + 1e-6))
        others = (math.fsum(own) - reward) / max(len(own) - 1, 1)
        left_out.append(reward - others if len(own) > 1 else 0.0)
    tensors = torch.tensor(rewards), torch.tensor(groups, dtype=torch.long)
    found = group_advantages(tensors[0].double(), group_index_B=tensors[1])
    assert torch.allclose(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-8)
    found = rloo_advantages(tensors[0].double(), group_index_B=tensors[1])
    assert torch.allclose(found, torch.tensor(left_out, dtype=torch.float64), rtol=1e-9, atol=1e-12)


@unhurried
@given(samples, st.randoms(use_true_random=False))
def test_the_order_of_samples_does_not_matter(pairs, random):
    order = list(range(len(pairs)))
    random.shuffle(order)
    rewards = torch.tensor([p[0] for p in pairs]).double()
    groups = torch.tensor([p[1] for p in pairs], dtype=torch.long)
    for function in (group_advantages, rloo_advantages):
        plain = function(rewards, group_index_B=groups)
        mixed = function(rewards[order], group_index_B=groups[order])
        assert torch.allclose(mixed, plain[order], rtol=1e-9, atol=1e-9)


def test_thousands_of_groups_need_no_loop_over_them():
    rewards = torch.arange(40_000) % 7 * 0.25
    groups = torch.arange(40_000) // 2
    found = group_advantages(rewards, group_index_B=groups).reshape(-1, 2)
    pairs = rewards.reshape(-1, 2)
    expected = (pairs - pairs.mean(1, keepdim=True)) / (pairs.std(1, keepdim=True) + 1e-6)
    assert torch.allclose(found, expected, atol=1e-5)
