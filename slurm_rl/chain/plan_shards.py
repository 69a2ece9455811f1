"""Planning of an array's shards: which of them lack a job, and what is known of each. Pure.

A link that is not cut is its own only part. Each part is judged by the submissions that covered it,
whatever those of its siblings say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator

from slurm_rl.chain.scheduler import JobState, QueuedJob
from slurm_rl.chain.view import LinkView, Spec, View
from slurm_rl.storage.intents import Intent

#: More nodes than these are not stayed away from: then it is not the nodes.
_MOST_EXCLUDED = 8


def without_job(seen: LinkView, live: list[QueuedJob]) -> LinkView:
    """What no live job stands for: of an array, shards whose tasks have ended without a commit."""
    if not live:
        return seen
    tasks = {job.task for job in live}
    bare = {shard for shard in seen.missing_shards if shard not in tasks and None not in tasks}
    return only(seen, bare) if bare else dataclasses.replace(seen, slots=())


def only(seen: LinkView, shards: Collection[int | None]) -> LinkView:
    """A part of a link: some of its shards, and what is not cut."""
    slots = (slot for slot in seen.slots if slot.shard is None or slot.shard in shards)
    return dataclasses.replace(seen, slots=tuple(slots))


def choose_part(
    spec: Spec, view: View, seen: LinkView, held: list[QueuedJob]
) -> tuple[LinkView | None, str, bool]:
    """Of what lacks a job: what to submit now, why other parts must wait, and whether there are
    others that need not: those that go elsewhere, or wait longer after a failure.

    held: jobs that are replaced.
    """
    if not seen.intents:
        return seen, "", False
    if view.queue is None:
        return None, "the scheduler does not answer", False
    groups: dict[tuple[bool, int], list[int]] = {}
    doubt = ""
    for part in _parts(seen):
        why = "" if jobs_of(part, held) else _find_doubt(spec, part, view)
        doubt = doubt or why
        if not why:
            failures = max((slot.failures for slot in part.open_slots), default=0)
            groups.setdefault((went_elsewhere(part), failures), []).extend(part.missing_shards)
    if not groups:
        return None, doubt, False
    return only(seen, next(iter(groups.values()))), doubt, len(groups) > 1


def _parts(seen: LinkView) -> Iterator[LinkView]:
    """Each missing shard by itself; the whole if there are none."""
    yield from (only(seen, [shard]) for shard in seen.missing_shards)
    if not seen.missing_shards:
        yield seen


def _find_doubt(spec: Spec, part: LinkView, view: View) -> str:
    """Why the last submission of a part that no live job stands for may still have one."""
    last = next((pair for pair in reversed(part.intents) if covers(pair[0], part)), None)
    if last is None:
        return ""
    intent, age_s = last
    # One of the future was dated by a clock that was set back since: its age says nothing.
    if abs(age_s) >= spec.submit_deadline_s or _has_ended(intent, part, view):
        return ""
    left = spec.submit_deadline_s - age_s
    return f"submission {intent.number} is not in the queue; sure in {left:.0f} s"


def _has_ended(intent: Intent, part: LinkView, view: View) -> bool:
    """The queue still knows the job, and knows that it is over: no need to wait longer."""
    jobs = jobs_of(part, (job for job in view.queue or () if job.token == intent.token))
    return bool(jobs) and all(job.state is JobState.ENDED or view.is_own(job) for job in jobs)


def went_elsewhere(part: LinkView) -> bool:
    """Whether a part has gone to its fallback; its retries stay there."""
    return any(intent.fallback and covers(intent, part) for intent, _ in part.intents)


def covers(intent: Intent, part: LinkView) -> bool:
    """Whether a submission was for any of what is missing. Without shards it was for everything."""
    wanted = set(part.missing_shards)
    return not intent.shards or not wanted or bool(wanted & set(intent.shards))


def jobs_of(part: LinkView, jobs: Iterable[QueuedJob]) -> list[QueuedJob]:
    """Those that stand for what is missing."""
    wanted = set(part.missing_shards)
    return [job for job in jobs if job.task is None or not wanted or job.task in wanted]


def find_late(
    spec: Spec, seen: LinkView, waiting: list[QueuedJob], live: list[QueuedJob]
) -> list[QueuedJob]:
    """Those that have waited longer for a place than their fallback lets them, and not gone there
    yet. One that has another job at work only waits in vain."""
    kinds = {*seen.link.kinds, seen.link.job_kind}
    limit_s = min((after_s for kind, after_s in spec.fallbacks if kind in kinds), default=None)
    at_work = {job.task for job in live if job.state.may_be_at_work}
    return [
        job
        for job in waiting
        if limit_s is not None
        and job.reason not in NOT_YET
        and job.task not in at_work
        and min(job.age_s, job.age_s if seen.ready_s is None else seen.ready_s) >= limit_s
        and not went_elsewhere(seen if job.task is None else only(seen, [job.task]))
    ]


#: Reasons of a pending job that has not begun to wait for its place yet.
NOT_YET = ("BeginTime", "Dependency", "JobArrayTaskLimit")


def find_bad_nodes(part: LinkView, view: View) -> tuple[str, ...]:
    """Where attempts failed of late, and where jobs died before they began."""
    tokens = {intent.token for intent, _ in part.intents}
    nodes = {node for slot in part.open_slots for node in slot.bad_nodes}
    if part.num_lost:
        ours = jobs_of(part, (job for job in view.queue or () if job.token in tokens))
        dead = (job for job in ours if job.state is JobState.ENDED and not view.is_own(job))
        nodes |= {job.nodes for job in dead if job.nodes}
    return tuple(sorted(nodes)) if len(nodes) <= _MOST_EXCLUDED else ()
