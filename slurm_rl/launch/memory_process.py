"""What a process on the in-memory cluster sees: a file system and a scheduler of its own.

Every operation of theirs is an *effect*. The cluster's `before` is called first, so that a process
can be killed between any two effects, or stalled there while the rest of the cluster goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from slurm_rl.chain.scheduler import LinkRequest, QueuedJob
from slurm_rl.storage.fs import Fs

if TYPE_CHECKING:
    from slurm_rl.launch.memory import MemoryCluster

#: Effects that change nothing: a kill before one is a kill before the next that does.
READS = ("read", "list", "size", "now", "query")

Program = Callable[["Process"], Generator[float, None, int]]


class ProcessKilled(BaseException):
    """The process is gone. Not an Exception: no handler of its own may run."""


class Effect(NamedTuple):
    """One operation about to happen. `target` is a path, a job's name or job ids."""

    number: int
    op: str
    target: str

    @property
    def is_write(self) -> bool:
        return self.op not in READS


@dataclass
class Process:
    """A process: of a job, of an earlier life of that job (a zombie), or of a person's shell.

    on_stop:      called with the reason when the batch process gets a signal.
    on_terminate: called when the program (the payload) gets SIGTERM.
    program:      the process that the program runs as, beside this one; it outlives this one only
                  where nobody is left to end it.
    ticket:       changes whenever a sleep ends; a stale wake-up is told by it.
    """

    cluster: MemoryCluster
    name: str = "shell"
    node: str = "login"
    job_id: str = ""
    task: int | None = None
    command: tuple[str, ...] = ()
    on_stop: Callable[[str], None] | None = None
    on_terminate: Callable[[], None] | None = None
    on_exit: Callable[[int], None] | None = None
    program: Process | None = None
    life: Generator[float, None, int] | None = None
    alive: bool = True
    is_executing: bool = False
    ticket: int = 0
    exit_code: int | None = None
    effects: int = field(default=0)

    def fs(self) -> Fs:
        """The shared file system as this process sees it."""
        return ProcessFs(self, self.cluster.view(self, self.cluster.fs))

    def scheduler(self, run_name: str) -> ProcessScheduler:
        """The scheduler as this process sees it, for jobs of one run."""
        return ProcessScheduler(self, run_name)

    def effect(self, op: str, target: str) -> None:
        """Announce an effect; raises ProcessKilled if the process does not live to see it."""
        self._check()
        self.effects += 1
        if self.cluster.before is not None:
            self.cluster.before(self, Effect(self.effects, op, target))
        self._check()

    def signal(self, reason: str) -> None:
        """A signal to the batch process."""
        if self.alive and self.on_stop is not None:
            self.on_stop(reason)
            self.cluster.interrupt(self)

    def signal_program(self) -> None:
        """SIGTERM to the program alone, as a preemption sends it on a default site."""
        if self.alive and self.on_terminate is not None:
            self.on_terminate()

    def leave(self, code: int) -> None:
        """The process ends by itself, and what it started with it."""
        self.alive, self.exit_code = False, code
        if self.program is not None:
            self.program.alive = False
        if self.on_exit is not None:
            self.on_exit(code)

    def _check(self) -> None:
        if not self.alive:
            raise ProcessKilled(self.name)


@dataclass(frozen=True)
class ProcessFs:
    """Implements `Fs`: announces every operation, then lets the real one do it."""

    process: Process
    inner: Fs

    def create(self, path: Path, data: bytes) -> None:
        self.process.effect("create", str(path))
        self.inner.create(path, data)

    def append(self, path: Path, data: bytes) -> None:
        self.process.effect("append", str(path))
        self.inner.append(path, data)

    def fsync(self, path: Path) -> None:
        self.process.effect("fsync", str(path))
        self.inner.fsync(path)

    def fsync_dir(self, path: Path) -> None:
        self.process.effect("fsync_dir", str(path))
        self.inner.fsync_dir(path)

    def link(self, source: Path, target: Path) -> None:
        self.process.effect("link", str(target))
        self.inner.link(source, target)

    def rename(self, source: Path, target: Path) -> None:
        self.process.effect("rename", str(target))
        self.inner.rename(source, target)

    def unlink(self, path: Path) -> None:
        self.process.effect("unlink", str(path))
        self.inner.unlink(path)

    def rmdir(self, path: Path) -> None:
        self.process.effect("rmdir", str(path))
        self.inner.rmdir(path)

    def mkdir(self, path: Path) -> None:
        self.process.effect("mkdir", str(path))
        self.inner.mkdir(path)

    def read(self, path: Path) -> bytes:
        self.process.effect("read", str(path))
        return self.inner.read(path)

    def list(self, path: Path) -> list[str]:
        self.process.effect("list", str(path))
        return self.inner.list(path)

    def size(self, path: Path) -> int:
        self.process.effect("size", str(path))
        return self.inner.size(path)

    def now(self, folder: Path) -> float:
        self.process.effect("now", str(folder))
        return self.inner.now(folder)


@dataclass(frozen=True)
class ProcessScheduler:
    """Implements `Scheduler` for the jobs of one run."""

    process: Process
    run_name: str

    def submit(self, request: LinkRequest) -> str:
        self.process.effect("submit", request.name)
        return self.process.cluster.submit(request)

    def query(self) -> list[QueuedJob]:
        self.process.effect("query", self.run_name)
        return self.process.cluster.query(f"{self.run_name}.")

    def cancel(self, job_ids: list[str], *, only_pending: bool = False) -> None:
        self.process.effect("cancel", ",".join(job_ids))
        self.process.cluster.cancel(job_ids, only_pending=only_pending)

    def repoint(self, job_id: str, after: tuple[str, ...]) -> None:
        self.process.effect("repoint", job_id)
        self.process.cluster.repoint(job_id, after)

    def was_cancelled(self, job_id: str) -> bool:
        self.process.effect("was_cancelled", job_id)
        return self.process.cluster.was_cancelled(job_id)

    def requeue(self, job_id: str) -> bool:
        self.process.effect("requeue", job_id)
        return self.process.cluster.requeue(job_id)
