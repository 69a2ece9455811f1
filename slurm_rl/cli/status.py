"""status and metrics: what a run has done and is doing, from the queue and the run directory."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slurm_rl.chain.advance import look
from slurm_rl.chain.evals import read_evals
from slurm_rl.chain.observe import find_head, read_current
from slurm_rl.chain.plan import plan
from slurm_rl.chain.plan_ticks import is_tick
from slurm_rl.chain.scheduler import JobState
from slurm_rl.chain.view import View
from slurm_rl.cli.eval import newest_results, read_metrics
from slurm_rl.cli.runs import find_run
from slurm_rl.cli.terminal import format_seconds, say
from slurm_rl.launch.build import OpenRun
from slurm_rl.storage.control import Control, read_control
from slurm_rl.types import Commit, StageRef

_ETA_FROM = 5


def show_status(path: Path, *, as_json: bool) -> None:
    """One screen: where the run is, its jobs, and why it is not moving if it is not."""
    opened = find_run(path)
    view = look(opened.chain)
    facts = collect_status(opened, view)
    if as_json:
        say(json.dumps(facts, indent=2))
        return
    say(f"{facts['run']}: {facts['state']}, {facts['done']}/{facts['iterations']} iterations")
    if facts["stage"] != "complete":
        say(f"next: {facts['stage']}")
    if facts["last_reward"] is not None:
        say(f"last reward {facts['last_reward']:.4g} (iteration {facts['last_reward_iteration']})")
    for name, (version, numbers) in facts["evals"].items():
        say(f"last {name}: {numbers} (version {version})")
    if facts["eta_s"] is not None:
        say(f"about {format_seconds(facts['eta_s'])} to go, by the last iterations")
    if view.queue is None:
        say("the scheduler does not answer; jobs are not shown")
    _show_jobs(facts["jobs"])
    for reason in facts["waiting"]:
        say(f"waiting: {reason}")
    halt = view.control.halt
    if halt is not None:
        say(f"halted: {halt.reason}")
        say(f"  log: {halt.log}" if halt.log else "")
        say(f"  {halt.hint}")


def collect_status(opened: OpenRun, view: View) -> dict[str, Any]:
    """The facts behind `status`, as `--json` prints them."""
    graph = opened.chain.graph
    head = find_head(opened.run, graph, view.control)
    rewards = read_rewards(opened, range(max(0, head - 2), min(head + 1, graph.num_iterations)))
    planned = plan(opened.chain.spec, view)
    jobs = [
        {
            "job_id": job.job_id,
            "name": job.name,
            "state": job.raw or job.state.value,
            "reason": job.reason,
            "elapsed_s": job.elapsed_s,
            "nodes": job.nodes,
        }
        for job in view.queue or ()
        if job.state is not JobState.ENDED
    ]
    open_links = [str(link.link) for link in view.all_links if not link.is_done]
    stage = next(iter(open_links), "complete")
    return {
        "run": str(opened.run.root),
        "state": _state(view, jobs),
        "stage": stage,
        "done": head,
        "iterations": graph.num_iterations,
        "evals": newest_results(opened),
        "last_reward": rewards[-1][1] if rewards else None,
        "last_reward_iteration": rewards[-1][0] if rewards else None,
        "eta_s": _estimate_left(opened, view.control, head),
        "jobs": jobs,
        "waiting": _explain(view, planned.waiting, jobs, opened),
    }


def read_rewards(opened: OpenRun, iterations: Iterable[int]) -> list[tuple[int, float]]:
    """(iteration, mean raw reward) of the committed rollouts among `iterations`."""
    control = read_control(opened.run)
    found = []
    for iteration in iterations:
        commit = _read(opened, control, StageRef(iteration, "rollout"))
        metrics = commit.provenance.get("metrics", {}) if commit else {}
        if "rollout/raw_reward" in metrics:
            found.append((iteration, float(metrics["rollout/raw_reward"])))
    return found


def show_metrics(path: Path, *, as_jsonl: bool, last: int) -> None:
    """The metrics of the last iterations, merged from their stages' commits."""
    opened = find_run(path)
    control = read_control(opened.run)
    graph = opened.chain.graph
    head = find_head(opened.run, graph, control)
    first = 0 if as_jsonl else max(0, head - last)
    rows: list[dict[str, Any]] = []
    evals = read_evals(opened.run, graph, control, head=head)
    # Row N has what was measured of version N, the weights that iteration N starts from.
    for iteration in range(first, min(head, graph.num_iterations) + 1):
        row: dict[str, Any] = {"iteration": iteration}
        for ref in evals.wanted(iteration, min(iteration, evals.newest)):
            row |= read_metrics(opened, ref)
        for node in graph.stages(iteration) if iteration < graph.num_iterations else ():
            commit = _read(opened, control, StageRef(iteration, node.kind))
            row |= commit.provenance.get("metrics", {}) if commit else {}
        if len(row) > 1:
            rows.append(row)
    if as_jsonl:
        for row in rows:
            say(json.dumps(row))
        return
    names = ["rollout/raw_reward", "rollout/response_len", "train/loss", "train/grad_norm"]
    names += [f"eval/{name}" for name in opened.settings.eval]
    names = [name for name in names if any(name in row for row in rows)]
    say("  ".join(["iteration", *names]))
    for row in rows:
        cells = [f"{row[n]:>{len(n)}.4g}" if n in row else " " * len(n) for n in names]
        say("  ".join([f"{row['iteration']:>9}", *cells]))


