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
from slurm_rl.chain.scheduler import JobState, QueuedJob
from slurm_rl.storage.control import Control, Halt
from slurm_rl.storage.intents import Intent

#: Pending ticks that are kept while a run is under way.
TICKS_WANTED = 2
#: A controller killed within a second of a submission forgets the job; two ticks submitted
#: further apart than this are not both forgotten.
TICK_SPACING_S = 10.0
#: Jobs of a link that may end without a claim, for each attempt that may fail.
LOST_PER_ATTEMPT = 3


@dataclass(frozen=True, slots=True)
class Spec:
    """What planning needs of the settings."""

    run_name: str
    short_id: str
    window: int = 3
    max_attempts: int = 5
    submit_deadline_s: float = 90.0
    retry_delay_s: float = 15.0
    tick_s: float = 600.0
    ticks: bool = True
    max_submit_jobs: int | None = None


@dataclass(frozen=True, slots=True)
class SlotView:
    """One slot of a link: committed, or how often it was tried.

    failures:      attempts that ended without a commit and still count.
    since_failure: seconds since the last of them ended.
    """

    name: str
    shard: int | None = None
    committed: bool = False
    failures: int = 0
    since_failure_s: float = 1e9
    last_error: str = ""
    log: str = ""


@dataclass(frozen=True, slots=True)
class LinkView:
    """One link, its intents (with their ages) and its slots.

    num_lost: jobs that ended before their supervisor looked for work, and still count.
    """

    link: Link
    intents: tuple[tuple[Intent, float], ...] = ()
    slots: tuple[SlotView, ...] = ()
    num_lost: int = 0

    @property
    def is_done(self) -> bool:
        return all(slot.committed for slot in self.slots)

    @property
    def missing_shards(self) -> tuple[int, ...]:
        return tuple(s.shard for s in self.slots if s.shard is not None and not s.committed)


@dataclass(frozen=True, slots=True)
class View:
    """A reading: control, intents, queue, commits, attempts, in that order.

    links: the links of the window, from the first that is not done; empty when the run is complete.
    queue: None when the scheduler could not be asked.
    own:   (token, array task) of the job that looks and is about to end; it counts for nothing.
    conflict: a commit whose recorded parents are not the current commits, in words.
    """

    control: Control
    links: tuple[LinkView, ...]
    queue: tuple[QueuedJob, ...] | None
    own: tuple[str, int | None] | None = None
    conflict: str = ""

    def is_own(self, job: QueuedJob) -> bool:
        return self.own == (job.token, job.task)


@dataclass(frozen=True, slots=True)
class Submit:
    """Submit number `number` of `link`, to wake when `after` (a job id or a link) ends.

    begin_s: seconds to wait at least, after a failure.
    """

    link: Link
    number: int
    after: str | Link | None = None
    shards: tuple[int, ...] = ()
    begin_s: float | None = None


@dataclass(frozen=True, slots=True)
class SubmitTick:
    begin_s: float


@dataclass(frozen=True, slots=True)
class Cancel:
    job_ids: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Repoint:
    job_id: str
    after: str | None


@dataclass(frozen=True, slots=True)
class HaltRun:
    halt: Halt


Action = Submit | SubmitTick | Cancel | Repoint | HaltRun


@dataclass(frozen=True)
class Plan:
    """Actions in order, and why the run is not moving where it is not."""

    actions: tuple[Action, ...] = ()
    waiting: tuple[str, ...] = ()


@dataclass
class _Draft:
    """What is being planned: actions, reasons, and the link that the next one waits for."""

    actions: list[Action] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)


def plan(spec: Spec, view: View) -> Plan:
    """What to do now. Pure: the same view gives the same plan."""
    if view.conflict and view.control.halt is None:
        hint = "see `slurm-rl verify RUN`"
        return Plan((HaltRun(Halt(view.conflict, hint)),), (view.conflict,))
    if view.control.halt is not None:
        pending = _pending_ids(view)
        actions = (Cancel(pending, "the run is halted"),) if pending else ()
        return Plan(actions, (f"halted: {view.control.halt.reason}",))
    if view.control.paused is not None:
        return Plan((), ("paused; continue with `slurm-rl resume`",))
    if not view.links:
        pending = _pending_ids(view)
        actions = (Cancel(pending, "the run is complete"),) if pending else ()
        return Plan(actions, ("complete",))
    halt = _find_halt(spec, view)
    if halt is not None:
        pending = _pending_ids(view)
        stop = (Cancel(pending, "the run is halted"),) if pending else ()
        return Plan((HaltRun(halt), *stop), (f"halted: {halt.reason}",))
    draft = _Draft()
    _plan_window(spec, view, draft)
    _plan_strays(spec, view, draft)
    if spec.ticks:
        _plan_ticks(spec, view, draft)
    return Plan(tuple(draft.actions), tuple(draft.waiting))


