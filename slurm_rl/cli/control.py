"""resume, pause, cancel, advance: what a person decides about a run."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path

from slurm_rl.chain.advance import advance, look
from slurm_rl.chain.graph import Link
from slurm_rl.chain.observe import find_head, link_folder, read_queue
from slurm_rl.chain.plan_ticks import is_tick
from slurm_rl.chain.scheduler import JobState
from slurm_rl.chain.slots import slots_of
from slurm_rl.cli.runs import find_own_run
from slurm_rl.cli.submit import report
from slurm_rl.cli.terminal import say
from slurm_rl.errors import NothingDone, SchedulerUnavailable, StorageError
from slurm_rl.launch.build import OpenRun
from slurm_rl.storage.claims import read_latest_claim
from slurm_rl.storage.control import Control, clear_stops, read_control, write_budget, write_pause
from slurm_rl.storage.intents import read_intents, write_cancelled
from slurm_rl.types import StageRef


def resume_run(path: Path, *, wait: bool) -> None:
    """Take PAUSE and HALT away, forgive failures, and move on.

    Raises NothingDone, saying why, if the run is not complete and nothing could be done.
    """
    opened = find_own_run(path)
    root = opened.run.root
    forgive(opened)
    clear_stops(opened.run)
    if look(opened.chain).is_complete:
        say(f"{root}: complete; nothing to do")
        return
    if not wait:
        _move_on(opened, is_alone=True)
        return
    from slurm_rl.cli.watch import attended, watch

    with attended(opened):
        _move_on(opened, is_alone=False)
        watch(opened)


def _move_on(opened: OpenRun, *, is_alone: bool) -> None:
    """is_alone: nobody watches it afterwards, so that it must be moving now, or NothingDone."""
    root, outcome = opened.run.root, advance(opened.chain)
    report(opened, outcome)
    queue = look(opened.chain).queue or ()
    live = [job for job in queue if job.state.is_live and not is_tick(job.name)]
    if not outcome.job_ids and not live and is_alone:
        why = "; ".join(outcome.plan.waiting) or "no reason known"
        raise NothingDone(f"{root}: nothing was submitted: {why}", hint=f"`slurm-rl status {root}`")
    if not outcome.job_ids and live:
        say(f"{root}: {len(live)} job(s) of it are in the queue already")


def forgive(opened: OpenRun) -> None:
    """Attempts made so far no longer count against the cap of the stages that are open."""
    chain = opened.chain
    control = read_control(opened.run)
    head = find_head(opened.run, chain.graph, control)
    forgiven: dict[str, int] = {}
    for _, links in itertools.islice(chain.graph.stages_from(head), chain.spec.window):
        for link in links:
            forgiven |= count_submissions(opened, control, link)
    for iteration in range(head, min(head + 2, chain.graph.num_iterations)):
        for node in chain.graph.stages(iteration):
            forgiven |= count_attempts(opened, control, StageRef(iteration, node.kind))
    if forgiven and dict(control.forgiven) | forgiven != dict(control.forgiven):
        write_budget(opened.run, forgiven)


def count_submissions(opened: OpenRun, control: Control, link: Link) -> dict[str, int]:
    """The submissions of a link so far, as a budget forgives them."""
    intents = read_intents(opened.run, link_folder(opened.run, control, link))
    return {str(link): intents[-1].number} if intents else {}


def count_attempts(opened: OpenRun, control: Control, ref: StageRef) -> dict[str, int]:
    """The attempts at each slot of a stage so far, as a budget forgives them."""
    slots = slots_of(opened.chain.graph, control, ref)
    claims = {str(slot): read_latest_claim(opened.run, slot) for slot in slots}
    return {name: claim.epoch for name, claim in claims.items() if claim is not None}


def pause_run(path: Path) -> None:
    opened = find_own_run(path)
    write_pause(opened.run, "slurm-rl pause")
    say(f"{opened.run.root}: paused; what runs goes on. Continue with `slurm-rl resume`")


def cancel_run(path: Path) -> None:
    """Pause, then cancel: the other way round a job could submit another in between."""
    opened = find_own_run(path)
    num_jobs = stop_jobs(opened, "slurm-rl cancel")
    say(f"{opened.run.root}: paused; {num_jobs} job(s) cancelled. Committed work stays.")
    say(f"continue with: slurm-rl resume {opened.run.root}")


def stop_jobs(opened: OpenRun, reason: str) -> int:
    """Pause the run, cancel its jobs; how many.

    The jobs are cancelled even where PAUSE cannot be written (a full disk); that is raised then.
    """
    refused: StorageError | OSError | None = None
    try:
        write_pause(opened.run, reason)
    except (StorageError, OSError) as error:
        refused = error
    queue = read_queue(opened.chain.scheduler, opened.identity.short_id)
    if queue is None:
        raise SchedulerUnavailable(
            f"{opened.run.root}: paused, but the scheduler does not answer: nothing is cancelled",
            hint="repeat `slurm-rl cancel` later",
        )
    jobs = [job for job in queue if job.state is not JobState.ENDED]
    ids = sorted({job.base_id for job in jobs})
    with contextlib.suppress(OSError, StorageError):  # a full disk must not keep jobs alive
        for token in sorted({job.token for job in jobs if job.state is not JobState.PENDING}):
            write_cancelled(opened.run, token)
    if ids:
        opened.chain.scheduler.cancel(ids)
    if refused is not None:
        raise StorageError(
            f"{opened.run.control_dir / 'PAUSE'}: not written ({refused}); {len(ids)} job(s) were"
            " cancelled, but one that ends may submit the next",
            hint="make room, then repeat `slurm-rl cancel`",
        ) from refused
    return len(ids)


def advance_run(path: Path) -> None:
    """One advance. Silent when nothing happens, so that cron sends no mail."""
    opened = find_own_run(path)
    outcome = advance(opened.chain)
    if outcome.job_ids or outcome.errors:
        report(opened, outcome)