def _explain(
    view: View, waiting: tuple[str, ...], jobs: list[dict[str, Any]], opened: OpenRun
) -> list[str]:
    """Why it is not moving, in words; attempts that failed, with what they said."""
    if view.control.stopped or view.is_complete:
        return []
    failed = [
        f"{slot.name}: {slot.failures} attempt(s) failed; the last said: {slot.last_error}"
        for link in view.all_links
        for slot in link.open_slots
        if slot.failures
    ]
    reasons = [*failed, *waiting]
    if view.queue is not None and not any(not is_tick(job["name"]) for job in jobs):
        reasons.append(f"no job of it is alive; `slurm-rl resume {opened.run.root}` submits one")
    return reasons


def _state(view: View, jobs: list[dict[str, Any]]) -> str:
    if view.is_complete:
        return "complete"
    if view.control.halt is not None:
        return "halted"
    if view.control.paused is not None:
        return "paused"
    if view.queue is None:
        return "unknown"
    if any(job["state"] == "RUNNING" and not is_tick(job["name"]) for job in jobs):
        return "running"
    return "pending" if jobs else "not moving"


def _show_jobs(jobs: list[dict[str, Any]]) -> None:
    if not jobs:
        return
    width = max(len(job["name"]) for job in jobs)
    say(f"{'JOB':>10}  {'NAME':<{width}}  {'STATE':<10} {'TIME':>7}  NODES/REASON")
    for job in jobs:
        where = job["nodes"] or job["reason"]
        elapsed = format_seconds(job["elapsed_s"]) if job["elapsed_s"] else ""
        say(
            f"{job['job_id']:>10}  {job['name']:<{width}}  {job['state']:<10} {elapsed:>7}  {where}"
        )


def _estimate_left(opened: OpenRun, control: Control, head: int) -> float | None:
    """Seconds to go, by the pace of the last iterations."""
    graph = opened.chain.graph
    if head < 2 or head >= graph.num_iterations:
        return None
    first = max(0, head - 1 - _ETA_FROM)
    ends = []
    for iteration in (first, head - 1):
        commit = _read(opened, control, graph.last_stage(iteration))
        if commit is None:
            return None
        ends.append(float(commit.provenance.get("ended", time.time())))
    return (ends[1] - ends[0]) / max(1, head - 1 - first) * (graph.num_iterations - head)


def _read(opened: OpenRun, control: Control, ref: StageRef) -> Commit | None:
    return read_current(opened.run, opened.chain.graph, control, ref)
