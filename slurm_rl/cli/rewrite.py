"""rewind and retry: history is made again from a point on; what was there is set aside.

A new timeline begins at the point. Commits of the old one stay on disk under their own names, and
nobody reads them; a process of the old one that lives on publishes under those names.
"""

from __future__ import annotations

from pathlib import Path

from slurm_rl.chain.advance import advance, look
from slurm_rl.chain.evals import read_evals
from slurm_rl.chain.needs import check_rewindable, inputs_from
from slurm_rl.chain.observe import find_head, read_current
from slurm_rl.chain.slots import is_at_work, slots_of
from slurm_rl.chain.usage import read_total, read_usage
from slurm_rl.cli.control import count_attempts, count_submissions, stop_jobs
from slurm_rl.cli.eval import want
from slurm_rl.cli.runs import check_iteration, find_own_run
from slurm_rl.cli.submit import report
from slurm_rl.cli.terminal import say
from slurm_rl.errors import NoRunError, NothingDone, StorageError
from slurm_rl.launch.build import OpenRun
from slurm_rl.storage.claims import read_claims
from slurm_rl.storage.control import (
    clear_halt,
    read_control,
    start_timeline,
    write_budget,
    write_pause,
)
from slurm_rl.storage.leases import hold
from slurm_rl.types import StageRef


def rewind_run(path: Path, *, to: int) -> None:
    """Make iteration `to` and all after it again. The run is paused then: `resume` goes on.

    Raises NothingDone if there is nothing from there on, NoRunError for an iteration that the
    run does not have, PrunedError if what it starts from was deleted.
    """
    opened = find_own_run(path)
    graph = opened.chain.graph
    check_iteration(graph, to)
    first = StageRef(to, graph.nodes[0].kind)
    control = read_control(opened.run)
    slots = [
        s for node in graph.stages(to) for s in slots_of(graph, control, StageRef(to, node.kind))
    ]
    if not any(read_claims(opened.run, slot) for slot in slots):
        raise NothingDone(f"{opened.run.root}: iteration {to} has not begun; nothing to rewind")
    _set_aside(opened, first, reason=f"slurm-rl rewind --to {to}")
    say(f"{opened.run.root}: iteration {to} and all after it will be made again")
    say(f"what was there is set aside, not erased. Go on with: slurm-rl resume {opened.run.root}")


def retry_stage(path: Path, *, iteration: int, stage: str) -> None:
    """Try a stage again: one that failed gets new attempts, a committed one is made again, with
    all that was made from it. The run is paused then: `resume` goes on."""
    opened = find_own_run(path)
    graph = opened.chain.graph
    if StageRef(iteration, stage).is_eval:
        _retry_eval(opened, StageRef(iteration, stage))
        return
    check_iteration(graph, iteration)
    kinds = [node.kind for node in graph.stages(iteration)]
    if stage not in kinds:
        raise NoRunError(f"iteration {iteration} has no stage {stage!r}; it has {', '.join(kinds)}")
    ref, control = StageRef(iteration, stage), read_control(opened.run)
    if read_current(opened.run, graph, control, ref) is not None:
        _set_aside(opened, ref, reason=f"slurm-rl retry -i {iteration} --stage {stage}")
        say(f"{opened.run.root}: {ref} and all that was made from it will be made again")
        say(f"go on with: slurm-rl resume {opened.run.root}")
        return
    queue = look(opened.chain).queue
    for slot in slots_of(graph, control, ref):
        if is_at_work(opened.run, slot, queue):
            raise NothingDone(f"{opened.run.root}: {slot} is at work", hint="let it end, or cancel")
    forgiven = count_attempts(opened, control, ref)
    for link in graph.links_of(ref):
        forgiven |= count_submissions(opened, control, link)
    if not forgiven:
        raise NothingDone(f"{opened.run.root}: {ref} was not tried yet")
    write_budget(opened.run, forgiven)
    write_pause(opened.run, f"slurm-rl retry -i {iteration} --stage {stage}")
    clear_halt(opened.run)
    say(f"{opened.run.root}: {ref} has all its attempts again")
    say(f"go on with: slurm-rl resume {opened.run.root}")


def _retry_eval(opened: OpenRun, ref: StageRef) -> None:
    """An evaluation that was given up, or waits, is tried again; the run goes on meanwhile."""
    control = read_control(opened.run)
    if not opened.chain.graph.has_eval(ref):
        raise NoRunError(f"{opened.run.root}: there is no evaluation {ref}")
    if read_current(opened.run, opened.chain.graph, control, ref) is not None:
        raise NothingDone(
            f"{opened.run.root}: {ref} is committed; an evaluation is not made twice",
            hint=f"`slurm-rl eval {opened.run.root} --version {ref.iteration}` shows it",
        )
    want(opened, [ref])
    forgiven = count_attempts(opened, control, ref)
    for link in opened.chain.graph.links_of(ref):
        forgiven |= count_submissions(opened, control, link)
    if forgiven:
        write_budget(opened.run, forgiven)
    say(f"{opened.run.root}: {ref} has all its attempts again")
    if not control.stopped:
        report(opened, advance(opened.chain))


def _set_aside(opened: OpenRun, ref: StageRef, *, reason: str) -> None:
    """Stop the jobs, then begin a timeline at `ref`. A crash in between leaves a paused run.

    Whoever loses the race for the timeline is told: somebody else has just rewritten history.
    """
    run, chain = opened.run, opened.chain
    control = read_control(run)
    check_rewindable(run, chain.graph, control, ref.iteration, stage=ref.kind)
    inputs = inputs_from(chain.graph, control, ref.iteration, stage=ref.kind)
    with hold(run, inputs, holder=reason, clock=chain.clock):
        _begin_timeline(opened, ref, reason=reason)


def _begin_timeline(opened: OpenRun, ref: StageRef, *, reason: str) -> None:
    run, chain = opened.run, opened.chain
    stop_jobs(opened, reason)
    control = read_control(run)
    head = find_head(run, chain.graph, control)
    used_s = read_usage(run, chain.graph, control, chain.spec, head=head)
    set_aside = sum(start.gpu_s for start in control.timelines)
    kept_s = read_total(run, chain.graph, control, ref.iteration - 1)
    # Evaluations of the weights that it starts from, and of all before, stay.
    evals = read_evals(run, chain.graph, control, head=head)
    last_kept = ref.iteration if ref.kind != "init" else -1
    kept_s += evals.read_gpu_s(chain.spec, last=last_kept)
    gpu_s = max(0.0, used_s - set_aside - kept_s)
    last = max((start.number for start in control.timelines), default=0)
    if not start_timeline(run, ref, after=last, reason=reason, gpu_s=gpu_s):
        raise StorageError(
            f"{run.root}: somebody else rewrote its history just now",
            hint="look with `slurm-rl status`, then decide again",
        )
