"""advance: observe, plan, and carry the plan out.

Called by `submit`, `resume`, ticks, watchers, and by whoever publishes a stage's commit. It may be
killed between any two effects and run by any number of processes at once: intents are exclusive,
and everything else may be repeated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from slurm_rl.chain.graph import Graph, Link
from slurm_rl.chain.history import count_timeouts, learn_wall_time
from slurm_rl.chain.observe import link_folder, observe, read_queue
from slurm_rl.chain.plan import plan
from slurm_rl.chain.scheduler import LinkRequest, Scheduler, WallTime
from slurm_rl.chain.view import (
    Action,
    Cancel,
    GiveUp,
    HaltRun,
    Plan,
    Repoint,
    Spec,
    Submit,
    SubmitTick,
    View,
)
from slurm_rl.errors import (
    CorruptError,
    SchedulerError,
    SlurmRlError,
    StorageError,
    SubmitRefused,
)
from slurm_rl.storage.control import Control, Halt, read_control, write_halt
from slurm_rl.storage.evals import publish_given_up
from slurm_rl.storage.intents import (
    Intent,
    intent_path,
    new_job_token,
    publish_intent,
    write_job_id,
)
from slurm_rl.storage.rundir import RunDir
from slurm_rl.types import Slot

logger = logging.getLogger(__name__)

#: How often an advance looks again because people or others change the run under its hands.
_NUM_LOOKS = 5


class _ControlChangedError(Exception):
    """Paused, halted, rewound or changed since we looked: what was planned is of yesterday."""


class _TakenError(Exception):
    """The submission is somebody else's, and perhaps for other shards."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What a stage's jobs leave to be learnt: the wall time, the warning before its end, or both.

    longest_s: the most that may be asked for. signal_s: the warning that the settings ask for.
    """

    wall_time: bool
    longest_s: float | None = None
    signal_s: int | None = None


@dataclass(frozen=True)
class Chain:
    """What every caller of `advance` holds: the run, its graph, the scheduler and the clock.

    clock:  seconds by the clock of the run's file system, or by this machine's if it does not say.
    exact_clock: the first, or an error: ages of intents are measured with one clock or not at all.
    asks:   kind of job -> what such jobs leave to be learnt from the run.
    may_submit: whether this process may submit jobs: on some sites only login nodes may.
    renew:  the same, with the settings and the owner of now: a job outlives changes of both.
    """

    run: RunDir
    graph: Graph
    spec: Spec
    scheduler: Scheduler
    clock: Callable[[], float]
    asks: Mapping[str, Ask] = field(default_factory=dict)
    may_submit: bool = True
    exact_clock: Callable[[], float] | None = None
    renew: Callable[[], Chain] | None = None

    def now(self) -> float:
        """What intents are dated with. Raises what the file system answers."""
        return (self.exact_clock or self.clock)()


@dataclass(frozen=True)
class Outcome:
    """What an advance planned, which jobs it submitted, and what the scheduler refused.

    is_blind: the scheduler did not answer when it was asked for the queue.
    is_stale: control changed before all was done; what is left was planned from the old one.
    goes_on:  another look would do more at once.
    """

    plan: Plan
    job_ids: tuple[str, ...] = ()
    errors: tuple[SlurmRlError | OSError, ...] = ()
    is_blind: bool = False
    is_stale: bool = False
    goes_on: bool = False

    @property
    def is_settled(self) -> bool:
        """Whether the scheduler did all that it was asked."""
        return not self.errors and not self.is_blind and not self.is_stale


def advance(chain: Chain, *, own: tuple[str, int | None] | None = None) -> Outcome:
    """Move the run on as far as can be now.

    `own` is the calling job if it is about to end. A submission that fails is left to a later
    advance; the links behind it are not submitted, since nothing would wake them, but ticks are:
    that later advance may be theirs. Where control changes meanwhile, or others submit too, it
    looks again: it may be the last that does. Raises CorruptError, after halting the run, if
    something committed is damaged.
    """
    job_ids: list[str] = []
    for _ in range(_NUM_LOOKS):
        outcome = _advance_once(chain if chain.renew is None else chain.renew(), own)
        job_ids += outcome.job_ids
        if not outcome.is_stale and not outcome.goes_on:
            break
    return dataclasses.replace(outcome, job_ids=tuple(job_ids))


def _advance_once(chain: Chain, own: tuple[str, int | None] | None) -> Outcome:
    try:
        view = _observe(chain, own, now=chain.now() if chain.may_submit else chain.clock())
    except CorruptError as error:
        halt_for(chain, error)
        _cancel_pending(chain, own)
        raise
    planned = plan(chain.spec, view)
    job_ids: dict[Link, str] = {}
    errors: list[SlurmRlError | OSError] = []
    is_stale, goes_on = False, planned.goes_on and chain.may_submit
    for action in planned.actions:
        if isinstance(action, Submit | SubmitTick) and not chain.may_submit:
            continue
        try:
            _carry_out(chain, view.control, action, job_ids)
        except CorruptError:
            raise
        except (SchedulerError, StorageError, OSError) as error:
            logger.warning("%s: %s; left to a later advance", type(action).__name__, error)
            errors.append(error)
        except _ControlChangedError:
            is_stale = True
            break
        except _TakenError:
            goes_on = True
    for reason in planned.waiting:
        logger.info("waiting: %s", reason)
    is_blind = view.queue is None
    return Outcome(planned, tuple(job_ids.values()), tuple(errors), is_blind, is_stale, goes_on)


def _cancel_pending(chain: Chain, own: tuple[str, int | None] | None) -> None:
    """Take the run's waiting jobs out of the queue: it has just been halted."""
    control = read_control(chain.run)
    if control.halt is None:
        return  # it could not be written
    view = View(control, (), read_queue(chain.scheduler, chain.spec.short_id), own)
    for action in plan(chain.spec, view).actions:
        try:
            _carry_out(chain, view.control, action, {})
        except SchedulerError as error:
            logger.warning("%s", error)


