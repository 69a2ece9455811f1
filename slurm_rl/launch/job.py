"""The process of a job: `python -m slurm_rl.launch.job link RUN INTENT NAME [SIGNAL_S]`, or
`… tick RUN NAME`.

Under Slurm it is the batch process itself (the job's script execs it), so that it receives what
`--signal=B:…` sends. It drives the supervisor's generator with real time and real signals.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from slurm_rl.chain.gc import collect_quietly
from slurm_rl.chain.graph import Graph, Link
from slurm_rl.config.derive import stage_signal_s, stage_time_s
from slurm_rl.config.schema import Settings
from slurm_rl.config.stages import stage_kinds
from slurm_rl.errors import CorruptError, SlurmRlError, StorageError
from slurm_rl.launch import local
from slurm_rl.launch.build import OpenRun, make_timing, open_run
from slurm_rl.launch.duty import TIME_LIMIT, Job
from slurm_rl.launch.payload import StageRunner
from slurm_rl.launch.shape import fits
from slurm_rl.launch.stage_settings import find_stage_settings
from slurm_rl.launch.supervisor import EXIT_UNFINISHED, Supervisor
from slurm_rl.launch.tick import tick_life
from slurm_rl.storage.intents import POOL_FOLDER
from slurm_rl.storage.owner import share_with_group
from slurm_rl.storage.rundir import write_copies
from slurm_rl.storage.space import check_stage_space

logger = logging.getLogger("slurm_rl.launch.job")

_STOP_REASONS = {
    signal.SIGTERM: "told to stop",
    signal.SIGINT: "interrupted",
    signal.SIGUSR1: TIME_LIMIT,
}
#: First word -> module and function: jobs by which `slurm-rl doctor` looks at the site.
_DOCTOR_JOBS = {
    "probe": ("slurm_rl.launch.probe_node", "run_probe"),
    "check": ("slurm_rl.launch.stage_check", "run_check_job"),
}
_END_TIME = "SLURM_JOB_END_TIME"
#: Slurm sends the warning up to a minute early, and acts on its limits every half minute.
_SIGNAL_EARLY_S = 120.0


def main(argv: list[str]) -> int:
    """Run a link or a tick; the exit status is 0 only if the link's commit exists."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname).1s %(message)s", stream=sys.stdout
    )
    spool = os.environ.get(local.SPOOL_VARIABLE)
    try:
        if spool:
            local.wait_turn(Path(spool))
        if argv[0] == "tick":
            return _run_tick(Path(argv[1]), argv[2])
        if argv[0] in _DOCTOR_JOBS:
            return _run_doctor_job(argv)
        return _run_link(Path(argv[1]), argv[2], argv[3], argv[4:])
    except SlurmRlError as error:
        logger.error("%s", error)
        return error.exit_code
    except OSError as error:
        logger.error("%s", error)
        return StorageError.exit_code


def _run_doctor_job(argv: list[str]) -> int:
    """A job of `slurm-rl doctor`: it belongs to no run's chain, and claims nothing."""
    module, name = _DOCTOR_JOBS[argv[0]]
    program: Callable[[list[str]], int] = getattr(importlib.import_module(module), name)
    return program(argv[1:])


def _open(root: Path) -> OpenRun:
    """The run, for a job of it."""
    opened = open_run(root, in_job=True)
    share_with_group(opened.settings.run.group)
    return opened


def _run_tick(root: Path, name: str) -> int:
    opened = _open(root)
    collect = functools.partial(collect_quietly, opened.keeper)
    life = tick_life(opened.chain, name, collect=collect)
    while True:
        try:
            time.sleep(next(life))
        except StopIteration as end:
            return int(end.value)


def _run_link(root: Path, intent: str, name: str, signal_s: Sequence[str]) -> int:
    """`signal_s`: the warning before the time limit that was asked for, if it was learnt."""
    opened = _open(root)
    if not opened.run.settings_path.exists():
        write_copies(opened.run, opened.identity)
    job = make_job(opened.chain.graph, root / intent, name, dict(os.environ))
    if job.link.anchor.is_eval and not opened.chain.graph.has_eval(job.link.anchor):
        logger.info("%s: there is no such evaluation any more", job.link.anchor)
        return EXIT_UNFINISHED
    asked_s = float(signal_s[0]) if signal_s else None
    env = with_end_time(opened, job, os.environ)
    _stop_on_signals(job, opened.settings, env, asked_s)
    supervisor = make_supervisor(opened, job, env)
    supervisor.intent = root / intent
    return drive(supervisor, job)


