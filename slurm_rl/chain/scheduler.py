"""What the chain asks of a scheduler, and what it is told.

Three implementations live in `launch/`: Slurm, local processes, and an in-memory cluster with a
virtual clock. What a scheduler says is a hint; the run directory is the truth.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from slurm_rl.types import StageRef


class JobState(Enum):
    """What a queue can say of a job. UNKNOWN is neither success nor an end."""

    PENDING = "pending"
    HELD = "held"  # pending, and will not start by itself
    RUNNING = "running"
    ENDED = "ended"
    UNKNOWN = "unknown"

    @property
    def is_live(self) -> bool:
        """May still do work by itself."""
        return self is JobState.PENDING or self.may_be_at_work

    @property
    def may_be_at_work(self) -> bool:
        """May have processes now."""
        return self in (JobState.RUNNING, JobState.UNKNOWN)


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """One job, or one task of an array, as the queue shows it.

    after: ids of the jobs it still waits for.
    age_s: seconds since it was submitted, by the scheduler's clock.
    begins_in_s: seconds until its time comes, if it has one and the scheduler tells; else 0.
    raw:   the state in the scheduler's own word.
    """

    job_id: str
    name: str
    state: JobState
    reason: str = ""
    after: tuple[str, ...] = ()
    age_s: float = 0.0
    elapsed_s: float = 0.0
    nodes: str = ""
    task: int | None = None
    raw: str = ""
    begins_in_s: float = 0.0

    @property
    def token(self) -> str:
        return token_of(self.name)

    @property
    def claim_token(self) -> str:
        """What its claims carry: tasks of an array share a name, but not a claim."""
        return make_claim_token(self.token, self.task)

    @property
    def base_id(self) -> str:
        """The id of the whole array: `12` for `12_3` and `12_[0-7]`."""
        return self.job_id.partition("_")[0]


def token_of(name: str) -> str:
    """The token that a job's name ends with."""
    return name.rpartition(".")[2]


def make_claim_token(token: str, task: int | None) -> str:
    """The token that the claims of a job, or of one task of an array, carry."""
    return token if task is None else f"{token}_{task}"


@dataclass(frozen=True, slots=True)
class WallTime:
    """Wall time of a job in seconds, as learnt from earlier ones; None: not learnt, or not asked.

    limit_s: what to ask for. shortest_s: what may do, if the scheduler finds a gap of that
    length. signal_s: how long before its end the job is told to stop.
    """

    limit_s: int | None = None
    shortest_s: int | None = None
    signal_s: int | None = None


@dataclass(frozen=True, slots=True)
class LinkRequest:
    """A job to submit. The scheduler knows what a job of each kind needs.

    name:    `<run>.i0012.rollout.<token>`, or `<run>.tick.<token>`.
    stages:  what the job is for; empty for a tick.
    pool:    of the stage's shards; empty where there are none.
    command: arguments of the supervisor.
    after:   ids of the jobs whose ends wake it (whatever those ends are).
    exclude: nodes, or lists of nodes, to stay away from.
    fallback: to the stages' other partition or quality of service.
    wall:    what to ask for where the settings leave it to be learnt.
    """

    name: str
    command: tuple[str, ...]
    stages: tuple[StageRef, ...] = ()
    pool: str = ""
    shards: tuple[int, ...] = ()
    after: tuple[str, ...] = ()
    begin_s: float | None = None
    log: str = ""
    exclude: tuple[str, ...] = ()
    fallback: bool = False
    wall: WallTime | None = None

    @property
    def job_kind(self) -> str:
        """What it asks for is set under this name. The job of several stages takes the shape of
        the last; they are checked to be the same."""
        if not self.stages:
            return "tick"
        kind = self.stages[-1].kind
        return f"{kind}-{self.pool}" if self.pool else kind


class Scheduler(Protocol):
    """The effects. Every call may raise SchedulerUnavailable, which says nothing about jobs."""

    def submit(self, request: LinkRequest) -> str:
        """The new job's id. Raises SubmitRefused, SubmitDeferred; an error may hide a success."""
        ...

    def query(self) -> list[QueuedJob]:
        """Every job of this user whose name begins with the run's name."""
        ...

    def cancel(self, job_ids: list[str], *, only_pending: bool = False) -> None:
        """End jobs; with `only_pending`, those that have begun by now go on."""
        ...

    def repoint(self, job_id: str, after: tuple[str, ...]) -> None:
        """Make a pending job wait for all of `after` instead, or for nothing."""
        ...

    def was_cancelled(self, job_id: str) -> bool:
        """Whether somebody is ending this job for good; False where that cannot be told."""
        ...

    def requeue(self, job_id: str) -> bool:
        """Put a running job back to the queue; False where that cannot be."""
        ...
