import collections
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_rl.seeds import derive_seed, permutation


@pytest.mark.parametrize("num", [*range(1, 70), 255, 256, 257, 1000, 4097])
def test_every_item_comes_once(num: int) -> None:
    assert sorted(permutation(num, seed=3, epoch=1)) == list(range(num))


@given(st.integers(1, 2**40), st.integers(0, 2**31), st.integers(0, 1000), st.data())
def test_no_two_positions_of_a_huge_set_meet(
    num: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    order = permutation(num, seed=seed, epoch=epoch)
    positions = data.draw(st.sets(st.integers(0, num - 1), min_size=1, max_size=30))
    items = {order[position] for position in positions}
    assert len(items) == len(positions)
    assert all(0 <= item < num for item in items)


def test_positions_outside_are_refused() -> None:
    order = permutation(5, seed=1, epoch=0)
    assert len(order) == 5
    for position in (-1, 5):
        with pytest.raises(IndexError):
            order[position]


def test_all_orders_of_a_small_set_are_equally_likely() -> None:
    """Chi-squared over all orders; an odd grid or six rounds fail this by far."""
    for num in (2, 3, 4, 5):
        draws = 20_000
        seen = collections.Counter(tuple(permutation(num, seed=s, epoch=0)) for s in range(draws))
        freedom = math.factorial(num) - 1
        expected = draws / (freedom + 1)
        missing = (freedom + 1 - len(seen)) * expected
        statistic = sum((n - expected) ** 2 / expected for n in seen.values()) + missing
        assert statistic < freedom + 4 * math.sqrt(2 * freedom) + 4, num


def test_items_of_a_large_set_are_spread_evenly_over_positions() -> None:
    """Where items land, and how far neighbours are from each other, in ten bins each."""
    num, bins = 20_000, 10
    order = list(permutation(num, seed=5, epoch=2))
    landed = collections.Counter(item * bins // num for item in order[: num // 10])
    gaps = [(b - a) % num for a, b in itertools.pairwise(order)]
    spread = collections.Counter(gap * bins // num for gap in gaps)
    for counts in (landed, spread):
        expected = sum(counts.values()) / bins
        assert sum((counts[k] - expected) ** 2 / expected for k in range(bins)) < 33  # p 1e-4
    assert sum(a == k for k, a in enumerate(order)) < 8  # a Poisson of mean 1


def test_orders_follow_seed_and_epoch() -> None:
    orders = {tuple(permutation(50, seed=s, epoch=e)) for s in range(4) for e in range(4)}
    assert len(orders) == 16
    assert list(permutation(50, seed=1, epoch=2)) == list(permutation(50, seed=1, epoch=2))


def test_paths_of_seeds_are_told_apart() -> None:
    paths = [(1,), ("1",), (1, 2), (12,), ("1/2",), ("a", 1), ("a1",)]
    assert len({derive_seed(7, *path) for path in paths}) == len(paths)