def make_job(graph: Graph, intent: Path, name: str, env: dict[str, str]) -> Job:
    """What this process is, from its name and the scheduler's environment."""
    folder = intent.parent
    if folder.name.startswith(POOL_FOLDER):
        folder = folder.parent
    iteration, label = int(folder.parent.name), name.split(".")[-2]
    link = next((link for link in graph.links(iteration) if link.label == label), None)
    if link is None:
        # An evaluation; or the run was made with another packing: the job does what its intent
        # lies with.
        link = Link(iteration, (folder.name.partition(".")[0],))
    task = env.get("SLURM_ARRAY_TASK_ID")
    job_id = env.get("SLURM_JOB_ID", "")
    if task is not None:
        job_id = f"{env.get('SLURM_ARRAY_JOB_ID', job_id)}_{task}"
    spool = env.get(local.SPOOL_VARIABLE)
    if spool:
        entry = local.read_entry(Path(spool))
        if entry is None:
            raise CorruptError(f"{spool}: the job's own entry is gone")
        return Job(name, link, entry.task, entry.job_id)
    return Job(name, link, None if task is None else int(task), job_id)


def with_end_time(opened: OpenRun, job: Job, env: Mapping[str, str]) -> dict[str, str]:
    """The environment, with the job's end in it: older versions of Slurm are asked for it."""
    known = dict(env)
    if opened.settings.launcher == "slurm" and _END_TIME not in known and job.job_id:
        from slurm_rl.launch.slurm import SlurmScheduler

        end = SlurmScheduler(opened.settings, opened.identity.name).read_end_time(job.job_id)
        if end is not None:
            known[_END_TIME] = str(end)
    return known


def make_supervisor(opened: OpenRun, job: Job, env: Mapping[str, str]) -> Supervisor:
    settings = opened.settings
    started, kind = time.time(), job.link.job_kind
    kinds = [kind for kind in stage_kinds(settings) if kind != "tick"]
    return Supervisor(
        chain=opened.chain,
        job=job,
        runner=StageRunner(),
        run_id=opened.identity.run_id,
        settle=functools.partial(find_stage_settings, opened.run, opened.identity),
        timing=make_timing(settings),
        monotonic=time.monotonic,
        fits=lambda need: fits(settings, have=kind, need=need),
        left_s=functools.partial(left_of_job, settings, kind, env, started),
        check_space=functools.partial(check_stage_space, opened.run, settings),
        deadlines={kind: settings.stage(kind).deadline_s for kind in kinds},
    )


def drive(supervisor: Supervisor, job: Job) -> int:
    """Run the supervisor in real time; a signal cuts a sleep short."""
    life = supervisor.run()
    while True:
        try:
            wait_s = next(life)
        except StopIteration as end:
            return int(end.value)
        deadline = time.monotonic() + wait_s
        had_stop = bool(job.stop)
        while (left := deadline - time.monotonic()) > 0 and bool(job.stop) == had_stop:
            time.sleep(min(left, 0.2))


def left_of_job(settings: Settings, kind: str, env: Mapping[str, str], started: float) -> float:
    """Seconds until the job's time limit; infinity where there is none that we know of.

    started: when this process began, by the clock of this machine, as is the answer.
    """
    now = time.time()
    if _END_TIME in env:
        return float(env[_END_TIME]) - now
    limit_s = stage_time_s(settings, kind)
    return math.inf if limit_s is None else started + limit_s - now


def _stop_on_signals(
    job: Job, settings: Settings, env: Mapping[str, str], signal_s: float | None = None
) -> None:
    """Note why the job must end soon. USR1 is the warning before the time limit; but a site with
    `preempt_send_user_signal` sends it at a preemption too."""
    started, kind = time.time(), job.link.job_kind
    near_s = (signal_s or stage_signal_s(settings, kind)) + _SIGNAL_EARLY_S

    def stop(number: int, frame: FrameType | None) -> None:
        reason = _STOP_REASONS[signal.Signals(number)]
        if number == signal.SIGUSR1 and left_of_job(settings, kind, env, started) > near_s:
            reason = "told to stop"
        job.stop = job.stop or reason

    for number in _STOP_REASONS:
        signal.signal(number, stop)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
