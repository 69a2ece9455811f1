"""Balanced ranks and full bins: nothing lost, nothing doubled, and how good the plans are."""

import itertools
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from slurm_rl.train.packing import Budget, balance, first_fit, plan_packed, round_up, token_costs

COSTS = st.lists(st.integers(1, 1000), max_size=30)


@given(COSTS, st.integers(1, 6))
def test_every_index_is_in_one_part(costs, num_parts):
    parts = balance(costs, num_parts=num_parts)
    assert len(parts) == num_parts
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))
    firsts = [part[0] for part in parts if part]
    assert firsts == sorted(firsts) and all(part == sorted(part) for part in parts)


@given(COSTS.filter(bool), st.integers(1, 6))
def test_no_two_parts_differ_by_more_than_the_largest_cost(costs, num_parts):
    sums = [sum(costs[i] for i in part) for part in balance(costs, num_parts=num_parts)]
    assert max(sums) - min(sums) <= max(costs)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(2, 3))
def test_the_largest_part_is_near_the_best_that_there_is(costs, num_parts):
    """Against every partition: the method promises 4/3 of the best at most."""
    sums = [sum(costs[i] for i in part) for part in balance(costs, num_parts=num_parts)]
    best = min(
        max(sum(c for c, p in zip(costs, choice, strict=True) if p == part) for part in range(3))
        for choice in itertools.product(range(num_parts), repeat=len(costs))
    )
    assert max(sums) <= best * 4 / 3


def test_the_textbook_example():
    """4, 5, 6, 7, 8: differencing leaves 14 and 16, where the greedy way leaves 13 and 17."""
    sums = {sum((4, 5, 6, 7, 8)[i] for i in part) for part in balance([4, 5, 6, 7, 8], num_parts=2)}
    assert sums == {14, 16}


@given(st.lists(st.integers(1, 100), max_size=40), st.integers(1, 120))
def test_bins_keep_the_budget_and_no_two_would_fit_into_one(lengths, budget):
    bins = first_fit(lengths, max_tokens=budget)
    assert sorted(i for own in bins for i in own) == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in own) for own in bins]
    for own, total in zip(bins, sums, strict=True):
        assert total <= budget or len(own) == 1
    for a, b in itertools.combinations(sums, 2):
        assert a + b > budget


def test_a_sequence_that_is_longer_than_the_budget_is_alone():
    assert first_fit([3, 50, 4, 3], max_tokens=10) == [[0, 2, 3], [1]]


def test_padding_counts_in_the_budget():
    lengths = [5, 5, 4]
    plain = plan_packed([0, 1, 2], lengths, num_ranks=1, budget=Budget(max_tokens=14))
    padded = Budget(max_tokens=14, sequence_multiple=4)
    assert plain == [[[0, 1, 2]]]
    assert plan_packed([0, 1, 2], lengths, num_ranks=1, budget=padded) == [[[0, 2], [1]]]


def test_attention_counts_in_the_balance():
    """By tokens 8 are as much as 4 + 4; by FLOPs one long sequence is more than two short ones."""
    lengths = [8, 4, 4, 4, 4]
    by_tokens = plan_packed(range(5), lengths, num_ranks=2, budget=Budget(max_tokens=99))
    assert sorted(sum(lengths[i] for b in own for i in b) for own in by_tokens) == [12, 12]
    heavy = Budget(max_tokens=99, linear=1, quadratic=10)
    assert plan_packed(range(5), lengths, num_ranks=2, budget=heavy) == [[[0]], [[1, 2, 3, 4]]]


def test_the_costs_of_a_model_by_hand():
    config = SimpleNamespace(
        num_layers=3,
        hidden_size=10,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=5,
        ffn_hidden_size=30,
        num_moe_experts=None,
    )
    # A layer: queries and output 2 × 10 × 20, keys and values 2 × 10 × 10, MLP 3 × 10 × 30.
    weights = 3 * (400 + 200 + 900) + 10 * 64
    # Scores and their sum of values: 2 × 2 FLOPs for each of L² / 2 pairs, 20 wide, 3 layers.
    assert token_costs(config, vocab_size=64) == (2 * weights, 2 * 20 * 3)
    config.num_moe_experts, config.moe_router_topk, config.moe_ffn_hidden_size = 8, 2, 7
    mixture = 3 * (400 + 200 + 3 * 10 * 14) + 10 * 64
    assert token_costs(config, vocab_size=64) == (2 * mixture, 120)


def test_rounding_up():
    assert [round_up(n, 4) for n in (0, 1, 4, 5)] == [0, 4, 4, 8]
