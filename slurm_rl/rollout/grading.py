"""Grading groups that are generated already: what a score stage does, and an evaluation in the end.

Groups are graded a few at a time, and handed on as each is done, so that what a kill or an outage
leaves undone is little. A service that is down ends it (ServiceDown, blame `outage`): the stage is
tried again later, and goes on from its journal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence

from slurm_rl.errors import ServiceDown
from slurm_rl.rollout.rewards import Graded, Grader
from slurm_rl.rollout.samples import Sample

#: A group's key, and its samples.
Item = tuple[str, Sequence[Sample]]


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
        graded = await grader.grade([_strip(sample) for sample in samples])
        if graded.outcome == "ungraded":
            return graded
        done(key, graded)
    return None


def _strip(sample: Sample) -> Sample:
    """A reward function is promised a sample without reward."""
    return sample if sample.reward is None else sample.graded(None, {})


def run_grading(
    items: Iterable[Item],
    grader: Grader,
    *,
    concurrency: int,
    done: Callable[[str, Graded], None],
) -> None:
    """As `grade_groups`, in an event loop of its own. A single error comes as itself."""

    async def run() -> None:
        async with grader:
            await grade_groups(items, grader, concurrency=concurrency, done=done)

    try:
        asyncio.run(run())
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
