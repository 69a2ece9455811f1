"""A stage in this very process's machine, without a job: for a person who waits for it.

It claims, works and commits as a job would, by the same supervisor; jobs that are queued for the
same stage find it claimed, and later committed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from slurm_rl.config.schema import Settings
from slurm_rl.launch.build import OpenRun
from slurm_rl.launch.duty import Job
from slurm_rl.launch.job import drive, make_supervisor
from slurm_rl.launch.payload import LocalPayload, LocalRunner
from slurm_rl.storage.intents import new_job_token
from slurm_rl.types import StageRef, parse_order


@dataclass(frozen=True)
class HereRunner:
    """Starts a program as child processes, whatever the run's launcher is."""

    def start(self, order_path: Path, *, kind: str) -> LocalPayload:
        order = parse_order(order_path.read_bytes())
        settings = Settings.model_validate_json(Path(order.settings_path).read_bytes())
        return LocalRunner(settings).start(order_path, kind=kind)


def run_here(opened: OpenRun, ref: StageRef) -> int:
    """Do the stage; 0 if it has its commit then."""
    link = opened.chain.graph.links_of(ref)[0]  # evaluations and scores are one job's
    name = link.job_name(opened.identity.name, new_job_token(opened.identity.short_id))
    job = Job(name, link)
    supervisor = make_supervisor(opened, job, {})
    supervisor.runner = HereRunner()
    supervisor.left_s = lambda: math.inf
    return drive(supervisor, job)
