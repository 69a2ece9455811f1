"""Planning: one pure function from what is seen to what should be done.

    plan(spec, view) -> actions and reasons to wait

It decides nothing from a job's exit code or state: a stage is done when its COMMIT exists, and
absence from the queue, or an unanswered query, says nothing. Submission is at-least-once: an
intent that a successful query no longer shows, after `submit_deadline_s`, is over, and the next
number is submitted. A duplicate job is harmless, since a slot takes one claim and one commit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slurm_rl.chain.graph import Link
from slurm_rl.chain.halts import find_halt
from slurm_rl.chain.outages import deferred_for, describe_outage
from slurm_rl.chain.plan_evals import links_in_turn, plan_giving_up
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
    SubmitTick,
    View,
)
from slurm_rl.storage.intents import Intent

#: Pending ticks that are kept while a run is under way.
TICKS_WANTED = 2
#: A controller killed within a second of a submission forgets the job; two ticks submitted
#: further apart than this are not both forgotten.
TICK_SPACING_S = 10.0
#: Reasons of a pending job that has not begun to wait for its place yet.
_NOT_YET = ("BeginTime", "Dependency")
#: More nodes than these are not stayed away from: then it is not the nodes.
_MOST_EXCLUDED = 8


@dataclass
class _Draft:
    """What is being planned: actions, reasons, the jobs of each link, and the room in the queue.

    have: link -> the id of its live job, or itself if it is being submitted.
    last: what comes after all else; leaving: ids of jobs that end with it.
    """

    actions: list[Action] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    have: dict[Link, str | Link] = field(default_factory=dict)
    last: list[Action] = field(default_factory=list)
    leaving: set[str] = field(default_factory=set)
    room: int = 0


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
    lacks_tick = spec.ticks and _plan_ticks(spec, view, draft)
    return Plan(tuple(draft.actions), tuple(draft.waiting), lacks_tick)


def _plan_window(spec: Spec, view: View, draft: _Draft) -> None:
    """Keep one live job for each link of the window; each wakes on the end of its parents'."""
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
            draft.have[seen.link] = live[-1].base_id
            _plan_fallback(spec, view, seen, live, draft)
        else:
            _plan_submission(spec, view, seen, parents, draft)
    draft.actions += draft.last


def _plan_submission(
    spec: Spec, view: View, seen: LinkView, parents: list[Link], draft: _Draft
) -> None:
    """Submit a link that no live job stands for, or say why not yet."""
    held = [job for job in view.jobs_of(seen) if job.state is JobState.HELD]
    if held:
        ids = tuple(sorted(job.job_id for job in held))
        draft.waiting.append(f"{held[0].name} ({ids[0]}) is held: {held[0].reason}")
        draft.actions.append(Cancel(ids, "held; replaced"))
    number, reason = _next_submission(spec, seen, view, bool(held))
    num_tasks = max(1, len(seen.missing_shards))
    must_leave = _missing_ticks(spec, view) if parents or seen.is_eval else 0
    if number and num_tasks > draft.room - must_leave:
        number, reason = 0, "the submit limit is reached; deferred"
    if number and not all(link in draft.have for link in parents):
        # A link without a live parent would wake at once.
        number, reason = 0, "its parent has no job yet"
    if not number:
        draft.waiting.append(f"{seen.link.anchor}: {reason}")
        return
    after = tuple(draft.have[link] for link in parents)
    draft.actions.append(
        Submit(
            seen.link,
            number,
            after,
            seen.missing_shards,
            _retry_delay(spec, seen),
            _find_bad_nodes(seen, view),
            _went_elsewhere(seen),
        )
    )
    draft.room -= num_tasks
    draft.have[seen.link] = seen.link
    if any(slot.num_deferrals for slot in seen.open_slots):
        # Those behind it keep their places in the queue: woken, they would hold nodes for nothing.
        draft.leaving |= {job.base_id for job in view.queue or () if view.is_own(job)}


def _next_submission(spec: Spec, seen: LinkView, view: View, replace_held: bool) -> tuple[int, str]:
    """Number of the submission to make for a link that no live job stands for, or why not yet."""
    if not seen.intents:
        return 1, ""
    intent, age_s = seen.intents[-1]
    if view.queue is None:
        return 0, "the scheduler does not answer"
    # One of the future was dated by a clock that was set back since: its age says nothing.
    if replace_held or abs(age_s) >= spec.submit_deadline_s:
        return intent.number + 1, ""
    if _has_ended(intent, view):
        return intent.number + 1, ""
    left = spec.submit_deadline_s - age_s
    return 0, f"submission {intent.number} is not in the queue; sure in {left:.0f} s"


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


def _find_bad_nodes(seen: LinkView, view: View) -> tuple[str, ...]:
    """Where the link's attempts failed of late, and where its jobs died before they began."""
    tokens = {intent.token for intent, _ in seen.intents}
    nodes = {node for slot in seen.open_slots for node in slot.bad_nodes}
    if seen.num_lost:
        dead = [j for j in view.queue or () if j.token in tokens and j.state is JobState.ENDED]
        nodes |= {job.nodes for job in dead if job.nodes and not view.is_own(job)}
    return tuple(sorted(nodes)) if len(nodes) <= _MOST_EXCLUDED else ()


