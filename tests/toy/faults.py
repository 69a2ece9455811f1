"""Faults for runs of a `World`: one thing that goes wrong just before one effect."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from slurm_rl.chain.scheduler import JobState
from slurm_rl.launch import memory_faults
from slurm_rl.launch.memory import MemoryCluster, MemoryJob
from slurm_rl.launch.memory_process import Effect, Process

Fault = Callable[[MemoryCluster, Process], None]


def job_of(cluster: MemoryCluster, process: Process) -> MemoryJob | None:
    """The job that a process, or what it is the program of, is the present life of."""
    return next(
        (j for j in cluster.jobs if j.process and process in (j.process, j.process.program)), None
    )


def kill_life(cluster: MemoryCluster, job: MemoryJob) -> None:
    """What a job runs as is gone, without the controller's knowing."""
    if job.process is not None:
        cluster.kill_process(job.process)


def kill(cluster: MemoryCluster, process: Process) -> None:
    """The process ends here and now; so does its job, if it has one."""
    job = job_of(cluster, process)
    if job is not None:
        memory_faults.kill(cluster, job)
    cluster.kill_process(process)


def kill_and_requeue(cluster: MemoryCluster, process: Process) -> None:
    """As a lost node, or a preemption without grace."""
    job = job_of(cluster, process)
    if job is not None:
        memory_faults.kill(cluster, job, requeue=True)
    cluster.kill_process(process)


def preempt(cluster: MemoryCluster, process: Process) -> None:
    job = job_of(cluster, process)
    if job is not None:
        memory_faults.preempt(cluster, job)


def split_brain(stall_s: float, *, requeue: bool = True) -> Fault:
    """The job is given up, the process lives on: stalled here for a while, then as if nothing."""

    def happen(cluster: MemoryCluster, process: Process) -> None:
        job = job_of(cluster, process)
        if job is not None:
            memory_faults.split_brain(cluster, job, requeue=requeue)
        cluster.run_for(stall_s)

    return happen


def stall(seconds: float) -> Fault:
    """The process hangs here (a slow file system, a stopped node) while all else goes on."""

    def happen(cluster: MemoryCluster, process: Process) -> None:
        cluster.run_for(seconds)

    return happen


def next_submission(fault: str) -> Fault:
    """The next submission is `refused`, `lost`, or `made` in spite of a timeout."""

    def happen(cluster: MemoryCluster, process: Process) -> None:
        cluster.submit_faults.append(fault)

    return happen


def controller_forgets(*, reissue: bool, stranger_s: float = 0.0) -> Fault:
    """What was submitted in the last seconds is gone; a stranger may get the ids."""

    def happen(cluster: MemoryCluster, process: Process) -> None:
        lost = memory_faults.crash_controller(cluster, within_s=2.0, reissue=reissue)
        if lost and stranger_s:
            memory_faults.submit_stranger(cluster, runs_s=stranger_s)

    return happen


def controller_is_silent(seconds: float) -> Fault:
    def happen(cluster: MemoryCluster, process: Process) -> None:
        memory_faults.silence(cluster, seconds)

    return happen


def hold_pending(cluster: MemoryCluster, process: Process) -> None:
    """Every pending job of the chain is held, as after a failed prolog."""
    for job in cluster.live_jobs():
        if job.state is JobState.PENDING and not job.is_tick:
            memory_faults.hold(cluster, job)


@dataclass
class At:
    """Lets each fault happen just before its effect, once. `log` says what happened where."""

    faults: dict[int, Fault]
    count: int = 0
    log: list[str] = field(default_factory=list)

    def __call__(self, process: Process, effect: Effect) -> None:
        self.count += 1
        fault = self.faults.pop(self.count, None)
        if fault is not None:
            self.log.append(f"{self.count}: {process.name} {effect.op} {effect.target}")
            fault(process.cluster, process)


def site(process: Process, effect: Effect) -> tuple[str, str, str]:
    """Where in the code an effect is, about: who does what to which kind of name."""
    who = (process.command or ("shell",))[0]
    target = re.sub(r"-[0-9a-f]{8,12}(?=/|$)", "", effect.target.rpartition("/toy/")[2])
    target = re.sub(r"iterations/\d+", "iterations/N", re.sub(r"\.abcdef[0-9a-f]{6}", "", target))
    return who, effect.op, re.sub(r"\d+", "N", target) if who == "shell" else target


def first_of_each(
    effects: Iterable[tuple[Process, Effect]], *, of: Callable[[Effect], bool]
) -> list[int]:
    """Numbers (from 1) of the effects that are the first at their site."""
    seen, numbers = set(), []
    for number, (process, effect) in enumerate(effects, 1):
        place = site(process, effect)
        if of(effect) and place not in seen:
            seen.add(place)
            numbers.append(number)
    return numbers
