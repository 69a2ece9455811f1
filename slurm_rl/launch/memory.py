"""The in-memory cluster: a scheduler with a virtual clock, for tests and for trying a chain dry.

It implements `Scheduler` and runs jobs as generators that yield the seconds they sleep, all in one
thread and in an order that depends on nothing but what was asked of it. Its manners are those that
were measured on a real Slurm 22.05:

- `afterany` on an id that is unknown or purged is satisfied at once; on a reissued id it waits for
  a stranger; a requeue is invisible to dependents;
- a preemption's SIGTERM reaches the program alone; after the grace everything is killed, and the
  job goes back to the queue, from which it starts after `requeue_delay_s`;
- a lost node's job is requeued (or fails) while its old processes may live on;
- a job whose prolog fails ends before it begins, or is held;
- a controller that is killed forgets what was submitted in its last second, and gives the ids to
  others;
- an ended job stays visible for `min_job_age_s`.

It refuses to know what a job does: a `program` is handed in. What happens to jobs from outside
(preemption, lost nodes, a lying controller) is in `memory_faults.py`, and what a process sees of
the world in `memory_process.py`.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from slurm_rl.chain.scheduler import JobState, LinkRequest, QueuedJob
from slurm_rl.errors import SchedulerUnavailable, SubmitDeferred, SubmitRefused
from slurm_rl.launch.memory_process import Effect, Process, ProcessKilled, Program
from slurm_rl.storage.fs import POSIX, Fs

#: What the next submission meets: `refused`, `deferred` (a limit) and `lost` make no job; `made`
#: times out like `lost`, but the job is there.
SUBMIT_FAULTS = ("refused", "deferred", "lost", "made")


@dataclass
class MemoryJob:
    """One job or array task. `begin` is the earliest start; `process` the one it runs as."""

    job_id: str
    request: LinkRequest
    task: int | None
    submitted: float
    begin: float
    after: tuple[str, ...]
    state: JobState = JobState.PENDING
    raw: str = "PENDING"
    node: str = ""
    started: float = 0.0
    exit_code: int | None = None
    restarts: int = 0
    process: Process | None = None

    @property
    def base_id(self) -> str:
        return self.job_id.partition("_")[0]

    @property
    def is_tick(self) -> bool:
        return not self.request.stages


@dataclass(frozen=True, slots=True)
class Habits:
    """How the cluster behaves, in seconds of its clock.

    time_limit_s: of a link's job; it is warned `warning_s` before.
    max_jobs:     jobs and tasks that may be in the queue.
    user_signal:  a preemption warns the batch process too (`preempt_send_user_signal`).
    tells_cancel: one can ask whether a running job was cancelled.
    can_requeue:  jobs may be put back to the queue.
    """

    start_delay_s: float = 1.0
    grace_s: float = 15.0
    kill_wait_s: float = 2.0
    requeue_delay_s: float = 121.0
    min_job_age_s: float = 300.0
    time_limit_s: float | None = None
    warning_s: float = 120.0
    max_jobs: int | None = None
    user_signal: bool = False
    tells_cancel: bool = True
    can_requeue: bool = True


@dataclass
class MemoryCluster:
    """A cluster of `nodes` (name -> jobs that fit on it; ticks need no room).

    fallback_nodes: nodes of the partition that jobs go to as a fallback.
    start_faults:   what the next job to start meets: `held` (a failed prolog) or `ended`.

    program: makes the life of a job's process.
    fs:      the real file system below what processes see.
    view:    what a process makes of `fs`: a node may see files late, or fail to reach them.
    before:  called before every effect of every process; it may do anything to the cluster,
             stall the process by letting time go on (`run_for`), or end it (`kill_process`).
    """

    program: Program
    nodes: dict[str, int] = field(default_factory=lambda: {"node1": 4, "node2": 4})
    fallback_nodes: dict[str, int] = field(default_factory=dict)
    habits: Habits = field(default_factory=Habits)
    fs: Fs = POSIX
    view: Callable[[Process, Fs], Fs] = lambda process, fs: fs
    before: Callable[[Process, Effect], None] | None = None
    now: float = 1_000_000.0
    jobs: list[MemoryJob] = field(default_factory=list)
    history: list[MemoryJob] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    crashes: list[tuple[Process, Exception]] = field(default_factory=list)
    submit_faults: deque[str] = field(default_factory=deque)
    start_faults: deque[str] = field(default_factory=deque)
    silent_until: float = 0.0
    down_nodes: set[str] = field(default_factory=set)
    next_id: int = 1
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _ticket: itertools.count[int] = field(default_factory=itertools.count)

    # -- time ---------------------------------------------------------------------------------

    def clock(self) -> float:
        return self.now

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do `action` in `delay_s` seconds."""
        heapq.heappush(self._events, (self.now + delay_s, next(self._ticket), action))

    def step(self) -> bool:
        """Go to the next event; False if there is none."""
        if not self._events:
            return False
        when, _, action = heapq.heappop(self._events)
        self.now = max(self.now, when)
        action()
        self._start_ready()
        return True

    def run_for(self, seconds: float) -> None:
        """Let time go on. May be called from `before`: the process in question stalls meanwhile."""
        deadline = self.now + seconds
        while self._events and self._events[0][0] <= deadline:
            self.step()
        self.now = max(self.now, deadline)

    def run_until(self, is_over: Callable[[], bool], *, limit_s: float) -> bool:
        """Let time go on until `is_over()`; False if that is not so by the limit, or ever."""
        deadline = self.now + limit_s
        while not is_over():
            if self.now > deadline or not self.step():
                return False
        return True

    # -- what a scheduler is asked ------------------------------------------------------------

    def submit(self, request: LinkRequest) -> str:
        """Queue a job, or an array with one task for each of `request.shards`."""
        self._answer()
        fault = self.submit_faults.popleft() if self.submit_faults else ""
        if fault == "refused":
            raise SubmitRefused(f"{request.name}: refused")
        if fault == "lost":
            raise SchedulerUnavailable(f"{request.name}: the submission timed out")
        if set(request.exclude) >= set(self._nodes_for(request)):
            raise SubmitRefused(f"{request.name}: requested node configuration is not available")
        tasks: list[int | None] = list(request.shards) or [None]
        limit = self.habits.max_jobs
        is_full = limit is not None and len(self.live_jobs()) + len(tasks) > limit
        if fault == "deferred" or is_full:
            raise SubmitDeferred(f"{request.name}: too many jobs are in the queue")
        base_id = str(self.next_id)
        self.next_id += 1
        begin = self.now + max(request.begin_s or 0.0, self.habits.start_delay_s)
        for task in tasks:
            job_id = base_id if task is None else f"{base_id}_{task}"
            self.jobs.append(MemoryJob(job_id, request, task, self.now, begin, request.after))
            self.history.append(self.jobs[-1])
        self.look_again(begin - self.now)
        if fault == "made":
            raise SchedulerUnavailable(f"{request.name}: the submission timed out")
        return base_id

    def query(self, prefix: str) -> list[QueuedJob]:
        """Jobs whose name begins with `prefix`."""
        self._answer()
        return [self._describe(job) for job in self.jobs if job.request.name.startswith(prefix)]

    def cancel(self, job_ids: list[str], *, only_pending: bool = False) -> None:
        """End jobs: whole arrays by their base id, or single tasks."""
        self._answer()
        for job in [j for j in self.jobs if j.job_id in job_ids or j.base_id in job_ids]:
            if only_pending and job.state is JobState.RUNNING:
                continue
            if job.state is JobState.RUNNING and job.process is not None:
                process = job.process
                process.signal("told to stop")
                process.signal_program()
                self.at(self.habits.kill_wait_s, functools.partial(self.kill_process, process))
            if job.state is not JobState.ENDED:
                self.end_job(job, "CANCELLED")

    def repoint(self, job_id: str, after: tuple[str, ...]) -> None:
        """Let a pending job wait for something else."""
        self._answer()
        waiting = (JobState.PENDING, JobState.HELD)
        for job in self.jobs:
            if job.state in waiting and job_id in (job.job_id, job.base_id):
                job.after = after
        self.look_again()

    def was_cancelled(self, job_id: str) -> bool:
        """Whether the job was cancelled while it ran."""
        self._answer()
        job = self.find(job_id)
        return self.habits.tells_cancel and job is not None and job.raw == "CANCELLED"

    def requeue(self, job_id: str) -> bool:
        """`scontrol requeue`: everything is told to stop, and the job is pending again."""
        self._answer()
        job = self.find(job_id)
        is_running = job is not None and job.state is JobState.RUNNING
        if job is None or not is_running or job.process is None or not self.habits.can_requeue:
            return False
        process = job.process
        process.signal("requeued")
        process.signal_program()
        self.at(self.habits.kill_wait_s, lambda: self.kill_process(process))
        self.back_to_queue(job)
        return True

    # -- for those who look on ----------------------------------------------------------------

    def find(self, job_id: str) -> MemoryJob | None:
        """The job with this id, if the controller knows it."""
        return next((job for job in self.jobs if job.job_id == job_id), None)

    def live_jobs(self) -> list[MemoryJob]:
        """Jobs that have not ended."""
        return [job for job in self.jobs if job.state is not JobState.ENDED]

    def has_work(self) -> bool:
        """Whether any process, of a live job or not, is still alive."""
        return any(process.alive for process in self.processes)

    def look_again(self, delay_s: float = 0.0) -> None:
        """See in a while whether something can start."""
        self.at(max(delay_s, self.habits.start_delay_s), lambda: None)

    # -- jobs and processes -------------------------------------------------------------------

    def start_process(self, process: Process, life: Generator[float, None, int]) -> None:
        """Let `process` live; its first step comes with the next event."""
        process.life = life
        self.processes = [p for p in self.processes if p.alive] + [process]
        self.at(0.0, lambda: self._wake(process))

    def kill_process(self, process: Process) -> None:
        """SIGKILL to it and its program: nothing runs any more, not even a handler."""
        process.alive = False
        if process.program is not None:
            process.program.alive = False

    def back_to_queue(self, job: MemoryJob) -> None:
        """Pending again under the same id, for `requeue_delay_s` at least."""
        job.process, job.node = None, ""
        job.state, job.raw = JobState.PENDING, "PENDING"
        job.begin = self.now + self.habits.requeue_delay_s
        job.restarts += 1
        self.look_again(self.habits.requeue_delay_s)

    def end_job(self, job: MemoryJob, raw: str, exit_code: int | None = None) -> None:
        """The job is over, and soon forgotten. What it ran as may still be alive."""
        job.state, job.raw, job.exit_code = JobState.ENDED, raw, exit_code
        job.process = None
        self.at(self.habits.min_job_age_s, lambda: self._purge(job))
        self.look_again()

    def _purge(self, job: MemoryJob) -> None:
        if job in self.jobs and job.state is JobState.ENDED:
            self.jobs.remove(job)

    def _answer(self) -> None:
        if self.now < self.silent_until:
            raise SchedulerUnavailable("the controller does not answer")

    def _start_ready(self) -> None:
        for job in list(self.jobs):
            if job.state is JobState.PENDING and job.begin <= self.now and not self._waits_for(job):
                node = self._find_room(job)
                if node is not None:
                    self._start_job(job, node)

    def _waits_for(self, job: MemoryJob) -> bool:
        return any(self._is_live(job_id) for job_id in job.after if job_id != job.base_id)

    def _is_live(self, base_id: str) -> bool:
        return any(j.base_id == base_id and j.state is not JobState.ENDED for j in self.jobs)

    def _nodes_for(self, request: LinkRequest) -> dict[str, int]:
        return self.fallback_nodes if request.fallback and self.fallback_nodes else self.nodes

    def _find_room(self, job: MemoryJob) -> str | None:
        for node, room in self._nodes_for(job.request).items():
            if node in self.down_nodes or node in job.request.exclude:
                continue
            used = sum(
                other.node == node and not other.is_tick and other.state is JobState.RUNNING
                for other in self.jobs
            )
            if job.is_tick or used < room:
                return node
        return None

    def _start_job(self, job: MemoryJob, node: str) -> None:
        fault = self.start_faults.popleft() if self.start_faults and job.request.command else ""
        if fault == "held":
            job.state = JobState.HELD
            return
        if fault == "ended":
            job.started, job.node = self.now, node
            self.end_job(job, "NODE_FAIL", 1)
            return
        process = Process(self, name=job.request.name, node=node, job_id=job.job_id, task=job.task)
        process.command = job.request.command
        job.state, job.raw, job.node, job.process = JobState.RUNNING, "RUNNING", node, process
        job.started = self.now
        process.on_exit = lambda code: self._job_exits(job, process, code)
        self.start_process(process, self.program(process))
        limit, warning = self.habits.time_limit_s, self.habits.warning_s
        if limit is not None and not job.is_tick:
            self.at(max(0.0, limit - warning), lambda: process.signal("time limit"))
            self.at(limit, lambda: self._time_out(job, process))

    def _time_out(self, job: MemoryJob, process: Process) -> None:
        self.kill_process(process)
        if job.process is process:
            self.end_job(job, "TIMEOUT")

    def _job_exits(self, job: MemoryJob, process: Process, code: int) -> None:
        if job.process is process:  # or the job is somebody else's by now: a zombie ends unseen
            self.end_job(job, "COMPLETED" if code == 0 else "FAILED", code)

    def _wake(self, process: Process) -> None:
        """One step of a process, unless it is gone or in the middle of one (it stalls)."""
        if not process.alive or process.is_executing or process.life is None:
            return
        process.is_executing, ticket = True, process.ticket
        try:
            sleep_s = next(process.life)
        except StopIteration as end:
            process.leave(int(end.value or 0))
        except ProcessKilled:
            process.alive = False
        except Exception as error:  # a traceback is the end of a process, not of the cluster
            self.crashes.append((process, error))
            process.leave(1)
        else:
            if process.alive:
                was_signalled = process.ticket != ticket
                self._sleep(process, 0.0 if was_signalled else sleep_s)
        finally:
            process.is_executing = False

    def _sleep(self, process: Process, seconds: float) -> None:
        process.ticket += 1
        ticket = process.ticket
        self.at(seconds, lambda: self._wake(process) if process.ticket == ticket else None)

    def interrupt(self, process: Process) -> None:
        """A signal cuts a sleep short."""
        self._sleep(process, 0.0)

    def _describe(self, job: MemoryJob) -> QueuedJob:
        waits = job.state in (JobState.PENDING, JobState.HELD) and self._waits_for(job)
        reason = ""
        if job.state is JobState.HELD:
            reason = "launch failed requeued held"
        elif job.state is JobState.PENDING:
            late = job.begin > self.now
            reason = "Dependency" if waits else "BeginTime" if late else "Resources"
        return QueuedJob(
            job_id=job.job_id,
            name=job.request.name,
            state=job.state,
            reason=reason,
            after=tuple(job_id for job_id in job.after if self._is_live(job_id)) if waits else (),
            age_s=self.now - job.submitted,
            elapsed_s=self.now - job.started if job.state is JobState.RUNNING else 0.0,
            nodes=job.node,
            task=job.task,
            raw=job.raw,
        )
