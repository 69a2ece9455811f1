"""The ground rules that every algorithm leans on."""

import math

import pytest
import torch

from slurm_rl.algorithms.numerics import (
    LOG_RATIO_BOUND,
    as_float,
    bounded_exp,
    gradient_where_finite,
    importance_ratio,
    log_ratio,
    sequence_means,
    sequence_of_tokens,
    sequence_sums,
)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.int64, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_nothing_is_cast_down(given, found):
    assert as_float(torch.ones(2).to(given)).dtype == found


def test_a_huge_log_ratio_is_bounded_and_has_no_gradient():
    logprobs = torch.tensor([-1e4, 0.0, -0.5], requires_grad=True)
    ratio = importance_ratio(logprobs, proximal_logprobs_N=torch.tensor([0.0, -1e4, -0.5]))
    ratio.sum().backward()
    assert ratio.tolist() == pytest.approx([math.exp(-20), math.exp(20), 1.0], rel=1e-5)
    assert logprobs.grad.tolist() == [0.0, 0.0, 1.0]
    assert LOG_RATIO_BOUND == 20.0


def test_a_log_ratio_of_nan_stays_visible():
    assert math.isnan(bounded_exp(torch.tensor([float("nan")])).item())


def test_a_log_ratio_is_of_the_wider_precision():
    found = log_ratio(torch.tensor([-1.0]).bfloat16(), other_logprobs_N=torch.tensor([-3.0]))
    assert found.tolist() == [2.0] and found.dtype == torch.float32


def test_a_token_that_is_not_finite_gives_nothing_to_the_gradient():
    logprobs = torch.tensor([-1.0, -2.0, float("-inf"), -3.0], requires_grad=True)
    other = torch.tensor([0.0, float("nan"), 0.0, 5.0])
    gated = gradient_where_finite(logprobs, other)
    # The gradient that comes back is NaN where a value is.
    (gated * torch.tensor([2.0, float("nan"), float("nan"), 2.0])).sum().backward()
    assert logprobs.grad.tolist() == [2.0, 0.0, 0.0, 2.0]
    assert gated.tolist() == logprobs.tolist()


def test_tokens_are_numbered_by_sequence_and_empty_sequences_have_none():
    lengths = torch.tensor([2, 0, 3, 0])
    assert sequence_of_tokens(lengths, num_tokens=5).tolist() == [0, 0, 2, 2, 2]
    assert sequence_of_tokens(torch.tensor([0]), num_tokens=0).tolist() == []


def test_sums_and_means_of_sequences_in_any_order():
    values, owner = torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([2, 0, 2, 0])
    assert sequence_sums(values, sequence_N=owner, num_sequences=4).tolist() == [10, 0, 5, 0]
    means = sequence_means(values, sequence_N=owner, num_sequences=4)
    assert means.tolist() == [5.0, 0.0, 2.5, 0.0]
    assert means.dtype == torch.float32


def test_a_long_sequence_is_added_without_loss():
    # In float32, 2²⁴ + 1 = 2²⁴: a thousand ones would vanish.
    values = torch.tensor([2.0**24] + [1.0] * 1000)
    total = sequence_sums(values, sequence_N=torch.zeros(1001, dtype=torch.long), num_sequences=1)
    assert total.item() == 2**24 + 1000
