"""Planning: one pure function from what is seen to what should be done.

    plan(spec, view) -> actions and reasons to wait

It decides nothing from a job's exit code or state: a stage is done when its COMMIT exists, and
absence from the queue, or an unanswered query, says nothing. Submission is at-least-once: an
intent that a successful query no longer shows, after `submit_deadline_s`, is over, and the next
number is submitted. A duplicate job is harmless, since a slot takes one claim and one commit.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from slurm_rl.chain.graph import Link
from slurm_rl.chain.halts import find_halt
from slurm_rl.chain.outages import deferred_for, describe_outage
from slurm_rl.chain.plan_evals import links_in_turn, plan_giving_up
from slurm_rl.chain.plan_shards import (
    choose_part,
    find_bad_nodes,
    find_late,
    jobs_of,
    went_elsewhere,
    without_job,
)
from slurm_rl.chain.plan_ticks import TICKS_WANTED, missing_ticks, plan_ticks
from slurm_rl.chain.scheduler import JobState, QueuedJob
from slurm_rl.chain.view import (
    MAX_EVALS,
    Action,
    Cancel,
    HaltRun,
    LinkView,
    Plan,
    Repoint,
    Spec,
    Submit,
    View,
)
from slurm_rl.types import StageRef


@dataclass
class _Draft:
    """What is being planned: actions, reasons, the jobs of each link, and the room in the queue.

    have: link -> the ids of its live jobs, and itself if one is being submitted.
    last: what comes after all else; leaving: ids of jobs that end with it.
    goes_on: another look would plan more at once.
    """

    actions: list[Action] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    have: dict[Link, tuple[str | Link, ...]] = field(default_factory=dict)
    last: list[Action] = field(default_factory=list)
    leaving: set[str] = field(default_factory=set)
    room: int = 0
    goes_on: bool = False

    def jobs_of(self, links: list[Link]) -> tuple[str | Link, ...]:
        """What to wait for, to wake when all of `links` have ended."""
        return tuple(dict.fromkeys(at for link in links for at in self.have.get(link, ())))


def plan(spec: Spec, view: View) -> Plan:
    """What to do now. Pure: the same view gives the same plan."""
    if view.control.halt is not None:
        stop = _cancel_pending(view, "the run is halted")
        return Plan(stop, (f"halted: {view.control.halt.reason}",))
    halt = None if view.control.paused is not None and not view.conflict else find_halt(spec, view)
    if halt is not None:
        stop = _cancel_pending(view, "the run is halted")
        return Plan((HaltRun(halt), *stop), (f"halted: {halt.reason}",))
    if view.control.paused is not None:
        return Plan((), ("paused; continue with `slurm-rl resume`",))
    if view.is_complete:
        return Plan(_cancel_pending(view, "the run is complete"), ("complete",))
    draft = _Draft(room=_submit_room(spec, view))
    draft.actions += plan_giving_up(spec, view)
    _plan_window(spec, view, draft)
    _plan_strays(spec, view, draft)
    ticks, lacks_tick = plan_ticks(spec, view, room=_submit_room(spec, view))
    return Plan((*draft.actions, *ticks), tuple(draft.waiting), lacks_tick, draft.goes_on)


def _plan_window(spec: Spec, view: View, draft: _Draft) -> None:
    """Keep a live job for each link of the window, and for each shard of it; each wakes on the end
    of its parents'."""
    for seen, parents in links_in_turn(spec, view, most_evals=_most_evals(spec, view)):
        # A chain that lets evaluations go first does not wait for one that cannot be submitted.
        parents = [link for link in parents if not link.anchor.is_eval or link in draft.have]
        draft.waiting += [
            f"{slot.name} {describe_outage(slot, now=view.now)}"
            for slot in seen.open_slots
            if slot.num_deferrals
        ]
        live = [job for job in view.jobs_of(seen) if job.state.is_live]
        if live:
            _plan_dependency(view, live, parents, draft)
            draft.have[seen.link] = tuple(dict.fromkeys(job.base_id for job in live))
        bare = without_job(seen, live)
        if bare.open_slots or not live:
            _plan_submission(spec, view, bare, parents, draft)
        else:
            _plan_fallback(spec, seen, live, draft)
    draft.actions += draft.last