def _find_halt(spec: Spec, view: View) -> Halt | None:
    for link in view.links:
        # A job that dies before it claims leaves no failed attempt; it must not go on for ever.
        if not link.is_done and link.num_lost > LOST_PER_ATTEMPT * spec.max_attempts:
            return Halt(
                f"{link.link.anchor}: {link.num_lost} jobs ended before they could look for work",
                "look at the jobs' own logs (`logs/` of the iteration), then `slurm-rl resume RUN`",
            )
        for slot in link.slots:
            if not slot.committed and slot.failures >= spec.max_attempts:
                return Halt(
                    f"{slot.name}: {slot.failures} attempts ended without a commit"
                    + (f"; the last said: {slot.last_error}" if slot.last_error else ""),
                    "look at the log, mend the cause, then `slurm-rl resume RUN`",
                    slot.log,
                )
    return None


def _plan_window(spec: Spec, view: View, draft: _Draft) -> None:
    """Keep one live job for each link of the window; each wakes on the end of the one before."""
    room, kept_for_ticks = _submit_room(spec, view), _missing_ticks(spec, view)
    previous: str | Link | None = None
    for index, seen in enumerate(view.links):
        if seen.is_done:
            continue
        jobs = _jobs_of(seen, view)
        live = [job for job in jobs if job.state.is_live]
        is_first = not any(not earlier.is_done for earlier in view.links[:index])
        if live:
            _plan_dependency(view, live, previous if not is_first else None, draft)
            previous = live[-1].base_id
            _explain_live(seen, live, draft)
            continue
        held = [job for job in jobs if job.state is JobState.HELD]
        if held:
            ids = tuple(sorted(job.job_id for job in held))
            draft.waiting.append(f"{held[0].name} ({ids[0]}) is held: {held[0].reason}")
            draft.actions.append(Cancel(ids, "held; replaced"))
        number, reason = _next_submission(spec, seen, view, bool(held))
        num_tasks = max(1, len(seen.missing_shards))
        if number and num_tasks > room - (0 if is_first else kept_for_ticks):
            number, reason = 0, "the submit limit is reached; deferred"
        if not number or (previous is None and not is_first):
            draft.waiting.append(f"{seen.link.anchor}: {reason or 'its parent has no job yet'}")
            return  # a link without a live parent would wake at once
        begin_s = _retry_delay(spec, seen)
        draft.actions.append(Submit(seen.link, number, previous, seen.missing_shards, begin_s))
        room -= num_tasks
        previous = seen.link


def _next_submission(spec: Spec, seen: LinkView, view: View, replace_held: bool) -> tuple[int, str]:
    """Number of the submission to make for a link that no live job stands for, or why not yet."""
    if not seen.intents:
        return 1, ""
    intent, age_s = seen.intents[-1]
    if view.queue is None:
        return 0, "the scheduler does not answer"
    if replace_held or age_s >= spec.submit_deadline_s:
        return intent.number + 1, ""
    if _has_ended(intent, view):
        return intent.number + 1, ""
    left = spec.submit_deadline_s - age_s
    return 0, f"submission {intent.number} is not in the queue; sure in {left:.0f} s"


def _retry_delay(spec: Spec, seen: LinkView) -> float | None:
    """Seconds that the link should still wait after its last failure; it doubles each time."""
    waits = [
        spec.retry_delay_s * 2 ** (slot.failures - 1) - slot.since_failure_s
        for slot in seen.slots
        if slot.failures and not slot.committed
    ]
    longest = max(waits, default=0.0)
    return longest if longest > 0 else None


def _has_ended(intent: Intent, view: View) -> bool:
    """The queue still knows the job, and knows that it is over: no need to wait longer."""
    jobs = [job for job in view.queue or () if job.token == intent.token]
    return bool(jobs) and all(job.state is JobState.ENDED or view.is_own(job) for job in jobs)


