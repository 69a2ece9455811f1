"""Planning of ticks: jobs that only look, so that a chain whose links all died goes on. Pure."""

from __future__ import annotations

from slurm_rl.chain.scheduler import JobState
from slurm_rl.chain.view import Action, Cancel, Spec, SubmitTick, View

#: Pending ticks that are kept while a run is under way.
TICKS_WANTED = 2
#: A controller killed within a second of a submission forgets the job; two ticks submitted
#: further apart than this are not both forgotten.
TICK_SPACING_S = 10.0


def plan_ticks(spec: Spec, view: View, *, room: int) -> tuple[list[Action], bool]:
    """Submit a tick if one is missing; whether another still is, once the spacing allows it.

    room: how many more jobs may be submitted.
    """
    if not spec.ticks or view.queue is None or room <= 0:
        return [], False
    actions: list[Action] = []
    held = tuple(
        job.job_id
        for job in view.queue
        if is_tick(job.name) and job.state is JobState.HELD and not view.is_own(job)
    )
    if held:
        actions.append(Cancel(held, "a held tick never wakes"))
    ticks = [job for job in view.queue if is_tick(job.name) and job.state is JobState.PENDING]
    if len(ticks) >= TICKS_WANTED:
        return actions, False
    if ticks and min(job.age_s for job in ticks) <= TICK_SPACING_S:
        return actions, True
    actions.append(SubmitTick(spec.tick_s * (1 + len(ticks))))
    return actions, len(ticks) + 1 < TICKS_WANTED


def missing_ticks(spec: Spec, view: View) -> int:
    """Places in the queue that links ahead of the first one must leave to ticks."""
    if not spec.ticks:
        return 0
    jobs = view.queue or ()
    pending = sum(is_tick(job.name) and job.state is JobState.PENDING for job in jobs)
    return max(0, TICKS_WANTED - pending)


def is_tick(name: str) -> bool:
    """Whether a job name is a tick's: `<run>.tick.<token>`."""
    return name.split(".")[-2:-1] == ["tick"]
