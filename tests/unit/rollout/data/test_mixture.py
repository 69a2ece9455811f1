from fractions import Fraction

from hypothesis import example, given, settings
from hypothesis import strategies as st

from slurm_rl.rollout.data.mixture import Schedule, to_shares

weights = st.lists(
    st.one_of(
        st.integers(1, 20).map(float),
        st.sampled_from([0.1, 0.2, 0.7, 1e-3, 1 / 3]),
        st.floats(1e-3, 1e3),
    ),
    min_size=1,
    max_size=9,
)


@settings(deadline=None)
@given(weights)
# Taking whichever is furthest behind lags by more than one visit here.
@example([50.0, *[1.0] * 8])
@example([9.0, *[1.0] * 8, 3.0])
def test_shares_are_within_one_visit_of_the_weights_at_all_times(given: list[float]) -> None:
    shares = to_shares(given)
    assert sum(shares) == 1
    schedule, counts = Schedule(shares), [0] * len(shares)
    for number in range(1, 300):
        counts[schedule.pick(counts)] += 1
        for share, count in zip(shares, counts, strict=True):
            assert abs(count - share * number) < 1


def test_a_pick_is_a_function_of_the_counts() -> None:
    shares = to_shares([3, 2, 1])
    one, counts, picks = Schedule(shares), [0, 0, 0], []
    for _ in range(60):
        picks.append(one.pick(counts))
        assert Schedule(shares).pick(list(counts)) == picks[-1]
        counts[picks[-1]] += 1
    assert picks[:6] == picks[6:12]
    assert counts == [30, 20, 10]


def test_weights_are_the_fractions_that_were_written() -> None:
    assert to_shares([0.1, 0.2, 0.7]) == [Fraction(1, 10), Fraction(2, 10), Fraction(7, 10)]
    assert to_shares([5.0]) == [Fraction(1)]
    assert to_shares([2, 6]) == to_shares([0.5, 1.5])