def _plan_dependency(
    view: View, live: list[QueuedJob], previous: str | Link | None, draft: _Draft
) -> None:
    """Re-point a pending job that waits for a stranger, or free it if its parent has committed.

    A reissued id makes a job wait for somebody else's, for ever at worst. Waiting for the job
    that looks is fine: it is about to end.
    """
    if isinstance(previous, Link):
        return  # its parent is being submitted: a dependency on a dead job wakes it, and it seeks
    fine = {job.base_id for job in view.queue or () if view.is_own(job)}
    if previous is not None:
        fine.add(previous)
    for base_id, job in {job.base_id: job for job in live}.items():
        if job.state is JobState.PENDING and not fine.issuperset(job.after):
            draft.actions.append(Repoint(base_id, previous))


def _explain_live(seen: LinkView, live: list[QueuedJob], draft: _Draft) -> None:
    job = live[0]
    if job.state is JobState.PENDING and job.reason and not job.after:
        draft.waiting.append(f"{seen.link.anchor}: job {job.base_id} is pending ({job.reason})")


def _plan_strays(spec: Spec, view: View, draft: _Draft) -> None:
    """Cancel pending jobs that stand for nothing: of a dead timeline, or long committed.

    A young one is let be: its intent may have been written since the intents were read.
    """
    if view.queue is None:
        return
    known = {intent.token for seen in view.links for intent, _ in seen.intents if not seen.is_done}
    # A link outside the window may still be ahead of it (the window was made smaller).
    ahead = view.links[-1].link.iteration + 1
    stray = {
        job.job_id
        for job in view.queue
        if job.state in (JobState.PENDING, JobState.HELD)
        and job.age_s >= spec.submit_deadline_s
        and job.token not in known
        and not view.is_own(job)
        and (iteration := _iteration_in(job.name)) is not None
        and iteration < ahead
    }
    already = {i for action in draft.actions if isinstance(action, Cancel) for i in action.job_ids}
    if stray - already:
        draft.actions.append(Cancel(tuple(sorted(stray - already)), "nothing left to do"))


def _plan_ticks(spec: Spec, view: View, draft: _Draft) -> None:
    if view.queue is None or _submit_room(spec, view) <= 0:
        return
    held = tuple(
        job.job_id
        for job in view.queue
        if is_tick(job.name) and job.state is JobState.HELD and not view.is_own(job)
    )
    if held:
        draft.actions.append(Cancel(held, "a held tick never wakes"))
    ticks = [job for job in view.queue if is_tick(job.name) and job.state is JobState.PENDING]
    if len(ticks) >= TICKS_WANTED:
        return
    if ticks and min(job.age_s for job in ticks) <= TICK_SPACING_S:
        return
    draft.actions.append(SubmitTick(spec.tick_s * (1 + len(ticks))))


def _missing_ticks(spec: Spec, view: View) -> int:
    """Places in the queue that links ahead of the first one must leave to ticks."""
    if not spec.ticks:
        return 0
    jobs = view.queue or ()
    pending = sum(is_tick(job.name) and job.state is JobState.PENDING for job in jobs)
    return max(0, TICKS_WANTED - pending)


def _submit_room(spec: Spec, view: View) -> int:
    """How many more tasks may be submitted."""
    if spec.max_submit_jobs is None:
        return 1 << 30
    used = sum(job.state is not JobState.ENDED for job in view.queue or ())
    return spec.max_submit_jobs - used


def _jobs_of(seen: LinkView, view: View) -> list[QueuedJob]:
    """Jobs that stand for a link. The one that looks is not counted: it is about to end."""
    tokens = {intent.token for intent, _ in seen.intents}
    return [job for job in view.queue or () if job.token in tokens and not view.is_own(job)]


def _pending_ids(view: View) -> tuple[str, ...]:
    """Ids of single tasks, not of arrays: other tasks of an array may be running."""
    waiting = (JobState.PENDING, JobState.HELD)
    jobs = [job for job in view.queue or () if job.state in waiting and not view.is_own(job)]
    return tuple(sorted(job.job_id for job in jobs))


def is_tick(name: str) -> bool:
    """Whether a job name is a tick's: `<run>.tick.<token>`."""
    return name.split(".")[-2:-1] == ["tick"]


def _iteration_in(name: str) -> int | None:
    parts = name.split(".")
    if len(parts) < 3 or not parts[-3].startswith("i") or not parts[-3][1:].isdigit():
        return None
    return int(parts[-3][1:])
