"""What planning reads and what it answers: frozen records, no decisions.

`observe` fills a `View`, `plan` turns a `Spec` and a `View` into a `Plan`, `advance` carries it
out.
"""

from __future__ import annotations

from dataclasses import dataclass

from slurm_rl.chain.graph import Link
from slurm_rl.chain.scheduler import JobState, QueuedJob
from slurm_rl.storage.control import Control, Halt
from slurm_rl.storage.evals import GivenUp
from slurm_rl.storage.intents import Intent
from slurm_rl.types import StageRef

#: Evaluations that have jobs at once, of all names together.
MAX_EVALS = 4


@dataclass(frozen=True, slots=True)
class Spec:
    """What planning needs of the settings.

    fallbacks: (kind of job, seconds) after which one that waits goes elsewhere.
    gpus:      (kind of job, GPUs of it), for `gpu_hours`.
    until:     seconds since the epoch after which nothing new starts.
    submits:   whether jobs submit jobs; else only people and cron do, from the login node.
    poll_s:    how soon a service that was down is asked again.
    serial:    whether one machine does all in turn: the chain then lets evaluations go first.
    """

    run_name: str
    short_id: str
    window: int = 3
    max_attempts: int = 5
    submit_deadline_s: float = 90.0
    retry_delay_s: float = 15.0
    tick_s: float = 600.0
    ticks: bool = True
    max_submit_jobs: int | None = None
    max_stops: int = 100
    exclude_s: float = 3600.0
    fallbacks: tuple[tuple[str, float], ...] = ()
    gpus: tuple[tuple[str, int], ...] = ()
    gpu_hours: float | None = None
    until: float | None = None
    submits: bool = True
    lease_s: float = 60.0
    poll_s: float = 30.0
    serial: bool = False

    @property
    def is_ahead(self) -> bool:
        """Whether evaluations are submitted before their weights are there, to wake behind them:
        where nobody may be there later who could submit them, or who keeps their turn."""
        return self.serial or not self.submits

    def num_gpus(self, link: Link) -> int:
        """GPUs that the job of a link holds."""
        return dict(self.gpus).get(link.job_kind, 0)


@dataclass(frozen=True, slots=True)
class SlotView:
    """One slot of a link: committed, or how often it was tried.

    failures:      attempts that ended without a commit and still count.
    since_failure: seconds since the last of them ended.
    num_stops:     attempts that were preempted or told to stop, and still count.
    is_repeating:  the last two failed in the same way at the same place.
    bad_nodes:     where attempts failed, not long ago.
    is_users:      the last one failed by what a person has to mend.
    epoch:         of the last attempt of all; 0: there was none.
    num_deferrals: attempts in a row, up to the last, that found `service` down.
    since_deferral_s, outage_s: seconds since the last and since the first of them ended.
    """

    name: str
    shard: int | None = None
    committed: bool = False
    failures: int = 0
    since_failure_s: float = 1e9
    last_error: str = ""
    log: str = ""
    num_stops: int = 0
    is_repeating: bool = False
    bad_nodes: tuple[str, ...] = ()
    is_users: bool = False
    epoch: int = 0
    num_deferrals: int = 0
    since_deferral_s: float = 0.0
    outage_s: float = 0.0
    service: str = ""
    last_outage: str = ""


@dataclass(frozen=True, slots=True)
class LinkView:
    """One link, its intents (with their ages) and its slots.

    num_lost:  jobs that ended before their supervisor looked for work, and still count.
    waits_for: the links of the window that its own parents lie in.
    ready_s:   seconds since the last of its parents committed; None while one has not.
    """

    link: Link
    intents: tuple[tuple[Intent, float], ...] = ()
    slots: tuple[SlotView, ...] = ()
    num_lost: int = 0
    waits_for: tuple[Link, ...] = ()
    ready_s: float | None = None

    @property
    def is_done(self) -> bool:
        return all(slot.committed for slot in self.slots)

    @property
    def missing_shards(self) -> tuple[int, ...]:
        return tuple(s.shard for s in self.slots if s.shard is not None and not s.committed)

    @property
    def is_eval(self) -> bool:
        return self.link.anchor.is_eval

    @property
    def open_slots(self) -> tuple[SlotView, ...]:
        return tuple(slot for slot in self.slots if not slot.committed)


