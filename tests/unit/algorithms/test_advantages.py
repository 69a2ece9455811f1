"""Group advantages against numbers worked out by hand."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from slurm_rl.algorithms.advantages import group_advantages


def advantages(rewards, groups, **options):
    return group_advantages(
        torch.tensor(rewards), group_index_B=torch.tensor(groups), **options
    ).tolist()


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


def test_equal_rewards_give_zero():
    close(advantages([0.7] * 4, [0] * 4), [0.0] * 4)


def test_without_the_division_it_is_centred_only():
    close(advantages([1.0, 0.0], [0, 0], divide_by_std=False), [0.5, -0.5])


@given(
    rewards=st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=8),
    shift=st.floats(-5, 5, width=32),
)
def test_a_constant_added_to_all_rewards_changes_nothing(rewards, shift):
    groups = [0] * len(rewards)
    plain = advantages(rewards, groups, divide_by_std=False)
    shifted = advantages([r + shift for r in rewards], groups, divide_by_std=False)
    assert torch.allclose(torch.tensor(plain), torch.tensor(shifted), atol=1e-5)
