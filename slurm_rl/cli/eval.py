"""eval: what was measured of which version, and an evaluation of any version that is still there.

It wishes and looks; the evaluation itself is a stage like others, done by a job, or here (`--now`).
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurm_rl.chain.advance import advance, look
from slurm_rl.chain.evals import Evals, read_evals
from slurm_rl.chain.observe import find_head, read_current
from slurm_rl.chain.outages import describe_outage
from slurm_rl.chain.view import View
from slurm_rl.cli.runs import check_iteration, find_own_run, find_run
from slurm_rl.cli.submit import report
from slurm_rl.cli.terminal import say
from slurm_rl.config.problems import nearest
from slurm_rl.config.schema import EVAL_PREFIX
from slurm_rl.config.stages import eval_kinds
from slurm_rl.errors import ConfigError, NothingDone, PrunedError
from slurm_rl.launch.build import OpenRun
from slurm_rl.launch.here import run_here
from slurm_rl.storage.commits import has_commit
from slurm_rl.storage.control import read_control, write_budget
from slurm_rl.storage.evals import forgive_given_up, publish_wish, read_given_up
from slurm_rl.storage.leases import hold
from slurm_rl.storage.owner import current_user
from slurm_rl.storage.tombstones import is_condemned, is_pruned
from slurm_rl.types import StageRef


def evaluate(
    path: Path, *, version: int | None, names: list[str], now: bool, as_json: bool
) -> None:
    """List what there is; with a version, evaluate it, and show the results that it has.

    Raises PrunedError, naming the nearest versions that can be, if its weights are gone, and
    ConfigError for options that would have no effect.
    """
    if version is None and now:
        raise ConfigError(
            "--now evaluates one version, and none is named", hint="say which with --version"
        )
    if version is not None and as_json:
        raise ConfigError(
            "--json is of the list, and --version evaluates",
            hint="`slurm-rl eval RUN --json` lists all versions",
        )
    if version is None:
        _show_list(find_run(path), names, as_json=as_json)
        return
    opened = find_own_run(path)
    refs = [StageRef(version, kind) for kind in _choose_kinds(opened, names)]
    open_refs = [ref for ref in refs if not _show_result(opened, ref)]
    if open_refs:
        want(opened, open_refs)
        _move_on(opened, open_refs, now=now)


def want(opened: OpenRun, refs: list[StageRef]) -> None:
    """Record the wish for evaluations of one version; those that were given up are open again.

    The weights are held meanwhile, so that they are there when the wish is seen. A crash leaves
    some of the wishes. Raises NoRunError, NothingDone or PrunedError where there are no weights.
    """
    evals = read_all(opened)
    _check_weights(opened, evals, refs[0].iteration)
    slot = evals.weights_slot(refs[0])
    by = f"{current_user()}@{socket.gethostname()}"
    try:
        with hold(opened.run, [slot], holder=f"eval by {by}", clock=opened.chain.clock):
            for ref in refs:
                publish_wish(opened.run, ref, by=by)
    except PrunedError as error:
        raise _explain_pruned(opened, evals, refs[0].iteration) from error
    forgiven: dict[str, int] = {}
    for ref in refs:
        given_up = read_given_up(opened.run, evals.control, evals.slot(ref))
        if given_up is not None:
            forgiven |= forgive_given_up(given_up, evals.slot(ref))
    if forgiven:
        write_budget(opened.run, forgiven)


def _move_on(opened: OpenRun, refs: list[StageRef], *, now: bool) -> None:
    root, control = opened.run.root, read_control(opened.run)
    if control.stopped:
        what = "halted" if control.halt is not None else "paused"
        say(f"{root}: noted; the run is {what}: `slurm-rl resume {root}` goes on")
        return
    if now:
        for ref in refs:
            say(f"{ref}: evaluating here")
            run_here(opened, ref)
            if not _show_result(opened, ref):
                raise NothingDone(f"{root}: {ref} has no result: {_why_not(opened, ref)}")
        return
    outcome = advance(opened.chain)
    report(opened, outcome)
    for row in _rows(opened, look(opened.chain), refs):
        say(f"{row['ref']}: {row['state']}")
    say(f"see the result with: slurm-rl eval {root} --version {refs[0].iteration}")


def _why_not(opened: OpenRun, ref: StageRef) -> str:
    view = look(opened.chain)
    slots = [slot for seen in view.evals if seen.link.anchor == ref for slot in seen.slots]
    given_up = read_given_up(opened.run, view.control, read_all(opened).slot(ref))
    if given_up is not None:
        return given_up.reason
    said = [slot.last_error or slot.last_outage for slot in slots]
    return next(filter(None, said), "see its log")


# -- results ------------------------------------------------------------------------------------


def read_metrics(opened: OpenRun, ref: StageRef) -> dict[str, Any]:
    """The metrics of an evaluation that is committed; empty if it is not."""
    control = read_control(opened.run)
    commit = read_current(opened.run, opened.chain.graph, control, ref)
    return dict(commit.provenance.get("metrics", {})) if commit is not None else {}


def main_numbers(metrics: dict[str, Any], kind: str) -> str:
    """The few numbers that an evaluation is about: its mean, pass@k and maj@k."""
    stem = f"eval/{kind.removeprefix(EVAL_PREFIX)}"
    found = [(stem, "mean")]
    found += [
        (name, name.removeprefix(f"{stem}/"))
        for name in sorted(metrics, key=lambda name: (name.partition("@")[0], len(name), name))
        if name.startswith((f"{stem}/pass@", f"{stem}/maj@"))
    ]
    numbers = [f"{label} {metrics[name]:.4g}" for name, label in found if name in metrics]
    return "  ".join(numbers)


def newest_results(opened: OpenRun) -> dict[str, tuple[int, str]]:
    """Of each evaluation the newest version that has a result, and its numbers.

    It looks at the last few that were due, and at those that somebody wished for.
    """
    evals, graph, found = read_all(opened), opened.chain.graph, {}
    for kind in eval_kinds(opened.settings):
        refs = [*graph.earlier(kind, before=evals.newest + 1, most=8), *evals.wishes]
        refs.append(StageRef(graph.num_iterations, kind))
        for ref in sorted((ref for ref in refs if ref.kind == kind), reverse=True):
            if has_commit(opened.run, evals.slot(ref)):
                found[kind] = (ref.iteration, main_numbers(read_metrics(opened, ref), kind))
                break
    return found


def _show_result(opened: OpenRun, ref: StageRef) -> bool:
    """Print the result of an evaluation; whether it has one."""
    control = read_control(opened.run)
    if read_current(opened.run, opened.chain.graph, control, ref) is None:
        return False
    metrics = read_metrics(opened, ref)
    say(f"{ref}: {main_numbers(metrics, ref.kind) or 'done'}")
    return True


def _show_list(opened: OpenRun, names: list[str], *, as_json: bool) -> None:
    kinds = _choose_kinds(opened, names)
    evals = read_all(opened)
    refs = [ref for ref in evals.wanted(0, evals.newest) if ref.kind in kinds]
    rows = list(_rows(opened, look(opened.chain), refs))
    if as_json:
        say(json.dumps(rows, indent=2))
        return
    width = max([len(row["set"]) for row in rows], default=3)
    say(f"{'version':>7}  {'set':<{width}}  result")
    for row in rows:
        numbers = main_numbers(row["metrics"], f"{EVAL_PREFIX}{row['set']}")
        say(f"{row['version']:>7}  {row['set']:<{width}}  {numbers or row['state']}")


def _rows(opened: OpenRun, view: View, refs: list[StageRef]) -> Iterator[dict[str, Any]]:
    """What there is to say of each evaluation."""
    for ref in refs:
        yield {
            "ref": str(ref),
            "version": ref.iteration,
            "set": ref.kind.removeprefix(EVAL_PREFIX),
            "state": describe(opened, view, ref),
            "metrics": read_metrics(opened, ref),
        }


def describe(opened: OpenRun, view: View, ref: StageRef) -> str:
    """The state of an evaluation, in words."""
    evals = read_all(opened)
    if has_commit(opened.run, evals.slot(ref)):
        return "done"
    given_up = read_given_up(opened.run, view.control, evals.slot(ref))
    if given_up is not None:
        log = f" (log: {given_up.log})" if given_up.log else ""
        return f"given up: {given_up.reason}{log}"
    if is_pruned(opened.run, evals.weights_slot(ref)):
        return "its weights were pruned"
    for seen in view.evals:
        if seen.link.anchor == ref:
            if seen.slots[0].num_deferrals:
                return describe_outage(seen.slots[0], now=view.now)
            live = [job for job in view.jobs_of(seen) if job.state.is_live]
            if live:
                return f"job {live[0].job_id} is {(live[0].raw or live[0].state.value).lower()}"
    return "due"


# -- what can be evaluated ----------------------------------------------------------------------


def read_all(opened: OpenRun) -> Evals:
    """What is wanted of the run as it is now."""
    run, graph, control = opened.run, opened.chain.graph, read_control(opened.run)
    return read_evals(run, graph, control, head=find_head(run, graph, control))


def _choose_kinds(opened: OpenRun, names: list[str]) -> list[str]:
    """Kinds of the named evaluations, of all if none is named. Raises ConfigError."""
    known = list(opened.settings.eval)
    if not known:
        raise ConfigError(
            f"{opened.run.root}: there are no evaluations (`eval` is empty)",
            hint=f"`slurm-rl set {opened.run.root} eval.NAME.prompt_data=FILE` adds one",
        )
    for name in names:
        if name not in known:
            close = nearest(name, known)
            fix = f"did you mean {close}?" if close else f"there are {', '.join(known)}"
            raise ConfigError(f"{name!r} is not an evaluation of {opened.run.root}", hint=fix)
    return [f"{EVAL_PREFIX}{name}" for name in known if not names or name in names]


def _check_weights(opened: OpenRun, evals: Evals, version: int) -> None:
    check_iteration(opened.chain.graph, version, of="version")
    if version > evals.newest:
        raise NothingDone(
            f"{opened.run.root}: version {version} of the weights is not there yet",
            hint=f"the newest is {evals.newest}" if evals.newest >= 0 else "let the run begin",
        )
    if is_condemned(opened.run, evals.weights_slot(StageRef(version, "eval"))):
        raise _explain_pruned(opened, evals, version)


def _explain_pruned(opened: OpenRun, evals: Evals, version: int) -> PrunedError:
    """Names the nearest kept versions on either side."""

    def is_there(other: int) -> bool:
        return not is_condemned(opened.run, evals.weights_slot(StageRef(other, "eval")))

    below = next((v for v in range(version - 1, -1, -1) if is_there(v)), None)
    above = next((v for v in range(version + 1, evals.newest + 1) if is_there(v)), None)
    near = " and ".join(str(v) for v in (below, above) if v is not None)
    return PrunedError(
        f"{opened.run.root}: the weights of version {version} were pruned by retention, or are"
        " about to be",
        hint=f"the nearest that are there: {near}; or copy them back from the archive",
    )
