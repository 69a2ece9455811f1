"""From a run directory to what works on it: settings, graph, scheduler, chain."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from slurm_rl.chain.advance import Chain
from slurm_rl.chain.graph import build_graph
from slurm_rl.chain.plan import Spec
from slurm_rl.chain.scheduler import Scheduler
from slurm_rl.config.derive import settings_digest
from slurm_rl.config.schema import Settings
from slurm_rl.errors import FormatError
from slurm_rl.launch.supervisor import Timing
from slurm_rl.storage.rundir import RunDir, RunIdentity, filesystem_now, read_identity


@dataclass(frozen=True)
class OpenRun:
    """A run that exists, ready to be looked at or moved on."""

    run: RunDir
    identity: RunIdentity
    settings: Settings

    @functools.cached_property
    def settings_digest(self) -> str:
        return settings_digest(self.settings)

    @functools.cached_property
    def chain(self) -> Chain:
        settings = self.settings
        return Chain(
            run=self.run,
            graph=build_graph(settings),
            spec=make_spec(settings, self.identity.short_id),
            scheduler=make_scheduler(settings, self.run),
            clock=functools.partial(filesystem_now, self.run),
        )

    @property
    def code_dir(self) -> str:
        digest = self.identity.code_digest
        return str(self.run.code_dir(digest)) if digest else ""


def open_run(root: Path) -> OpenRun:
    """The run at `root`. Raises NoRunError, FormatError or CorruptError."""
    run = RunDir(root.absolute())
    identity = read_identity(run)
    return OpenRun(run, identity, parse_settings(identity))


def parse_settings(identity: RunIdentity) -> Settings:
    """The settings that the run was made with; what did not exist then has its default.

    Raises FormatError if there is one that this slurm-rl does not know.
    """
    try:
        return Settings.model_validate_json(json.dumps(identity.settings))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise FormatError(
            f"run.json: settings.{where} means nothing to this slurm-rl",
            hint=f"use slurm-rl {identity.code_version or 'of the run'}, which made the run",
        ) from error


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
    )


def make_scheduler(settings: Settings, run: RunDir) -> Scheduler:
    """The scheduler that the settings name. submitit is imported only where Slurm is used."""
    if settings.launcher == "local":
        from slurm_rl.launch.local import LocalScheduler

        return LocalScheduler(run, settings.run.name)
    from slurm_rl.launch.slurm import SlurmScheduler

    return SlurmScheduler(settings, settings.run.name)


def make_timing(settings: Settings) -> Timing:
    chain = settings.chain
    return Timing(lease_s=chain.lease_s, heartbeat_s=chain.heartbeat_s, wait_s=10 * chain.lease_s)
