"""The local launcher: jobs as processes of this machine, for people without a cluster.

A job is a detached process that waits for its turn and then runs the same supervisor as under
Slurm. The queue is a folder of small files, `<run>/scheduler/jobs/<token>.json`; a job is live
while its process is, and process ids that come round again are told apart by their start time.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from slurm_rl.chain.scheduler import JobState, LinkRequest, QueuedJob, token_of
from slurm_rl.errors import SchedulerError
from slurm_rl.launch.environment import scrub_environment
from slurm_rl.storage.durable import write_hint
from slurm_rl.storage.rundir import RunDir

#: Names the job's own entry; set for the child by `submit`.
SPOOL_VARIABLE = "SLURM_RL_LOCAL_JOB"
_APPEAR_S = 20.0
_POLL_S = 0.05
#: How long a job that is over is still shown.
_MIN_JOB_AGE_S = 300.0


@dataclass(frozen=True, slots=True)
class SpoolEntry:
    """One local job. `after` names other entries by job id.

    place: host, boot and process namespace; processes of another one cannot be looked at.
    """

    job_id: str
    name: str
    pid: int
    started: str
    submitted: float
    after: tuple[str, ...] = ()
    begin: float = 0.0
    task: int | None = None
    place: str = ""


@dataclass(frozen=True)
class LocalScheduler:
    """Implements `Scheduler` on processes."""

    run: RunDir
    run_name: str

    @property
    def jobs_dir(self) -> Path:
        return self.run.scheduler_dir / "jobs"

    def submit(self, request: LinkRequest) -> str:
        """Start the job's process (one per shard); it waits for its turn by itself."""
        self.run.fs.mkdir(self.jobs_dir)
        token = token_of(request.name)
        tasks: list[int | None] = list(request.shards) or [None]
        for task in tasks:
            self._start(request, token, task)
        return token

    def _start(self, request: LinkRequest, token: str, task: int | None) -> None:
        job_id = token if task is None else f"{token}_{task}"
        path = self.jobs_dir / f"{job_id}.json"
        env = scrub_environment(os.environ) | {SPOOL_VARIABLE: str(path)}
        argv = [sys.executable, "-m", "slurm_rl.launch.job", *request.command]
        Path(request.log).parent.mkdir(parents=True, exist_ok=True)
        with open(f"{request.log}.{job_id}.log", "ab") as log:
            child = subprocess.Popen(
                argv,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        now = time.time()
        entry = SpoolEntry(
            job_id=job_id,
            name=request.name,
            pid=child.pid,
            started=process_start(child.pid),
            submitted=now,
            after=request.after,
            begin=now + (request.begin_s or 0.0),
            task=task,
            place=this_place(),
        )
        write_hint(path, json.dumps(asdict(entry)).encode(), fs=self.run.fs)

    def query(self) -> list[QueuedJob]:
        jobs = []
        for entry in self.entries():
            if is_elsewhere(entry):
                raw = f"on {entry.place.partition(' ')[0]}"
                unknown = JobState.UNKNOWN
                jobs.append(QueuedJob(entry.job_id, entry.name, unknown, task=entry.task, raw=raw))
                continue
            if not is_alive(entry):
                jobs += self._describe_ended(entry)
                continue
            delay_s = max(0.0, entry.begin - time.time())
            running = (self.jobs_dir / f"{entry.job_id}.running").exists()
            jobs.append(
                QueuedJob(
                    job_id=entry.job_id,
                    name=entry.name,
                    state=JobState.RUNNING if running else JobState.PENDING,
                    reason="BeginTime" if delay_s and not running else "",
                    after=() if running else tuple(entry.after),
                    age_s=time.time() - entry.submitted,
                    elapsed_s=time.time() - entry.submitted if running else 0.0,
                    nodes="localhost" if running else "",
                    task=entry.task,
                    raw="RUNNING" if running else "PENDING",
                    begins_in_s=0.0 if running else delay_s,
                )
            )
        return jobs

    def _describe_ended(self, entry: SpoolEntry) -> list[QueuedJob]:
        """A job that is over: shown for a while, as Slurm does, then forgotten."""
        if time.time() - entry.submitted > _MIN_JOB_AGE_S:
            forget(self.jobs_dir / f"{entry.job_id}.json")
            return []
        ended = JobState.ENDED
        age_s = time.time() - entry.submitted
        return [
            QueuedJob(entry.job_id, entry.name, ended, age_s=age_s, task=entry.task, raw="ENDED")
        ]

    def cancel(self, job_ids: list[str], *, only_pending: bool = False) -> None:
        """End jobs: a waiting one at once, a running one by SIGTERM to its supervisor."""
        for entry in self.entries():
            if entry.job_id.partition("_")[0] in job_ids or entry.job_id in job_ids:
                has_begun = (self.jobs_dir / f"{entry.job_id}.running").exists()
                if is_alive(entry) and not (only_pending and has_begun):
                    os.kill(entry.pid, signal.SIGTERM)

    def repoint(self, job_id: str, after: tuple[str, ...]) -> None:
        for entry in self.entries():
            if entry.job_id.partition("_")[0] == job_id:
                changed = SpoolEntry(**{**asdict(entry), "after": after})
                path = self.jobs_dir / f"{entry.job_id}.json"
                write_hint(path, json.dumps(asdict(changed)).encode(), fs=self.run.fs)

    def was_cancelled(self, job_id: str) -> bool:
        return False  # a signal says nothing about who sent it

    def requeue(self, job_id: str) -> bool:
        return False  # a process that ends is gone; the next advance submits another

    def entries(self) -> list[SpoolEntry]:
        """Every entry that can be read, oldest first."""
        found = []
        for name in self.run.fs.list(self.jobs_dir):
            if name.endswith(".json"):
                entry = read_entry(self.jobs_dir / name)
                if entry is not None:
                    found.append(entry)
        return sorted(found, key=lambda entry: entry.submitted)


def wait_turn(spool: Path) -> None:
    """In a job's process: wait until what it depends on has ended and its time has come."""
    deadline = time.monotonic() + _APPEAR_S
    while read_entry(spool) is None:
        if time.monotonic() > deadline:
            raise SchedulerError(f"{spool}: the submission was not completed")
        time.sleep(_POLL_S)
    while True:
        entry = read_entry(spool)
        if entry is None:
            raise SchedulerError(f"{spool}: taken out of the queue")
        if time.time() >= entry.begin and not _is_waiting(spool.parent, entry.after):
            break
        time.sleep(_POLL_S)
    spool.with_suffix(".running").touch()


def forget(spool: Path) -> None:
    """Take an ended job out of the queue."""
    spool.unlink(missing_ok=True)
    spool.with_suffix(".running").unlink(missing_ok=True)


def read_entry(path: Path) -> SpoolEntry | None:
    """The entry at `path`; None if it is not there (yet, or any more)."""
    try:
        return SpoolEntry(**json.loads(path.read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def this_place() -> str:
    """Where a process id means something: `host boot-id process-namespace`."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"


def is_elsewhere(entry: SpoolEntry) -> bool:
    """Whether the job is of another machine, or of another container of this one.

    One of an earlier boot of this machine is not: it has ended.
    """
    theirs, ours = entry.place.split(" "), this_place().split(" ")
    if theirs[0] != ours[0]:
        return True
    return theirs[:2] == ours[:2] and theirs != ours


def is_alive(entry: SpoolEntry) -> bool:
    """Whether the job's process is the one that was started, and has not ended."""
    same_boot = entry.place == this_place()
    return same_boot and bool(entry.started) and process_start(entry.pid) == entry.started


def process_start(pid: int) -> str:
    """When a process started, in clock ticks since boot; empty if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


def _is_waiting(jobs_dir: Path, after: tuple[str, ...]) -> bool:
    paths = [path for job_id in after for path in jobs_dir.glob(f"{job_id}*.json")]
    entries = [read_entry(path) for path in paths]
    return any(entry is not None and is_alive(entry) for entry in entries)
