"""How a job that was told to stop leaves: back to the queue by itself, unless it was cancelled.

A person who cancels a running job pauses the run; an evaluation's, gives that up.

It decides nothing about stages: whatever happens here, the next job goes on from disk.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from typing import TYPE_CHECKING

from slurm_rl.chain.observe import read_queue
from slurm_rl.errors import SchedulerError
from slurm_rl.launch.duty import TIME_LIMIT
from slurm_rl.storage.claims import read_claims
from slurm_rl.storage.control import read_control, write_pause
from slurm_rl.storage.evals import GivenUp, publish_given_up
from slurm_rl.storage.intents import is_cancelled, read_intents
from slurm_rl.types import Slot

if TYPE_CHECKING:
    from slurm_rl.launch.supervisor import Supervisor

logger = logging.getLogger(__name__)

#: How long a requeued job waits for Slurm to end it.
_REQUEUE_WAIT_S = 120.0


def leave(supervisor: Supervisor) -> Generator[float, None, None]:
    """Go back to the queue by itself; never with exit status 0.

    On a default site a preemption reaches the program only, so its end is what tells us. A
    `scancel` looks the same but for the job's state: that pauses the run.
    """
    job, chain = supervisor.job, supervisor.chain
    if not job.job_id:
        return
    if job.stop == TIME_LIMIT and _may_ask_for_more_time(supervisor):
        supervisor.advance(leaving=True)  # a requeue would have the same limit again
        return
    try:
        if is_cancelled(chain.run, job.token):
            return  # by a command that knew what it did
        if chain.scheduler.was_cancelled(job.job_id):
            _heed(supervisor, f"job {job.job_id} was cancelled by hand")
            return
        queue = read_queue(chain.scheduler, chain.spec.short_id) or ()
        own = [j for j in queue if (j.token, j.task) == (job.token, job.task)]
        if any(j.raw == "COMPLETING" for j in own):
            return  # somebody is ending it already: a requeue brings it back by itself
        # By name: an id may be somebody else's by now.
        mine = any(j.job_id == job.job_id and j.state.may_be_at_work for j in own)
        if mine and chain.scheduler.requeue(job.job_id):
            logger.info("requeued; waiting for the scheduler to end this job")
            waited = 0.0
            while waited < _REQUEUE_WAIT_S:
                yield 1.0
                waited += 1.0
            return
    except SchedulerError as error:
        logger.warning("requeue: %s", error)
    supervisor.advance(leaving=True)


def _heed(supervisor: Supervisor, why: str) -> None:
    """What a cancelled job means."""
    run, ref = supervisor.chain.run, supervisor.job.link.anchor
    if not ref.is_eval:
        write_pause(run, why)
        return
    control = read_control(run)
    slot = Slot(ref.iteration, ref.kind, control.timeline_of(ref))
    claims = read_claims(run, slot)
    intents = read_intents(run, run.slot_dir(slot))
    last = (claims[-1].epoch if claims else 0, intents[-1].number if intents else 0)
    publish_given_up(run, slot, GivenUp(*last, why, since=supervisor.chain.clock()))


def _may_ask_for_more_time(supervisor: Supervisor) -> bool:
    ask = supervisor.chain.asks.get(supervisor.job.link.job_kind)
    return ask is not None and ask.wall_time and supervisor.chain.may_submit
