"""Schedules of faults of every kind, drawn by hypothesis; every rule is looked at at every step.

A failure prints the schedule that shrinking has left: give it to `run_schedule`. The seeds are
fixed, so that the same schedules are run every time; others are tried by

    CHAOS_SEED=7 CHAOS_BLOCKS=40 pytest tests/chain/test_chaos.py -m exhaustive
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from toy.chaos import Blow, Ground, Schedule, run_schedule
from toy.strikes import STRIKES

pytestmark = pytest.mark.slow

#: Schedules in a block; CI runs `_BLOCKS` of them, the long mode `CHAOS_BLOCKS`.
_EACH = 500
_BLOCKS = 4
_SEED = int(os.environ.get("CHAOS_SEED", "0"))
_LONG_BLOCKS = int(os.environ.get("CHAOS_BLOCKS", "40"))

GROUNDS = st.builds(
    Ground,
    lag=st.integers(0, 1),
    shards=st.integers(1, 3),
    window=st.integers(1, 4),
    pack=st.sampled_from(["stage", "iteration"]),
    login=st.booleans(),
    site=st.integers(0, 3),
    pools=st.booleans(),
    num_iterations=st.integers(2, 3),
    # They add stages, which take twice the time: one run in four has them.
    score=st.sampled_from([False, False, False, True]),
    evals=st.sampled_from([False, False, False, True]),
    roles=st.sampled_from([False] * 7 + [True]),
)
BLOWS = st.builds(
    Blow,
    at=st.integers(0, 999),
    kind=st.sampled_from(list(STRIKES)),
    size=st.integers(0, 2),
)
SCHEDULES = st.builds(Schedule, GROUNDS, st.lists(BLOWS, min_size=1, max_size=5).map(tuple))


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    """Thousands of runs say much; what counts is in the breach."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def run_block(folder: Path, number: int, struck: Counter[str]) -> None:
    @seed(number)
    @settings(
        max_examples=_EACH,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(SCHEDULES)
    def every_schedule_ends_well(schedule: Schedule) -> None:
        struck.update(run_schedule(schedule, folder).struck)

    every_schedule_ends_well()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(_BLOCKS))
def test_whatever_happens_the_history_is_the_same(folder: Path, number: int) -> None:
    struck: Counter[str] = Counter()
    run_block(folder, number, struck)
    assert set(struck) == set(STRIKES), f"never struck: {set(STRIKES) - set(struck)}"


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", range(_LONG_BLOCKS))
def test_whatever_happens_at_length(folder: Path, number: int) -> None:
    run_block(folder, 1_000_000 * (_SEED + 1) + number, Counter())
