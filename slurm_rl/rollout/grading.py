"""Grading groups that are generated already: what a score stage does, and an evaluation in the end.

Groups are graded a few at a time, and handed on as each is done, so that what a kill or an outage
leaves undone is little. A service that is down ends it (ServiceDown, blame `outage`): the stage is
tried again later, and goes on from its journal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from slurm_rl.errors import ServiceDown
from slurm_rl.rollout.journal import Entry, Journal
from slurm_rl.rollout.rewards import Graded, Grader
from slurm_rl.rollout.samples import Sample

#: A group's key, and its samples.
Item = tuple[str, Sequence[Sample]]
Grade = Callable[[Sequence[Sample]], Awaitable[Graded]]


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A group whose generation failed in the user's code, where on_reward_error drops such groups.

    samples: what there is to journal of it. why: what failed.
    """

    samples: tuple[Sample, ...]
    why: str


async def grade_open(samples: Sequence[Sample] | GivenUp, grade: Grade) -> Graded:
    """Grade those of a group that have no reward; what an environment or a generate function of
    the user's has given stays. A group that was given up is dropped."""
    if isinstance(samples, GivenUp):
        return Graded(samples.samples, "dropped", samples.why)
    left = [sample for sample in samples if sample.reward is None]
    if len(left) == len(samples):
        return await grade(samples)
    if not left:
        return Graded(tuple(samples), "graded")
    graded = await grade(left)
    done = {sample.sample_index: sample for sample in graded.samples}
    return replace(graded, samples=tuple(done.get(s.sample_index, s) for s in samples))


async def grade_groups(
    items: Iterable[Item],
    grader: Grader,
    *,
    concurrency: int,
    done: Callable[[str, Graded], None],
) -> None:
    """Grade all of `items`, `concurrency` at a time; `done` is told of each, in any order.

    Raises ServiceDown where a service with `on_down: defer` is down, after what is under way has
    come to its end, and what the grader raises.
    """
    waiting = iter(items)
    async with asyncio.TaskGroup() as tasks:
        workers = [
            tasks.create_task(_work(waiting, grader, done)) for _ in range(max(1, concurrency))
        ]
    down = next((found for worker in workers if (found := worker.result())), None)
    if down is not None:
        raise ServiceDown(
            f"rewards wait for a service: {down.why}",
            service=down.service,
            hint="they go on by themselves when it answers",
        )


async def _work(
    waiting: Iterator[Item], grader: Grader, done: Callable[[str, Graded], None]
) -> Graded | None:
    """Take groups until there are no more (None), or one that is left ungraded."""
    for key, samples in waiting:
        graded = await grade_open(samples, grader.grade)
        if graded.outcome == "ungraded":
            return graded
        done(key, graded)
    return None


def run_grading(
    items: Iterable[Item],
    grader: Grader,
    *,
    concurrency: int,
    journal: Journal,
    done: Callable[[Entry], None],
) -> None:
    """As `grade_groups`, in an event loop of its own; each group is journalled, and `done` told of
    it. A single error comes as itself."""

    def keep(key: str, graded: Graded) -> None:
        is_good = graded.outcome == "graded"
        done(
            journal.append(
                key, graded.samples, outcome=graded.outcome, keep=is_good, reason=graded.why
            )
        )

    async def run() -> None:
        async with grader:
            await grade_groups(items, grader, concurrency=concurrency, done=keep)

    try:
        asyncio.run(run())
    except BaseExceptionGroup as group:
        error = group.exceptions[0]
        raise error from error.__cause__  # what the user's code raised goes to the log