def halt_for(chain: Chain, error: CorruptError) -> None:
    """Halt the run for damage; where not even that can be written, the error itself must do."""
    since = 0.0
    try:
        with contextlib.suppress(OSError, StorageError):
            since = chain.clock()
        write_halt(chain.run, Halt(error.message, error.hint, since=since))
    except (OSError, StorageError) as second:
        logger.error("the run cannot be halted: %s", second)


def look(chain: Chain, *, own: tuple[str, int | None] | None = None) -> View:
    """What `advance` would plan from. Looking needs no right to write: where the file system's
    clock cannot be asked, this machine's will do."""
    try:
        now = chain.clock()
    except (OSError, StorageError):
        now = time.time()
    return _observe(chain, own, now=now)


def _observe(chain: Chain, own: tuple[str, int | None] | None, *, now: float) -> View:
    return observe(chain.run, chain.graph, chain.spec, chain.scheduler, now=now, own=own)


def _carry_out(chain: Chain, control: Control, action: Action, job_ids: dict[Link, str]) -> None:
    """One action. A link whose parent could not be submitted is left out: it would wake at once."""
    if isinstance(action, Submit | SubmitTick | GiveUp) and read_control(chain.run) != control:
        raise _ControlChangedError
    match action:
        case Submit() if _has_all(action.after, job_ids):
            _submit_link(chain, control, action, job_ids)
        case SubmitTick():
            _submit_tick(chain, action)
        case Cancel() if action.replaced not in (None, *job_ids):
            logger.info("%s stays: nothing takes its place", ", ".join(action.job_ids))
        case Cancel():
            logger.info("cancel %s: %s", ", ".join(action.job_ids), action.why)
            chain.scheduler.cancel(list(action.job_ids), only_pending=True)
        case Repoint() if _has_all(action.after, job_ids):
            after = tuple(job_ids[at] if isinstance(at, Link) else at for at in action.after)
            logger.info("job %s now waits for %s", action.job_id, ", ".join(after) or "nothing")
            chain.scheduler.repoint(action.job_id, after)
        case HaltRun():
            logger.error("halt: %s", action.halt.reason)
            write_halt(chain.run, dataclasses.replace(action.halt, since=chain.clock()))
        case GiveUp():
            _give_up(chain.run, control, action)


def _has_all(after: tuple[str | Link, ...], job_ids: dict[Link, str]) -> bool:
    """Whether all the jobs that are waited for are there."""
    return all(at in job_ids for at in after if isinstance(at, Link))


