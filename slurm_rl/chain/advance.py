"""advance: observe, plan, and carry the plan out.

Called by `submit`, `resume`, ticks, watchers, and by whoever publishes a stage's commit. It may be
killed between any two effects and run by any number of processes at once: intents are exclusive,
and everything else may be repeated.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slurm_rl.chain.graph import Graph, Link
from slurm_rl.chain.observe import link_folder, observe, read_queue
from slurm_rl.chain.plan import (
    Action,
    Cancel,
    HaltRun,
    Plan,
    Repoint,
    Spec,
    Submit,
    SubmitTick,
    View,
    plan,
)
from slurm_rl.chain.scheduler import LinkRequest, Scheduler
from slurm_rl.errors import CorruptError, SchedulerError
from slurm_rl.storage.control import Control, Halt, read_control, write_halt
from slurm_rl.storage.intents import (
    Intent,
    intent_path,
    new_job_token,
    publish_intent,
    write_job_id,
)
from slurm_rl.storage.rundir import RunDir

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chain:
    """What every caller of `advance` holds: the run, its graph, the scheduler and the clock.

    clock: seconds by the clock of the run's file system.
    """

    run: RunDir
    graph: Graph
    spec: Spec
    scheduler: Scheduler
    clock: Callable[[], float]


@dataclass(frozen=True)
class Outcome:
    """What an advance planned, which jobs it submitted, and what the scheduler refused.

    is_blind: the scheduler did not answer when it was asked for the queue.
    """

    plan: Plan
    job_ids: tuple[str, ...] = ()
    errors: tuple[SchedulerError, ...] = ()
    is_blind: bool = False

    @property
    def is_settled(self) -> bool:
        """Whether the scheduler did all that it was asked."""
        return not self.errors and not self.is_blind


def advance(chain: Chain, *, own: tuple[str, int | None] | None = None) -> Outcome:
    """Move the run on as far as can be now.

    `own` is the calling job if it is about to end. A submission that fails is left to a later
    advance; the links behind it are not submitted, since nothing would wake them, but ticks are:
    that later advance may be theirs. Raises CorruptError, after halting the run, if something
    committed is damaged.
    """
    try:
        view = look(chain, own=own)
    except CorruptError as error:
        write_halt(chain.run, Halt(error.message, error.hint, since=chain.clock()))
        _cancel_pending(chain, own)
        raise
    planned = plan(chain.spec, view)
    job_ids: dict[Link, str] = {}
    errors: list[SchedulerError] = []
    is_blocked = False
    for action in planned.actions:
        if is_blocked and isinstance(action, Submit):
            continue
        try:
            is_blocked |= not _carry_out(chain, view.control, action, job_ids)
        except SchedulerError as error:
            logger.warning("%s: %s; left to a later advance", type(action).__name__, error)
            errors.append(error)
            is_blocked |= isinstance(action, Submit)
    for reason in planned.waiting:
        logger.info("waiting: %s", reason)
    return Outcome(planned, tuple(job_ids.values()), tuple(errors), view.queue is None)


def _cancel_pending(chain: Chain, own: tuple[str, int | None] | None) -> None:
    """Take the run's waiting jobs out of the queue: it has just been halted."""
    view = View(read_control(chain.run), (), read_queue(chain.scheduler, chain.spec.short_id), own)
    for action in plan(chain.spec, view).actions:
        try:
            _carry_out(chain, view.control, action, {})
        except SchedulerError as error:
            logger.warning("%s", error)


def look(chain: Chain, *, own: tuple[str, int | None] | None = None) -> View:
    """What `advance` would plan from."""
    now = chain.clock()
    return observe(chain.run, chain.graph, chain.spec, chain.scheduler, now=now, own=own)


def _carry_out(chain: Chain, control: Control, action: Action, job_ids: dict[Link, str]) -> bool:
    """One action; False if the links behind it must wait."""
    if isinstance(action, Submit):
        return _submit_link(chain, control, action, job_ids)
    if isinstance(action, SubmitTick):
        if read_control(chain.run) == control:
            _submit_tick(chain, action)
    elif isinstance(action, Cancel):
        logger.info("cancel %s: %s", ", ".join(action.job_ids), action.why)
        chain.scheduler.cancel(list(action.job_ids))
    elif isinstance(action, Repoint):
        logger.info("job %s now waits for %s", action.job_id, action.after or "nothing")
        chain.scheduler.repoint(action.job_id, action.after)
    elif isinstance(action, HaltRun):
        logger.error("halt: %s", action.halt.reason)
        write_halt(chain.run, action.halt)
    return True


def _submit_link(chain: Chain, control: Control, action: Submit, job_ids: dict[Link, str]) -> bool:
    """Write the intent, submit, note the id. Only the creator of the intent submits."""
    if read_control(chain.run) != control:
        return False  # paused, halted or rewound since we looked
    run, link = chain.run, action.link
    folder = link_folder(run, control, link)
    intent = Intent(
        number=action.number,
        token=new_job_token(chain.spec.short_id),
        created=chain.clock(),
        creator=f"{socket.gethostname()}:{os.getpid()}",
        shards=action.shards,
    )
    if not publish_intent(run, folder, intent):
        logger.info("%s: submission %d is somebody else's", link.anchor, action.number)
        return False
    after = job_ids[action.after] if isinstance(action.after, Link) else action.after
    run.fs.mkdir(run.logs_dir(link.iteration))
    request = render_link(
        run, chain.spec, link, intent, folder, after=after, begin_s=action.begin_s
    )
    name = request.name
    # If this fails it may have been accepted all the same; the intent's deadline settles that.
    job_id = chain.scheduler.submit(request)
    write_job_id(run, folder, intent.number, job_id)
    job_ids[link] = job_id
    logger.info("submitted %s as job %s", name, job_id)
    return True


def _submit_tick(chain: Chain, action: SubmitTick) -> None:
    request = render_tick(
        chain.run, chain.spec, new_job_token(chain.spec.short_id), begin_s=action.begin_s
    )
    chain.run.fs.mkdir(chain.run.scheduler_dir)
    job_id = chain.scheduler.submit(request)
    logger.info("submitted %s as job %s", request.name, job_id)


def render_link(
    run: RunDir,
    spec: Spec,
    link: Link,
    intent: Intent,
    folder: Path,
    *,
    after: str | None = None,
    begin_s: float | None = None,
) -> LinkRequest:
    """The job of an intent that lies in `folder`. Pure: `slurm-rl plan` shows the same."""
    name = link.job_name(spec.run_name, intent.token)
    path = intent_path(folder, intent.number)
    return LinkRequest(
        name=name,
        command=("link", str(run.root), str(path.relative_to(run.root)), name),
        stages=link.stages,
        shards=intent.shards,
        after=after,
        begin_s=begin_s,
        log=str(run.logs_dir(link.iteration) / f"{link.label}.{intent.number:04d}"),
    )


def render_tick(run: RunDir, spec: Spec, token: str, *, begin_s: float) -> LinkRequest:
    """A job that advances the chain and leaves. Pure."""
    name = f"{spec.run_name}.tick.{token}"
    return LinkRequest(
        name=name,
        command=("tick", str(run.root), name),
        begin_s=begin_s,
        log=str(run.scheduler_dir / "tick"),
    )
