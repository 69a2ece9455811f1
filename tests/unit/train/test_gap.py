"""The gap between engine and trainer: which tokens it is of, and its gates."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy.batches import batch_of

from slurm_rl.config.train_schema import Train
from slurm_rl.errors import NumericsError
from slurm_rl.train import cpu

with cpu.megatron_imports():
    from slurm_rl.train.gap import Gap, check_gap, measure_gap

DISTANCES = st.lists(st.floats(0, 900, width=32), min_size=1, max_size=300)


def limits(**values):
    return Train.model_validate({"global_batch_size": 8, **values})


@given(DISTANCES)
def test_mean_percentile_and_maximum_are_exact(distances):
    samples = batch_of([len(distances)])
    gap = measure_gap(samples, torch.from_numpy(samples.rollout_logprobs) - torch.tensor(distances))
    assert gap is not None and gap.num_tokens == len(distances)
    away = np.abs(
        samples.rollout_logprobs
        - (torch.from_numpy(samples.rollout_logprobs) - torch.tensor(distances)).numpy()
    ).astype(np.float64)
    assert gap.mean == pytest.approx(away.mean(), rel=1e-9)
    assert gap.p99 == np.quantile(away, 0.99, method="inverted_cdf")
    assert gap.largest == away.max()


def test_only_trained_tokens_of_the_served_weights_count():
    samples = batch_of(
        [3, 2], loss_mask=[1, 0, 1, 1, 1], token_versions=[4, 4, 3, 4, 4], weights_version=[4, 4]
    )
    away = torch.tensor([1.0, 100.0, 100.0, 2.0, 3.0])
    gap = measure_gap(samples, torch.from_numpy(samples.rollout_logprobs) + away)
    assert gap is not None
    assert (gap.num_tokens, gap.mean, gap.largest) == (3, 2.0, 3.0)
    old = batch_of([2], token_versions=[1, 1], weights_version=[2])
    assert measure_gap(old, torch.zeros(2)) is None


def test_what_is_not_a_number_shows():
    samples = batch_of([2])
    gap = measure_gap(samples, torch.tensor([math.nan, 0.0]))
    assert gap is not None and math.isnan(gap.mean)


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