def _give_up(run: RunDir, control: Control, action: GiveUp) -> None:
    ref = action.ref
    slot = Slot(ref.iteration, ref.kind, control.timeline_of(ref))
    logger.error("%s is given up: %s", slot, action.given_up.reason)
    publish_given_up(run, slot, action.given_up)


def _submit_link(chain: Chain, control: Control, action: Submit, job_ids: dict[Link, str]) -> None:
    """Write the intent, submit, note the id. Only the creator of the intent submits."""
    run, link = chain.run, action.link
    folder = link_folder(run, control, link)
    intent = Intent(
        number=action.number,
        token=new_job_token(chain.spec.short_id),
        created=chain.now(),
        creator=f"{socket.gethostname()}:{os.getpid()}",
        shards=action.shards,
        fallback=action.fallback,
    )
    if not publish_intent(run, folder, intent):
        logger.info("%s: submission %d is somebody else's", link, action.number)
        if action.shards:
            raise _TakenError
        return
    run.fs.mkdir(run.logs_dir(link.iteration))
    wall = _learn_wall(chain, control, link)
    request = render_link(run, chain.spec, link, intent, folder)
    signal = () if wall is None or wall.signal_s is None else (str(wall.signal_s),)
    request = dataclasses.replace(
        request,
        command=(*request.command, *signal),
        after=tuple(job_ids[at] if isinstance(at, Link) else at for at in action.after),
        begin_s=action.begin_s,
        exclude=action.exclude,
        fallback=action.fallback,
        wall=wall,
    )
    job_id = _submit_request(chain, request)
    job_ids[link] = job_id
    write_job_id(run, folder, intent.number, job_id)
    logger.info("submitted %s as job %s", request.name, job_id)


def _submit_request(chain: Chain, request: LinkRequest) -> str:
    """The job's id. If this fails it may have been accepted all the same; the intent's deadline
    settles that."""
    try:
        return chain.scheduler.submit(request)
    except SubmitRefused as error:
        if not request.exclude:
            raise
        # Perhaps no node is left without those: better there than nowhere.
        logger.warning("%s; once more with every node", error)
        return chain.scheduler.submit(dataclasses.replace(request, exclude=()))


def _learn_wall(chain: Chain, control: Control, link: Link) -> WallTime | None:
    """What the link's own past says about its times, where the settings leave it open."""
    ask = chain.asks.get(link.job_kind)
    if ask is None:
        return None
    run, graph = chain.run, chain.graph
    tries = count_timeouts(run, graph, control, link) if ask.wall_time else 0
    longest_s = ask.longest_s
    wall = learn_wall_time(run, graph, control, link, longest_s=longest_s, tries=tries)
    if ask.signal_s is not None:
        wall = dataclasses.replace(wall, signal_s=ask.signal_s)
    return wall


def _submit_tick(chain: Chain, action: SubmitTick) -> None:
    request = render_tick(
        chain.run, chain.spec, new_job_token(chain.spec.short_id), begin_s=action.begin_s
    )
    chain.run.fs.mkdir(chain.run.scheduler_dir)
    job_id = chain.scheduler.submit(request)
    logger.info("submitted %s as job %s", request.name, job_id)


def replace_tick(chain: Chain) -> None:
    """One tick for one that ends without having seen the run: how many there are stays the same.

    It is not known whether the run is paused or over; the next one will see.
    """
    if chain.spec.ticks and chain.may_submit:
        try:
            _submit_tick(chain, SubmitTick(chain.spec.tick_s))
        except (SchedulerError, StorageError, OSError) as error:
            logger.warning("no other tick: %s", error)


def render_link(
    run: RunDir,
    spec: Spec,
    link: Link,
    intent: Intent,
    folder: Path,
) -> LinkRequest:
    """The job of an intent that lies in `folder`. Pure: `slurm-rl plan` shows the same."""
    name = link.job_name(spec.run_name, intent.token)
    path = intent_path(folder, intent.number)
    return LinkRequest(
        name=name,
        command=("link", str(run.root), str(path.relative_to(run.root)), name),
        stages=link.stages,
        pool=link.pool,
        shards=intent.shards,
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
