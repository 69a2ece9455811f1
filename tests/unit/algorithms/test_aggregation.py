"""Weights and denominators by hand, and however a rollout is cut."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm_rl.algorithms.aggregation import token_weights, weighted_sum

#: A busy machine is no failure.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

KINDS = ["sequence", "token", "group", "constant"]


def test_weights_are_means_within_sequences():
    # Two samples: lengths 3 and 2, the first with one token masked.
    mask = torch.tensor([1, 0, 1, 1, 1])
    weights = token_weights(mask, lengths_B=torch.tensor([3, 2]))
    assert weights.tolist() == [0.5, 0.0, 0.5, 0.5, 0.5]


def test_weights_per_token_are_the_mask():
    mask = torch.tensor([1, 0, 1, 1, 1], dtype=torch.uint8)
    lengths = torch.tensor([3, 2])
    for options in ({"aggregation": "token"}, {"per_token": True}):
        weights = token_weights(mask, lengths_B=lengths, **options)
        assert weights.tolist() == [1.0, 0.0, 1.0, 1.0, 1.0]


def test_weights_of_groups_by_hand():
    # Group 9: sequences 0 and 2, 2 + 3 trained tokens, so 2 / 5 each. Group 4: one of one token.
    weights = token_weights(
        torch.tensor([1, 0, 1, 1, 1, 1, 1]),
        lengths_B=torch.tensor([3, 1, 3]),
        aggregation="group",
        group_index_B=torch.tensor([9, 4, 9]),
    )
    assert weights.tolist() == pytest.approx([0.4, 0, 0.4, 1.0, 0.4, 0.4, 0.4])


def test_constant_weights_by_hand():
    weights = token_weights(
        torch.tensor([1, 0, 1]),
        lengths_B=torch.tensor([2, 1]),
        aggregation="constant",
        constant_length=8,
    )
    assert weights.tolist() == [0.125, 0.0, 0.125]


def test_what_a_kind_needs_must_be_given():
    for kind in ("group", "constant"):
        with pytest.raises(AssertionError):
            token_weights(torch.ones(1), lengths_B=torch.tensor([1]), aggregation=kind)


def test_a_sequence_that_is_masked_throughout_has_weight_zero_not_nan():
    for kind in ("sequence", "group"):
        weights = token_weights(
            torch.tensor([0, 0, 1]),
            lengths_B=torch.tensor([2, 1]),
            aggregation=kind,
            group_index_B=torch.tensor([0, 1]),
        )
        assert weights.tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_no_tokens_have_no_weights(kind, lengths):
    weights = token_weights(
        torch.zeros(0),
        lengths_B=torch.tensor(lengths, dtype=torch.long),
        aggregation=kind,
        group_index_B=torch.zeros(len(lengths), dtype=torch.long),
        constant_length=1,
    )
    assert weights.shape == (0,)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_float32(kind):
    weights = token_weights(
        torch.ones(2, dtype=torch.uint8),
        lengths_B=torch.tensor([2]),
        aggregation=kind,
        group_index_B=torch.tensor([0]),
        constant_length=3,
    )
    assert weights.dtype == torch.float32


def test_masked_tokens_count_nothing_whatever_they_hold():
    values = torch.tensor([2.0, float("nan"), float("inf")], requires_grad=True)
    total = weighted_sum(values, weights_N=torch.tensor([0.5, 0.0, 0.0]))
    total.backward()
    assert total.item() == 1.0 and values.grad.tolist() == [0.5, 0.0, 0.0]


def test_a_weight_of_nan_shows():
    total = weighted_sum(torch.ones(2), weights_N=torch.tensor([1.0, float("nan")]))
    assert total.isnan()


masks = st.lists(st.lists(st.booleans(), min_size=0, max_size=6), min_size=2, max_size=6)


def weigh(samples, groups, kind):
    return token_weights(
        torch.tensor([float(v) for m in samples for v in m]),
        lengths_B=torch.tensor([len(m) for m in samples]),
        aggregation=kind,
        group_index_B=torch.tensor(groups),
        constant_length=7,
    )


def loop(samples, groups, values, kind):
    """The mean that a kind promises, by Python's own arithmetic; values as samples are."""
    kept = [
        [v for v, m in zip(vs, ms, strict=True) if m]
        for vs, ms in zip(values, samples, strict=True)
    ]
    if kind == "token":
        flat = [v for own in kept for v in own]
        return sum(flat) / max(len(flat), 1)
    if kind == "constant":
        return sum(sum(own) / 7 for own in kept) / len(kept)
    if kind == "sequence":
        return sum(sum(own) / max(len(own), 1) for own in kept) / len(kept)
    total = 0.0
    for group in set(groups):
        members = [own for own, g in zip(kept, groups, strict=True) if g == group]
        flat = [v for own in members for v in own]
        total += len(members) / len(kept) * sum(flat) / max(len(flat), 1)
    return total


@pytest.mark.parametrize("kind", KINDS)
@unhurried
@given(samples=masks, data=st.data())
def test_sums_over_denominators_are_the_means_they_promise(kind, samples, data):
    groups = data.draw(st.lists(st.integers(0, 2), min_size=len(samples), max_size=len(samples)))
    values = [[float(3 * i + j**2) for j in range(len(m))] for i, m in enumerate(samples)]
    flat = torch.tensor([v for vs in values for v in vs])
    total = weighted_sum(flat, weights_N=weigh(samples, groups, kind)).item()
    num_tokens = max(sum(sum(m) for m in samples), 1)
    denominator = num_tokens if kind == "token" else len(samples)
    expected = loop(samples, groups, values, kind)
    assert total / denominator == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@unhurried
@given(samples=masks, data=st.data())
def test_cut_into_micro_batches_the_sum_is_the_same(kind, samples, data):
    weights = weigh(samples, [0] * len(samples), kind)
    values = torch.arange(1.0, len(weights) + 1)
    whole = weighted_sum(values, weights_N=weights)
    cut = data.draw(st.integers(0, len(weights)))
    parts = [
        weighted_sum(values[s], weights_N=weights[s]) for s in (slice(0, cut), slice(cut, None))
    ]
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-5)