def _went_elsewhere(seen: LinkView) -> bool:
    """Whether the link has gone to its fallback; its retries stay there."""
    return any(intent.fallback for intent, _ in seen.intents)


def _plan_fallback(
    spec: Spec, view: View, seen: LinkView, live: list[QueuedJob], draft: _Draft
) -> None:
    """Say what a live job waits for; send one that has waited too long elsewhere, once."""
    job = live[0]
    if any(j.state is not JobState.PENDING or j.after or j.reason in _NOT_YET for j in live):
        if job.state is JobState.PENDING and job.reason and not job.after:
            draft.waiting.append(f"{seen.link.anchor}: {_describe_pending(job)}")
        return
    waited_s = min(job.age_s, job.age_s if seen.ready_s is None else seen.ready_s)
    limits = [after_s for kind, after_s in spec.fallbacks if kind in seen.link.kinds]
    if not limits or _went_elsewhere(seen) or waited_s < min(limits):
        draft.waiting.append(f"{seen.link.anchor}: {_describe_pending(job)}")
        return
    ids = tuple(sorted(job.job_id for job in live))
    draft.waiting.append(f"{seen.link.anchor}: waited {waited_s:.0f} s; goes to its fallback")
    number = seen.intents[-1][0].number + 1
    draft.actions.append(Submit(seen.link, number, (), seen.missing_shards, fallback=True))
    # Those that wait for it are to wait for the new one, before its end would wake them.
    draft.last.append(Cancel(ids, "waited too long; goes to its fallback", seen.link))
    draft.leaving |= {job.base_id for job in live}
    draft.have[seen.link] = seen.link


def _describe_pending(job: QueuedJob) -> str:
    why = f"begins in {job.begins_in_s:.0f} s" if job.begins_in_s else job.reason
    return f"job {job.base_id} is pending" + (f" ({why})" if why else "")


def _has_ended(intent: Intent, view: View) -> bool:
    """The queue still knows the job, and knows that it is over: no need to wait longer."""
    jobs = [job for job in view.queue or () if job.token == intent.token]
    return bool(jobs) and all(job.state is JobState.ENDED or view.is_own(job) for job in jobs)


def _plan_dependency(view: View, live: list[QueuedJob], parents: list[Link], draft: _Draft) -> None:
    """Re-point a pending job that waits for a stranger, or free it if its parents have committed.

    A reissued id makes a job wait for somebody else's, for ever at worst. Waiting for the job
    that looks is fine: it is about to end.
    """
    ids = tuple(at for link in parents if (at := draft.have.get(link)) is not None)
    are_new = any(isinstance(at, Link) for at in ids)
    if are_new and not any(draft.leaving & set(job.after) for job in live):
        return  # its parent is being submitted: a dependency on a dead job wakes it, and it seeks
    own = {job.base_id for job in view.queue or () if view.is_own(job)}
    fine = (own - draft.leaving) | set(ids)
    for base_id, job in {job.base_id: job for job in live}.items():
        if job.state is JobState.PENDING and not fine.issuperset(job.after):
            draft.actions.append(Repoint(base_id, ids))


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


def _plan_ticks(spec: Spec, view: View, draft: _Draft) -> bool:
    """Submit a tick if one is missing; whether another still is, once the spacing allows it."""
    if view.queue is None or _submit_room(spec, view) <= 0:
        return False
    held = tuple(
        job.job_id
        for job in view.queue
        if is_tick(job.name) and job.state is JobState.HELD and not view.is_own(job)
    )
    if held:
        draft.actions.append(Cancel(held, "a held tick never wakes"))
    ticks = [job for job in view.queue if is_tick(job.name) and job.state is JobState.PENDING]
    if len(ticks) >= TICKS_WANTED:
        return False
    if ticks and min(job.age_s for job in ticks) <= TICK_SPACING_S:
        return True
    draft.actions.append(SubmitTick(spec.tick_s * (1 + len(ticks))))
    return len(ticks) + 1 < TICKS_WANTED


def _missing_ticks(spec: Spec, view: View) -> int:
    """Places in the queue that links ahead of the first one must leave to ticks."""
    if not spec.ticks:
        return 0
    jobs = view.queue or ()
    pending = sum(is_tick(job.name) and job.state is JobState.PENDING for job in jobs)
    return max(0, TICKS_WANTED - pending)


def _most_evals(spec: Spec, view: View) -> int:
    """How many evaluations may have jobs at once; those that are submitted ahead run one after the
    other. Where places are few they leave the chain enough to have one link running and the next
    one pending."""
    most = len(view.evals) if spec.is_ahead else MAX_EVALS
    if spec.max_submit_jobs is None:
        return most
    tasks = max((len(seen.slots) for seen in view.links), default=0)
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


def is_tick(name: str) -> bool:
    """Whether a job name is a tick's: `<run>.tick.<token>`."""
    return name.split(".")[-2:-1] == ["tick"]


def _iteration_in(name: str) -> int | None:
    parts = name.split(".")
    if len(parts) < 3 or not parts[-3].startswith("i") or not parts[-3][1:].isdigit():
        return None
    return int(parts[-3][1:])
