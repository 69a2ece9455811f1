"""Progress until the end: one line for each stage that commits.

For a local run the watcher is also the advancer that ticks are under Slurm, and the one who stops
the processes on Ctrl-C; a Slurm run goes on without it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from slurm_rl.chain.advance import advance, look
from slurm_rl.chain.gc import collect_quietly
from slurm_rl.chain.observe import find_head, read_current
from slurm_rl.chain.outages import describe_outage
from slurm_rl.cli.control import stop_jobs
from slurm_rl.cli.eval import main_numbers, read_all, read_metrics
from slurm_rl.cli.runs import find_run
from slurm_rl.cli.status import read_rewards
from slurm_rl.cli.terminal import format_seconds, say
from slurm_rl.cli.verify import find_output
from slurm_rl.errors import CorruptError, Halted, NothingDone
from slurm_rl.launch.build import OpenRun, open_run
from slurm_rl.storage.control import read_control
from slurm_rl.storage.evals import read_given_up
from slurm_rl.types import Commit, StageRef

_LOOK_S = 0.3
#: How often a watcher moves the run on: processes can be asked at once, a controller is spared.
_ADVANCE_S = {"local": 2.0, "slurm": 60.0}
#: How often it tidies up where there are no ticks that do.
_GC_S = 60.0


def watch_run(path: Path) -> None:
    opened = find_run(path)
    with attended(opened):
        watch(opened)


@contextlib.contextmanager
def attended(opened: OpenRun) -> Iterator[None]:
    """While a person waits, Ctrl-C stops a local run's processes, and leaves a Slurm run alone.

    From the first job on: without its person a run goes on by itself.
    """
    root = opened.run.root
    try:
        yield
    except KeyboardInterrupt:
        if opened.settings.launcher == "local":
            stop_jobs(opened, "interrupted")
            say(f"\nstopped. Continue with: slurm-rl resume {root} --wait")
        else:
            say(f"\nno longer watching; the jobs go on. Look with: slurm-rl status {root}")
        raise


def watch(opened: OpenRun) -> None:
    """Show commits as they come. Raises Halted or NothingDone if the run stops short."""
    began = time.monotonic()
    num_stages, num_new = _follow(opened)
    took = format_seconds(time.monotonic() - began)
    part = f", the last {num_new}" if num_new < num_stages else ""
    say(f"complete: {num_stages} stages" + (f"{part} in {took}" if num_new else ""))
    show_end(opened)


def show_end(opened: OpenRun) -> None:
    """Where everything is, and what to type next."""
    root, graph = opened.run.root, opened.chain.graph
    control = read_control(opened.run)
    rewards = read_rewards(opened, range(graph.num_iterations))
    if rewards:
        say(f"reward: {rewards[0][1]:.3f} at first, {rewards[-1][1]:.3f} at the end")
    say(f"weights: {find_output(opened, control, 'weights', graph.num_iterations - 1)}")
    say(f"metrics: slurm-rl metrics {root}")
    say(f"check it: slurm-rl verify {root}")


def _follow(opened: OpenRun) -> tuple[int, int]:
    """Until every stage is committed; how many there are, and how many of them came meanwhile.

    Those that were there before us are told in one line.
    """
    chain = opened.chain
    period_s = _ADVANCE_S[opened.settings.launcher]
    next_advance = time.monotonic() + period_s
    next_gc = time.monotonic() + _GC_S
    told: dict[str, int] = {}
    evals = read_all(opened)
    shown = {ref for ref in evals.wanted(0, evals.newest) if evals.is_settled(ref)}
    stages: list[StageRef] = []
    num_before: int | None = None  # not known until something is waited for
    for ref in _stages(opened):
        while (commit := _look(opened, ref)) is None:
            if num_before is None:
                num_before = _tell_so_far(stages)
            time.sleep(_LOOK_S)
            if time.monotonic() >= next_advance:
                advance(chain)
                _tell_failures(opened, told)
                _tell_evals(opened, shown)
                next_advance = time.monotonic() + period_s
            if not chain.spec.ticks and time.monotonic() >= next_gc:
                collect_quietly(opened.keeper)
                next_gc = time.monotonic() + _GC_S
        stages.append(ref)
        if num_before is not None:
            say(_describe(ref, commit))
    if num_before is None:
        num_before = _tell_so_far(stages)
    _follow_evals(opened, told, shown)
    return len(stages), len(stages) - num_before


def _tell_so_far(stages: list[StageRef]) -> int:
    """One line of what was committed before we came; how many that were."""
    if stages:
        say(f"so far: {len(stages)} stage{'s' if len(stages) > 1 else ''}, up to {stages[-1]}")
    return len(stages)


def _stages(opened: OpenRun) -> Iterator[StageRef]:
    """Every stage in order; a run that is made longer meanwhile has more of them."""
    iteration, graph = 0, opened.chain.graph
    while iteration < graph.num_iterations:
        for node in graph.stages(iteration):
            yield StageRef(iteration, node.kind)
        iteration += 1
        if iteration == graph.num_iterations:
            graph = open_run(opened.run.root).chain.graph


def _tell_failures(opened: OpenRun, told: dict[str, int]) -> None:
    """One line for each new failed attempt; `told` remembers how many were said of each slot."""
    view = look(opened.chain)
    for slot in (slot for link in view.all_links for slot in link.open_slots):
        if slot.failures > told.get(slot.name, 0):
            told[slot.name] = slot.failures
            say(f"{slot.name}: attempt {slot.failures} failed: {slot.last_error}")
        is_waiting = f"{slot.name} waits"
        if slot.num_deferrals and is_waiting not in told:
            say(f"{slot.name} {describe_outage(slot, now=view.now)}")
        told.pop(is_waiting, None)
        if slot.num_deferrals:
            told[is_waiting] = slot.num_deferrals


def _follow_evals(opened: OpenRun, told: dict[str, int], shown: set[StageRef]) -> None:
    """Until every evaluation is committed or given up; raises if the run stops before."""
    root, period_s = opened.run.root, _ADVANCE_S[opened.settings.launcher]
    next_advance = time.monotonic() + period_s
    while any(read_all(opened).open_evals()):
        control = read_control(opened.run)
        if control.halt is not None:
            raise Halted(f"{root}: halted: {control.halt.reason}", hint=control.halt.hint)
        if control.paused is not None:
            why = f"{root}: paused ({control.paused}), with evaluations to do"
            raise NothingDone(why, hint=f"`slurm-rl resume {root}`")
        time.sleep(_LOOK_S)
        if time.monotonic() >= next_advance:
            advance(opened.chain)
            _tell_failures(opened, told)
            _tell_evals(opened, shown)
            next_advance = time.monotonic() + period_s
    _tell_evals(opened, shown)


def _tell_evals(opened: OpenRun, shown: set[StageRef]) -> None:
    """One line for each evaluation that has a result, or was given up, since we looked."""
    evals = read_all(opened)
    for ref in evals.wanted(0, evals.newest):
        if ref in shown or not evals.is_settled(ref):
            continue
        shown.add(ref)
        given_up = read_given_up(opened.run, evals.control, evals.slot(ref))
        numbers = main_numbers(read_metrics(opened, ref), ref.kind)
        said = f"given up: {given_up.reason}" if given_up is not None else numbers
        say(f"{ref!s:<16} {said}".rstrip())


def _look(opened: OpenRun, ref: StageRef) -> Commit | None:
    """The stage's commit; raises if the run has stopped and it will not come."""
    control = read_control(opened.run)
    commit = read_current(opened.run, opened.chain.graph, control, ref)
    root = opened.run.root
    if commit is None and control.halt is not None:
        log = f" (log: {control.halt.log})" if control.halt.log else ""
        raise Halted(f"{root}: halted: {control.halt.reason}{log}", hint=control.halt.hint)
    if commit is None and find_head(opened.run, opened.chain.graph, control) > ref.iteration:
        commit = read_current(opened.run, opened.chain.graph, control, ref)  # it may be that new
        if commit is not None:
            return commit
        raise CorruptError(
            f"{root}: {ref} has no commit, but what was made from it has",
            hint="put the COMMIT back, or `slurm-rl rewind`; see `slurm-rl verify`",
        )
    if commit is None and control.paused is not None:
        raise NothingDone(f"{root}: paused ({control.paused})", hint=f"`slurm-rl resume {root}`")
    return commit


def _describe(ref: StageRef, commit: Commit) -> str:
    metrics = commit.provenance.get("metrics", {})
    elapsed = commit.provenance.get("ended", 0.0) - commit.provenance.get("started", 0.0)
    shown = {
        "rollout/raw_reward": "reward",
        "rollout/response_len": "length",
        "train/loss": "loss",
        "train/grad_norm": "grad norm",
    }
    numbers = [f"{label} {metrics[name]:.4g}" for name, label in shown.items() if name in metrics]
    return f"{ref!s:<16} {format_seconds(elapsed):>6}  {'  '.join(numbers)}".rstrip()
