"""The gap between engine and trainer: its percentile from a histogram, and its gates."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slurm_rl.config.schema import Train
from slurm_rl.errors import NumericsError
from slurm_rl.train import cpu

with cpu.megatron_imports():
    from slurm_rl.train.gap import Gap, check_gap, count_bins, percentile

VALUES = st.lists(st.floats(0, 900, allow_subnormal=False), min_size=1, max_size=300)


def limits(**values):
    return Train.model_validate({"global_batch_size": 8, **values})


@given(VALUES, st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_a_percentile_of_the_histogram_is_that_of_the_values(values, share):
    exact = float(np.quantile(values, share, method="inverted_cdf"))
    found = percentile(count_bins(torch.tensor(values, dtype=torch.float64)), share)
    assert exact <= found * (1 + 1e-9)
    assert found <= max(exact * 1.006, 1.01e-8)


@given(VALUES, VALUES)
def test_histograms_of_two_ranks_add_up(some, others):
    parts = [count_bins(torch.tensor(v, dtype=torch.float64)) for v in (some, others)]
    whole = count_bins(torch.tensor(some + others, dtype=torch.float64))
    assert torch.equal(parts[0] + parts[1], whole)
    assert int(whole.sum()) == len(some) + len(others)


def test_what_is_not_finite_is_in_the_last_bin():
    counts = count_bins(torch.tensor([math.inf, math.nan, 0.0], dtype=torch.float64))
    assert counts[-1] == 2 and counts[0] == 1


@pytest.mark.parametrize(
    ("mean", "first", "train", "said"),
    [
        (0.2, None, {"max_logprob_gap": 0.1}, r"is 0\.2, train\.max_logprob_gap allows 0\.1"),
        (math.nan, None, {"max_logprob_gap": 0.1}, "is nan"),
        (0.2, 0.01, {"max_logprob_gap_drift": 10.0}, r"20 times the run's first \(0\.01\)"),
        (math.nan, 0.01, {"max_logprob_gap_drift": 10.0}, "nan times"),
        # An engine that agreed exactly is taken to have differed by 1e-6.
        (2e-5, 0.0, {"max_logprob_gap_drift": 10.0}, "20 times"),
    ],
)
def test_too_large_a_gap_is_refused_with_both_numbers(mean, first, train, said):
    with pytest.raises(NumericsError, match=said) as error:
        check_gap(Gap(mean, 1.0, 2.0, 9), train=limits(**train), first=first)
    assert "quantized or stale weights" in str(error.value)


@pytest.mark.parametrize(
    ("mean", "first", "train"),
    [
        (5.0, 0.001, {}),
        (0.1, None, {"max_logprob_gap": 0.1, "max_logprob_gap_drift": 2.0}),
        (0.1, 0.05, {"max_logprob_gap_drift": 2.0}),
        (9e-6, 0.0, {"max_logprob_gap_drift": 10.0}),
    ],
)
def test_a_gap_within_the_limits_goes_on(mean, first, train):
    check_gap(Gap(mean, 1.0, 2.0, 9), train=limits(**train), first=first)
    check_gap(None, train=limits(**train), first=first)