@dataclass(frozen=True, slots=True)
class View:
    """A reading: control, intents, queue, commits, attempts, in that order.

    links: the links of the window, from the first that is not done; empty when the chain is done.
    evals: wanted evaluations that are not settled: the first few, and those that have jobs.
    has_more_evals: whether there are others, so that the run is not over after these.
    queue: None when the scheduler could not be asked.
    own:   (token, array task) of the job that looks and is about to end; it counts for nothing.
    conflict: a commit whose recorded parents are not the current commits, in words.
    now:      seconds since the epoch by the clock of the run's file system.
    gpu_s:    GPU seconds of all attempts so far; 0 where no budget asks for them.
    """

    control: Control
    links: tuple[LinkView, ...]
    queue: tuple[QueuedJob, ...] | None
    own: tuple[str, int | None] | None = None
    conflict: str = ""
    now: float = 0.0
    gpu_s: float = 0.0
    evals: tuple[LinkView, ...] = ()
    has_more_evals: bool = False

    @property
    def is_complete(self) -> bool:
        return not self.links and not self.evals and not self.has_more_evals

    @property
    def all_links(self) -> tuple[LinkView, ...]:
        return (*self.links, *self.evals)

    def jobs_of(self, seen: LinkView) -> list[QueuedJob]:
        """Jobs that stand for a link. The one that looks is not counted: it is about to end."""
        tokens = {intent.token for intent, _ in seen.intents}
        return [job for job in self.queue or () if job.token in tokens and not self.is_own(job)]

    def is_own(self, job: QueuedJob) -> bool:
        """Whether it is the job that looks. One that waits is not about to end: it was given up
        and is queued again, while the process that looks lived on."""
        is_waiting = job.state in (JobState.PENDING, JobState.HELD)
        return self.own == (job.token, job.task) and not is_waiting


@dataclass(frozen=True, slots=True)
class Submit:
    """Submit number `number` of `link`, to wake when all of `after` (job ids or links) have ended.

    begin_s:  seconds to wait at least, after a failure.
    exclude:  nodes to stay away from.
    fallback: to the stage's other partition or quality of service.
    """

    link: Link
    number: int
    after: tuple[str | Link, ...] = ()
    shards: tuple[int, ...] = ()
    begin_s: float | None = None
    exclude: tuple[str, ...] = ()
    fallback: bool = False


@dataclass(frozen=True, slots=True)
class SubmitTick:
    begin_s: float


@dataclass(frozen=True, slots=True)
class Cancel:
    """Take jobs out of the queue; those that have begun meanwhile are let be.

    replaced: the link whose new job takes their place: without it they stay.
    """

    job_ids: tuple[str, ...]
    why: str
    replaced: Link | None = None


@dataclass(frozen=True, slots=True)
class Repoint:
    """Let a pending job wait for all of `after` (job ids, or links that are being submitted)."""

    job_id: str
    after: tuple[str | Link, ...]


@dataclass(frozen=True, slots=True)
class HaltRun:
    halt: Halt


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not try an evaluation again: it failed for good. The run goes on without it."""

    ref: StageRef
    given_up: GivenUp


Action = Submit | SubmitTick | Cancel | Repoint | HaltRun | GiveUp


@dataclass(frozen=True)
class Plan:
    """Actions in order, and why the run is not moving where it is not.

    lacks_tick: after them a pending tick is still missing, since two are submitted well apart.
    goes_on:    another look would plan more at once: one array is submitted for a link at a time.
    """

    actions: tuple[Action, ...] = ()
    waiting: tuple[str, ...] = ()
    lacks_tick: bool = False
    goes_on: bool = False
