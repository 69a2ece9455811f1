"""Losses and their aggregation against numbers worked out by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slurm_rl.algorithms.losses import kl_estimate, ppo_clip_loss, token_weights, weighted_sum


def clip_loss(ratio, advantage, *, high=None):
    """Loss, gradient with respect to the log-probability, and whether it was clipped."""
    logprobs = torch.tensor([math.log(ratio)], requires_grad=True)
    out = ppo_clip_loss(
        logprobs,
        proximal_logprobs_N=torch.zeros(1),
        advantages_N=torch.tensor([advantage]),
        eps_clip=0.2,
        eps_clip_high=high,
    )
    out.loss_N.sum().backward()
    return out.loss_N.item(), logprobs.grad.item(), out.clipped_N.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "high", "loss", "gradient", "clipped"),
    [
        # inside the clip: -A r, whose derivative by log p is -A r
        (1.0, 2.0, None, -2.0, -2.0, 0),
        (1.1, 1.0, None, -1.1, -1.1, 0),
        # above it with a gain: -A (1 + 0.2), no gradient
        (1.5, 1.0, None, -1.2, 0.0, 1),
        # clip-higher lets it go further
        (1.25, 1.0, 0.28, -1.25, -1.25, 0),
        (1.5, 1.0, 0.28, -1.28, 0.0, 1),
        # below it with a loss: -A (1 - 0.2), no gradient
        (0.5, -1.0, None, 0.8, 0.0, 1),
        # a clip never hides a mistake: the larger loss counts, with its gradient
        (1.5, -1.0, None, 1.5, 1.5, 0),
        (0.5, 1.0, None, -0.5, -0.5, 0),
    ],
)
def test_clipped_loss_by_hand(ratio, advantage, high, loss, gradient, clipped):
    found = clip_loss(ratio, advantage, high=high)
    assert found == pytest.approx((loss, gradient, clipped), abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "expected"),
    # d = log 0.5 - log 0.25 = log 2 = 0.693147
    [("k1", 0.693147), ("k2", 0.240227), ("k3", 0.5 - 1 + 0.693147)],
)
def test_kl_by_hand(kind, expected):
    policy, reference = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
    found = kl_estimate(policy, reference_logprobs_N=reference, kind=kind)
    assert found.item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(kind):
    # The expectation over all three tokens, not over samples of them.
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    estimate = kl_estimate(p.log(), reference_logprobs_N=q.log(), kind=kind)
    assert (p * estimate).sum().item() == pytest.approx((p * (p / q).log()).sum().item(), abs=1e-6)


@given(st.lists(st.floats(-20, 0, width=32), min_size=1, max_size=9), st.floats(-20, 0, width=32))
def test_k2_and_k3_are_never_negative(policy, reference):
    logprobs = torch.tensor(policy)
    for kind in ("k2", "k3"):
        found = kl_estimate(
            logprobs, reference_logprobs_N=torch.full_like(logprobs, reference), kind=kind
        )
        assert (found >= -1e-6).all()


def test_weights_are_means_within_samples():
    # Two samples: lengths 3 and 2, the first with one token masked.
    mask = torch.tensor([1, 0, 1, 1, 1])
    weights = token_weights(mask, lengths_B=torch.tensor([3, 2]))
    assert weights.tolist() == [0.5, 0.0, 0.5, 0.5, 0.5]


def test_weights_per_token_are_the_mask():
    mask = torch.tensor([1, 0, 1, 1, 1], dtype=torch.uint8)
    weights = token_weights(mask, lengths_B=torch.tensor([3, 2]), per_token=True)
    assert weights.tolist() == [1.0, 0.0, 1.0, 1.0, 1.0]


def test_a_sample_that_is_masked_throughout_has_weight_zero_not_nan():
    weights = token_weights(torch.tensor([0, 0, 1]), lengths_B=torch.tensor([2, 1]))
    assert weights.tolist() == [0.0, 0.0, 1.0]


def test_masked_tokens_count_nothing_whatever_they_hold():
    values = torch.tensor([2.0, float("nan"), float("inf")])
    assert weighted_sum(values, weights_N=torch.tensor([0.5, 0.0, 0.0])).item() == 1.0


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=2, max_size=6), st.data())
def test_cut_into_micro_batches_the_sum_is_the_same(masks, data):
    lengths = torch.tensor([len(m) for m in masks])
    flat = torch.tensor([float(v) for m in masks for v in m])
    values = torch.arange(1.0, len(flat) + 1)
    weights = token_weights(flat, lengths_B=lengths)
    whole = weighted_sum(values, weights_N=weights)
    cut = data.draw(st.integers(1, len(flat) - 1))
    parts = [
        weighted_sum(values[s], weights_N=weights[s]) for s in (slice(0, cut), slice(cut, None))
    ]
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-5)
