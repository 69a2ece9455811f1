"""Schedules drawn by number: the same number is the same schedule, whatever else changes.

    draw_schedule(1234)              # a kind of run, and one to five faults
    shrink(schedule, does_break)     # what is left of it when all that does not matter is gone

One of them alone, from the folder `tests`, with all that it says if it breaks a rule:

    python -m toy.schedules 1234
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from toy.chaos import Blow, Ground, Schedule, Story, run_schedule
from toy.judge import Breach
from toy.strikes import STRIKES

_MOST_BLOWS = 5


def draw_schedule(seed: int) -> Schedule:
    """The schedule of a number."""
    random = Random(seed)
    ground = _draw_ground(random)
    blows: list[Blow] = []
    for _ in range(random.randint(1, _MOST_BLOWS)):
        # Now and then two come at the same moment, or one before anything else.
        at = random.choice([0, blows[-1].at if blows else 0, *[random.randint(0, 999)] * 18])
        blows.append(Blow(at, random.choice(list(STRIKES)), random.randint(0, 2)))
    return Schedule(ground, tuple(blows))


def _draw_ground(random: Random) -> Ground:
    return Ground(
        lag=random.randint(0, 1),
        shards=random.randint(1, 3),
        window=random.randint(1, 4),
        pack=random.choice(["stage", "iteration"]),
        login=random.random() < 0.5,
        site=random.randint(0, 3),
        pools=random.random() < 0.5,
        num_iterations=random.randint(2, 3),
        # They add stages, which take twice the time: one run in four has them.
        score=random.random() < 0.25,
        evals=random.random() < 0.25,
        roles=random.random() < 0.125,
    )


def shrink(schedule: Schedule, breaks: Callable[[Schedule], bool]) -> Schedule:
    """A schedule that still breaks, though not if any one of its faults is left out, nor if any one
    trait of its ground is the plain one."""
    while True:
        simpler = next((s for s in _simpler(schedule) if breaks(s)), None)
        if simpler is None:
            return schedule
        schedule = simpler


def _simpler(schedule: Schedule) -> Iterator[Schedule]:
    """Each with one thing less: faults first."""
    for left_out in range(len(schedule.blows)):
        kept = [blow for number, blow in enumerate(schedule.blows) if number != left_out]
        yield dataclasses.replace(schedule, blows=tuple(kept))
    for trait in dataclasses.fields(Ground):
        if getattr(schedule.ground, trait.name) != trait.default:
            plainer = dataclasses.replace(schedule.ground, **{trait.name: trait.default})
            yield dataclasses.replace(schedule, ground=plainer)


def run_number(seed: int, folder: Path) -> Story:
    """The run of a number. Raises Breach with its story, after shrinking it."""
    schedule = draw_schedule(seed)
    try:
        return run_schedule(schedule, folder)
    except Breach as breach:
        story = str(breach)

    def breaks(simpler: Schedule) -> bool:
        nonlocal story
        try:
            run_schedule(simpler, folder)
        except Breach as breach:
            story = str(breach)
            return True
        return False

    shrink(schedule, breaks)
    raise Breach(f"schedule {seed}: {schedule}\nwhat is left of it:\n{story}")


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            print(draw_schedule(int(sys.argv[1])))
            print(run_number(int(sys.argv[1]), Path(scratch)))
        except Breach as found:
            sys.exit(str(found))
