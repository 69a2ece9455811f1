"""One fault before every effect of a run: the run must end whole, and the same.

The default takes one effect for each place in the code; the exhaustive version is `make test-exhaustive`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from toy.hunt import FAULTS, Arena

pytestmark = pytest.mark.slow

NewArena = Callable[..., Arena]

KINDS = {
    "stage": {},
    "stage, 2 shards": {"shards": 2},
    "two pools": {"pools": {"fixed": {"shards": 1}, "spot": {"shards": 1}}},
    "iteration": {"pack": "iteration"},
    "window of one, ticks all the time": {"window": 1, "tick_s": 7.0},
}
#: Faults that meet other code where stages are sharded or packed.
OFTEN = ("kill", "preempt", "split brain, the old one goes on", "another advance")


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_at_every_place_of_a_plain_run(arena: NewArena, name: str) -> None:
    fault, bounds, reads = FAULTS[name]
    ground = arena()
    # Every second place where reads count too: schedules of faults (`test_chaos`) fall anywhere.
    ground.try_all(ground.sites(reads=reads)[:: 2 if reads else 1], fault, bounds)


@pytest.mark.parametrize("name", OFTEN)
@pytest.mark.parametrize("kind", list(KINDS)[1:])
def test_a_fault_at_every_place_of_other_runs(arena: NewArena, kind: str, name: str) -> None:
    fault, bounds, reads = FAULTS[name]
    ground = arena(**KINDS[kind])
    ground.try_all(ground.sites(reads=reads)[::3], fault, bounds)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_before_every_effect(arena: NewArena, kind: str, name: str) -> None:
    fault, bounds, _ = FAULTS[name]
    ground = arena(**KINDS[kind])
    ground.try_all(ground.every_effect(reads=True), fault, bounds)
