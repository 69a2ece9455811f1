"""Off-policy corrections by hand, and under inputs meant to break them."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm_rl.algorithms.aggregation import token_weights, weighted_sum
from slurm_rl.algorithms.corrections import (
    ImportanceRule,
    RejectionRule,
    off_policy_correction,
    off_policy_ratio,
)

#: A busy machine is no failure.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

NAN = float("nan")
# Token ratios 2, 1/2 | 4 | 1, 8 of three sequences, in an order that mixes them.
RATIOS = torch.tensor([2.0, 1.0, 0.5, 4.0, 8.0])
OWNER = torch.tensor([0, 2, 0, 1, 2])
PROXIMAL = torch.full((5,), -3.0)


def correct(ratios=RATIOS, owner=OWNER, num_sequences=3, **rules):
    return off_policy_correction(
        torch.full((len(ratios),), -3.0),
        rollout_logprobs_N=-3.0 - ratios.log(),
        sequence_N=owner,
        num_sequences=num_sequences,
        **rules,
    )


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [2, 1, 0.5, 4, 8]),
        # products: 1, 4, 8
        ("sequence", [1, 8, 1, 4, 8]),
        # roots of them: 1, 4, sqrt(8)
        ("geometric", [1, 8**0.5, 1, 4, 8**0.5]),
    ],
)
def test_ratios_of_each_level_by_hand(level, expected):
    found = off_policy_ratio(
        PROXIMAL,
        rollout_logprobs_N=PROXIMAL - RATIOS.log(),
        sequence_N=OWNER,
        num_sequences=3,
        level=level,
    )
    assert found.tolist() == pytest.approx(expected, rel=1e-5)


def test_truncated_importance_sampling_by_hand():
    found = correct(importance=ImportanceRule("token", outside="truncate", low=0.75, high=3.0))
    assert found.weights_N.tolist() == pytest.approx([2, 1, 0.75, 3, 3])
    assert found.kept_N.tolist() == [True] * 5
    assert (found.num_outside, found.num_rejected) == (3, 0)
    assert found.weight_sum.item() == pytest.approx(9.75) and found.weight_max.item() == 3


def test_masked_importance_sampling_by_hand():
    found = correct(importance=ImportanceRule("token", outside="mask", low=0.75, high=3.0))
    assert found.weights_N.tolist() == pytest.approx([2, 1, 0, 0, 0])
    assert found.kept_N.tolist() == [True, True, False, False, False]
    assert (found.num_outside, found.num_rejected) == (3, 3)
    assert found.weight_sum.item() == pytest.approx(3) and found.weight_max.item() == pytest.approx(
        2
    )


@pytest.mark.parametrize(
    ("level", "kept"),
    [("token", [1, 1, 0, 0, 0]), ("sequence", [1, 0, 1, 0, 0]), ("geometric", [1, 1, 1, 0, 1])],
)
def test_rejection_by_hand(level, kept):
    found = correct(rejection=RejectionRule(level, low=0.75, high=3.0))
    assert found.weights_N.tolist() == kept and found.kept_N.tolist() == [bool(k) for k in kept]
    assert (found.num_outside, found.num_rejected) == (0, 5 - sum(kept))


def test_weights_and_rejection_together():
    found = correct(
        importance=ImportanceRule("token", outside="truncate", low=0.0, high=3.0),
        rejection=RejectionRule("sequence", low=0.5, high=5.0),
    )
    assert found.weights_N.tolist() == pytest.approx([2, 0, 0.5, 3, 0])
    assert (found.num_outside, found.num_rejected) == (2, 2)


def test_a_mask_and_a_rejection_both_drop():
    found = correct(
        importance=ImportanceRule("token", outside="mask", low=0.75, high=3.0),
        rejection=RejectionRule("sequence", low=0.5, high=5.0),
    )
    # Kept by the mask: the first two; by the rejection: all but the second and the last.
    assert found.weights_N.tolist() == pytest.approx([2, 0, 0, 0, 0])
    assert (found.num_outside, found.num_rejected) == (3, 4)


def test_bounds_belong_to_the_range():
    rule = ImportanceRule("token", outside="mask", low=1.0, high=1.0)
    assert correct(ratios=torch.ones(2), owner=torch.tensor([0, 0]), importance=rule).kept_N.all()


def test_without_rules_every_weight_is_one():
    found = correct()
    assert found.weights_N.tolist() == [1.0] * 5 and found.kept_N.all()
    assert (found.num_outside, found.num_rejected) == (0, 0)


def test_rejecting_a_sequence_leaves_the_denominator_alone():
    # A mean over two sequences, of which one is rejected: half of the other's loss.
    weights = token_weights(torch.ones(3), lengths_B=torch.tensor([2, 1]))
    found = correct(
        ratios=torch.tensor([1.0, 1.0, 9.0]),
        owner=torch.tensor([0, 0, 1]),
        num_sequences=2,
        rejection=RejectionRule("geometric", low=0.5, high=2.0),
    )
    total = weighted_sum(torch.tensor([4.0, 6.0, 100.0]), weights_N=weights * found.weights_N)
    assert total.item() / 2 == 2.5


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("difference", [1e4, -1e4])
def test_huge_ratios_are_bounded(level, difference):
    found = off_policy_correction(
        torch.full((3,), difference),
        rollout_logprobs_N=torch.zeros(3),
        sequence_N=torch.zeros(3, dtype=torch.long),
        num_sequences=1,
        importance=ImportanceRule(level, outside="truncate", low=0.0, high=math.inf),
    )
    expected = math.exp(math.copysign(20, difference))
    assert found.weights_N.tolist() == pytest.approx([expected] * 3, rel=1e-5)


def test_a_ratio_that_is_no_number_is_not_kept_and_truncated_it_shows():
    ratios = torch.tensor([1.0, NAN, 1.0])
    owner = torch.tensor([0, 1, 1])
    options = {"ratios": ratios, "owner": owner, "num_sequences": 2}
    masked = correct(**options, importance=ImportanceRule("token", outside="mask", low=0, high=2))
    assert masked.weights_N.tolist() == [1, 0, 1]
    rejected = correct(**options, rejection=RejectionRule("sequence", low=0.0, high=2.0))
    assert rejected.weights_N.tolist() == [1, 0, 0]
    truncated = correct(
        **options, importance=ImportanceRule("token", outside="truncate", low=0.0, high=2.0)
    )
    assert math.isnan(truncated.weights_N[1].item())


def test_no_gradient_and_no_tokens():
    found = off_policy_correction(
        torch.ones(2, requires_grad=True),
        rollout_logprobs_N=torch.ones(2, requires_grad=True),
        sequence_N=torch.tensor([0, 0]),
        num_sequences=1,
        importance=ImportanceRule("sequence", outside="truncate", low=0.0, high=2.0),
    )
    assert not found.weights_N.requires_grad and not found.weight_sum.requires_grad
    empty = correct(
        ratios=torch.zeros(0),
        owner=torch.zeros(0, dtype=torch.long),
        num_sequences=0,
        rejection=RejectionRule("geometric", low=0.5, high=2.0),
    )
    assert empty.weights_N.shape == (0,) and empty.weight_max.item() == 0


sequences = st.lists(st.lists(st.floats(-3, 3), min_size=1, max_size=5), min_size=1, max_size=5)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@unhurried
@given(sequences, st.randoms(use_true_random=False))
def test_every_level_is_the_loop_in_any_order(level, logs, random):
    places = [(i, d) for i, own in enumerate(logs) for d in own]
    random.shuffle(places)
    found = off_policy_ratio(
        torch.tensor([d for _, d in places], dtype=torch.float64),
        rollout_logprobs_N=torch.zeros(len(places), dtype=torch.float64),
        sequence_N=torch.tensor([i for i, _ in places]),
        num_sequences=len(logs),
        level=level,
    )
    for (i, d), ratio in zip(places, found.tolist(), strict=True):
        total = math.fsum(logs[i])
        expected = {"token": d, "sequence": total, "geometric": total / len(logs[i])}[level]
        assert ratio == pytest.approx(math.exp(expected), rel=1e-9)


def test_weighing_by_the_whole_sequence_is_unbiased():
    # All sequences of two tokens out of two: the rollout's mean of weight × f is the policy's of f.
    p, q = torch.tensor([0.7, 0.3]).double(), torch.tensor([0.4, 0.6]).double()
    pairs = [(a, b) for a in (0, 1) for b in (0, 1)]
    tokens = torch.tensor(pairs).flatten()
    ratio = off_policy_ratio(
        p.log()[tokens],
        rollout_logprobs_N=q.log()[tokens],
        sequence_N=torch.arange(4).repeat_interleave(2),
        num_sequences=4,
        level="sequence",
    )[::2]
    f = torch.tensor([1.0, 5.0, -2.0, 3.0]).double()
    sampled = torch.stack([q[a] * q[b] for a, b in pairs])
    exact = torch.stack([p[a] * p[b] for a, b in pairs])
    assert (sampled * ratio * f).sum().item() == pytest.approx((exact * f).sum().item())