def _plan_submission(
    spec: Spec, view: View, seen: LinkView, parents: list[Link], draft: _Draft
) -> None:
    """Submit a link, or shards of it, that no live job stands for, or say why not yet."""
    held = [job for job in jobs_of(seen, view.jobs_of(seen)) if job.state is JobState.HELD]
    part, reason, has_more = choose_part(spec, view, seen, held)
    held = [] if part is None else jobs_of(part, held)
    if held:
        ids = tuple(sorted(job.job_id for job in held))
        draft.waiting.append(f"{held[0].name} ({ids[0]}) is held: {held[0].reason}")
        draft.actions.append(Cancel(ids, "held; replaced"))
    num_tasks = 0 if part is None else max(1, len(part.missing_shards))
    must_leave = missing_ticks(spec, view) if parents or seen.is_eval else 0
    if num_tasks > draft.room - must_leave:
        part, reason = None, "the submit limit is reached; deferred"
    if part is not None and not all(draft.have.get(link) for link in parents):
        # A link without a live parent would wake at once.
        part, reason = None, "its parent has no job yet"
    if reason:
        draft.waiting.append(f"{seen.link}: {reason}")
    if part is None:
        return
    draft.actions.append(
        Submit(
            seen.link,
            1 + max((intent.number for intent, _ in seen.intents), default=0),
            draft.jobs_of(parents),
            part.missing_shards,
            _retry_delay(spec, part),
            find_bad_nodes(part, view),
            went_elsewhere(part),
        )
    )
    draft.goes_on |= has_more
    draft.room -= num_tasks
    draft.have[seen.link] = (*draft.have.get(seen.link, ()), seen.link)
    if any(slot.num_deferrals for slot in part.open_slots):
        # Those behind it keep their places in the queue: woken, they would hold nodes for nothing.
        draft.leaving |= {job.base_id for job in view.queue or () if view.is_own(job)}


def _retry_delay(spec: Spec, seen: LinkView) -> float | None:
    """Seconds that the link should still wait after its last failure (it doubles each time), or for
    a service."""
    waits = [
        spec.retry_delay_s * 2 ** (slot.failures - 1) - slot.since_failure_s
        for slot in seen.open_slots
        if slot.failures
    ]
    longest = max([*waits, *(deferred_for(slot, spec) for slot in seen.open_slots)], default=0.0)
    return longest if longest > 0 else None


def _plan_fallback(spec: Spec, seen: LinkView, live: list[QueuedJob], draft: _Draft) -> None:
    """Say what live jobs wait for; send those that have waited too long elsewhere, once."""
    own = jobs_of(seen, live)
    waiting = [job for job in own if job.state is JobState.PENDING and not job.after]
    late = find_late(spec, seen, waiting, live)
    if late:
        _send_elsewhere(seen, live, late, draft)
    elif waiting and waiting[0].reason:
        draft.waiting.append(f"{seen.link}: {_describe_pending(waiting[0])}")


def _send_elsewhere(
    seen: LinkView, live: list[QueuedJob], late: list[QueuedJob], draft: _Draft
) -> None:
    """Submit what waits too long again, to its fallback, and cancel the jobs that waited."""
    waited_s = max(job.age_s for job in late)
    draft.waiting.append(
        f"{seen.link}: waited {waited_s:.0f} s; goes to its fallback with the next look"
    )
    tasks = {job.task for job in late}
    shards = tuple(s for s in seen.missing_shards if None in tasks or s in tasks)
    number = seen.intents[-1][0].number + 1
    draft.actions.append(Submit(seen.link, number, (), shards, fallback=True))
    # Those that wait for it are to wait for the new one, before its end would wake them.
    ids = tuple(sorted(job.job_id for job in late))
    draft.last.append(Cancel(ids, "waited too long; goes to its fallback", seen.link))
    stay = dict.fromkeys(job.base_id for job in live if job not in late)
    draft.leaving |= {job.base_id for job in late} - set(stay)
    draft.have[seen.link] = (*stay, seen.link)


def _describe_pending(job: QueuedJob) -> str:
    why = f"begins in {job.begins_in_s:.0f} s" if job.begins_in_s else job.reason
    return f"job {job.base_id} is pending" + (f" ({why})" if why else "")


