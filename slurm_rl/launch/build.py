"""From a run directory to what works on it: settings, graph, scheduler, chain."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from slurm_rl.chain.advance import Ask, Chain
from slurm_rl.chain.gc import Keeper
from slurm_rl.chain.graph import build_graph
from slurm_rl.chain.scheduler import Scheduler
from slurm_rl.chain.view import Spec
from slurm_rl.config.derive import (
    AUTO,
    asked_signal_s,
    num_gpus,
    parse_instant,
    parse_wall_time,
    stage_fallback,
    stage_slurm,
    stage_time_s,
)
from slurm_rl.config.pools import job_kinds
from slurm_rl.config.schema import Chain as ChainSettings
from slurm_rl.config.schema import Settings
from slurm_rl.launch.duty import Timing
from slurm_rl.launch.stage_settings import parse_settings
from slurm_rl.storage.control import read_control
from slurm_rl.storage.owner import current_user, owner_of
from slurm_rl.storage.rundir import RunDir, RunIdentity, filesystem_now, read_identity


@dataclass(frozen=True)
class OpenRun:
    """A run that exists, ready to be looked at or moved on.

    settings:   the newest ones.
    may_submit: whether this process may submit jobs of it.
    in_job:     whether this is a process of a job.
    """

    run: RunDir
    identity: RunIdentity
    settings: Settings
    may_submit: bool = True
    in_job: bool = False

    @functools.cached_property
    def chain(self) -> Chain:
        settings = self.settings
        return Chain(
            run=self.run,
            graph=build_graph(settings),
            spec=make_spec(settings, self.identity.short_id),
            scheduler=make_scheduler(settings, self.run),
            clock=functools.partial(filesystem_now, self.run),
            exact_clock=functools.partial(self.run.fs.now, self.run.control_dir),
            asks=make_asks(settings),
            may_submit=self.may_submit,
            renew=lambda: open_run(self.run.root, in_job=self.in_job).chain,
        )

    @functools.cached_property
    def keeper(self) -> Keeper:
        rules, name = self.settings.retention, f"{self.identity.name}-{self.identity.run_id}"
        return Keeper(
            run=self.run,
            graph=self.chain.graph,
            rules=rules,
            window=self.settings.chain.window,
            clock=self.chain.clock,
            archive=None if rules.archive is None else Path(rules.archive) / name,
        )


def open_run(root: Path, *, in_job: bool = False) -> OpenRun:
    """The run at `root`. Raises NoRunError, FormatError or CorruptError.

    A process submits nothing once another has the run, nor in a job where only login nodes may.
    """
    run = RunDir(root.absolute())
    identity = read_identity(run)
    control = read_control(run)
    settings = parse_settings(identity, control)
    is_ours = owner_of(identity, control) == current_user()
    may_submit = is_ours and (settings.submit_from == "anywhere" or not in_job)
    return OpenRun(run, identity, settings, may_submit, in_job)


def make_asks(settings: Settings) -> dict[str, Ask]:
    """What the jobs of each stage kind leave to be learnt, and within which limit."""
    if settings.launcher != "slurm":
        return {}
    asks = {}
    for kind in job_kinds(settings):
        is_auto = stage_slurm(settings, kind).get("time") == AUTO
        signal_s = asked_signal_s(settings, kind)
        if kind != "tick" and (is_auto or signal_s is None):
            asks[kind] = Ask(is_auto, stage_time_s(settings, kind), signal_s)
    return asks


def make_spec(settings: Settings, short_id: str) -> Spec:
    chain = settings.chain
    return Spec(
        run_name=settings.run.name,
        short_id=short_id,
        window=chain.window,
        max_attempts=chain.max_attempts,
        submit_deadline_s=chain.submit_deadline_s,
        retry_delay_s=chain.retry_delay_s,
        tick_s=chain.tick_s,
        # A local run is watched by whoever started it; elsewhere ticks need sbatch on the nodes.
        ticks=settings.launcher == "slurm" and settings.submit_from == "anywhere",
        max_submit_jobs=settings.max_submit_jobs,
        max_stops=chain.max_stops,
        exclude_s=chain.exclude_s if settings.launcher == "slurm" else 0.0,
        fallbacks=_fallbacks(settings),
        gpus=tuple((kind, num_gpus(settings, kind)) for kind in job_kinds(settings)),
        gpu_hours=chain.budget.gpu_hours,
        until=None if chain.budget.until is None else parse_instant(chain.budget.until),
        submits=settings.submit_from == "anywhere",
        lease_s=chain.lease_s,
        poll_s=settings.score.poll_s,
        serial=settings.launcher == "local",
    )


def _fallbacks(settings: Settings) -> tuple[tuple[str, float], ...]:
    found = []
    for kind in job_kinds(settings):
        fallback = stage_fallback(settings, kind)
        after_s = None if fallback is None else parse_wall_time(fallback.after)
        if after_s is not None and kind != "tick" and settings.launcher == "slurm":
            found.append((kind, float(after_s)))
    return tuple(found)


def make_scheduler(settings: Settings, run: RunDir) -> Scheduler:
    """The scheduler that the settings name. submitit is imported only where Slurm is used."""
    if settings.launcher == "local":
        from slurm_rl.launch.local import LocalScheduler

        return LocalScheduler(run, settings.run.name)
    from slurm_rl.launch.slurm import SlurmScheduler

    return SlurmScheduler(settings, settings.run.name)


def make_timing(settings: Settings) -> Timing:
    """How long a supervisor waits for what; the shorter retries are, the shorter these."""
    chain = settings.chain
    haste = min(1.0, chain.retry_delay_s / ChainSettings().retry_delay_s)
    return Timing(
        lease_s=chain.lease_s,
        heartbeat_s=chain.heartbeat_s,
        wait_s=10 * chain.lease_s,
        work_again=tuple(haste * wait_s for wait_s in Timing().work_again),
        publish_again=tuple(haste * wait_s for wait_s in Timing().publish_again),
    )
