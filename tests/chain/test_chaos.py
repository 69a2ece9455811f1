"""Schedules of faults of every kind, drawn by number; every rule is looked at at every step.

Every schedule has a number, from which alone it is drawn, so that the same are run every time. A
failure says the number and what shrinking has left of the schedule. One alone, from `tests`:

    python -m toy.schedules 1234

What was left is a call of `run_schedule`. Other schedules are tried by

    CHAOS_SEED=7 CHAOS_BLOCKS=40 pytest tests/chain/test_chaos.py -m exhaustive
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from toy.schedules import run_number
from toy.strikes import STRIKES

pytestmark = pytest.mark.slow

#: Schedules in a block; CI runs `_BLOCKS` of them, the long mode `CHAOS_BLOCKS`.
_EACH = 500
_BLOCKS = 4
_SEED = int(os.environ.get("CHAOS_SEED", "0"))
_LONG_BLOCKS = int(os.environ.get("CHAOS_BLOCKS", "40"))


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    """Thousands of runs say much; what counts is in the breach."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def run_block(folder: Path, number: int) -> Counter[str]:
    """The schedules of a block; what struck in them, and how often."""
    struck: Counter[str] = Counter()
    for seed in range(number * _EACH, (number + 1) * _EACH):
        struck.update(run_number(seed, folder).struck)
    return struck


@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(_BLOCKS))
def test_whatever_happens_the_history_is_the_same(folder: Path, number: int) -> None:
    struck = run_block(folder, number)
    assert set(struck) == set(STRIKES), f"never struck: {set(STRIKES) - set(struck)}"


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", range(_LONG_BLOCKS))
def test_whatever_happens_at_length(folder: Path, number: int) -> None:
    run_block(folder, 1_000_000 * (_SEED + 1) + number)