def _plan_dependency(view: View, live: list[QueuedJob], parents: list[Link], draft: _Draft) -> None:
    """Re-point a pending job that waits for a stranger or for a part of a stage alone, or free it
    if its parents have committed.

    A reissued id makes a job wait for somebody else's, for ever at worst. Waiting for the job
    that looks is fine: it is about to end.
    """
    ids = draft.jobs_of(parents)
    own = {job.base_id for job in view.queue or () if view.is_own(job)}
    fine = (own - draft.leaving) | set(ids)
    stages = [set(draft.jobs_of([p for p in parents if p.anchor == q.anchor])) for q in parents]
    for base_id, job in {job.base_id: job for job in live}.items():
        after = set(job.after)
        is_split = any(_waits_for_a_part(after, jobs, own) for jobs in stages)
        are_new = any(isinstance(at, Link) for at in ids)
        if are_new and not is_split and not draft.leaving & after:
            # Its parent is being submitted: a dependency on a dead job wakes it, and it seeks.
            continue
        if job.state is JobState.PENDING and (is_split or not fine.issuperset(after)):
            draft.actions.append(Repoint(base_id, ids))


def _waits_for_a_part(after: set[str], jobs: set[str | Link], own: set[str]) -> bool:
    """Whether a job waits for some of a stage's jobs, and not for all. The one that looks may be
    of that stage, if another one of it lives."""
    if jobs <= after:
        return False
    has_sibling = any(isinstance(at, str) for at in jobs)
    return bool(after & jobs) or (has_sibling and bool(after & own))


def _plan_strays(spec: Spec, view: View, draft: _Draft) -> None:
    """Cancel pending jobs that stand for nothing: of a dead timeline, or long committed.

    A young one is let be: its intent may have been written since the intents were read.
    """
    if view.queue is None:
        return
    known = {
        intent.token for seen in view.all_links if not seen.is_done for intent, _ in seen.intents
    }
    stray = {
        job.job_id
        for job in view.queue
        if job.state in (JobState.PENDING, JobState.HELD)
        and job.age_s >= spec.submit_deadline_s
        and job.token not in known
        and not view.is_own(job)
        and _is_behind(job.name, view)
    }
    already = {i for action in draft.actions if isinstance(action, Cancel) for i in action.job_ids}
    if stray - already:
        draft.actions.append(Cancel(tuple(sorted(stray - already)), "nothing left to do"))


def _is_behind(name: str, view: View) -> bool:
    """Whether the view would show the link that a job's name tells, if it were open. One outside
    the window may still be ahead of it (the window was made smaller)."""
    iteration = _iteration_in(name)
    if iteration is None or not view.links or name.split(".")[-2].startswith("eval-"):
        return iteration is not None
    return iteration <= view.links[-1].link.iteration


def _most_evals(spec: Spec, view: View) -> int:
    """How many evaluations may have jobs at once; those that are submitted ahead run one after the
    other. Where places are few they leave the chain enough to have one link running and the next
    one pending."""
    most = len(view.evals) if spec.is_ahead else MAX_EVALS
    if spec.max_submit_jobs is None:
        return most
    sizes: Counter[StageRef] = Counter()
    for seen in view.links:
        sizes[seen.link.anchor] += len(seen.slots)
    tasks = max(sizes.values(), default=0)
    ticks = TICKS_WANTED if spec.ticks else 0
    return max(0, min(most, spec.max_submit_jobs - ticks - 2 * tasks))


def _submit_room(spec: Spec, view: View) -> int:
    """How many more tasks may be submitted."""
    if spec.max_submit_jobs is None:
        return 1 << 30
    used = sum(job.state is not JobState.ENDED for job in view.queue or ())
    return spec.max_submit_jobs - used


def _cancel_pending(view: View, why: str) -> tuple[Cancel, ...]:
    """Ids of single tasks, not of arrays: other tasks of an array may be running."""
    waiting = (JobState.PENDING, JobState.HELD)
    jobs = [job for job in view.queue or () if job.state in waiting and not view.is_own(job)]
    return (Cancel(tuple(sorted(job.job_id for job in jobs)), why),) if jobs else ()


def _iteration_in(name: str) -> int | None:
    parts = name.split(".")
    if len(parts) < 3 or not parts[-3].startswith("i") or not parts[-3][1:].isdigit():
        return None
    return int(parts[-3][1:])
