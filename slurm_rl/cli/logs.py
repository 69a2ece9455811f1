"""logs: the log files of the newest attempt of a stage."""

from __future__ import annotations

from pathlib import Path

from slurm_rl.chain.graph import Link
from slurm_rl.chain.observe import find_head
from slurm_rl.chain.slots import link_slots
from slurm_rl.cli.runs import find_run
from slurm_rl.cli.terminal import say
from slurm_rl.config.problems import nearest
from slurm_rl.errors import NoRunError, NothingDone
from slurm_rl.launch.build import OpenRun
from slurm_rl.storage.claims import attempt_dir, read_latest_claim
from slurm_rl.storage.control import read_control
from slurm_rl.storage.records import records_of
from slurm_rl.types import StageRef


def show_logs(
    path: Path, *, iteration: int | None, stage: str | None, num_lines: int, only_list: bool
) -> None:
    """Print the tails of the newest attempt's logs. Raises NothingDone if there are none,
    NoRunError for a stage that there is not."""
    opened = find_run(path)
    if stage is not None:
        _check_stage(opened, stage)
    files = find_logs(opened, iteration, stage)
    folded = records_of(opened.run, iteration) if iteration is not None else []
    if not files and folded:
        raise NothingDone(
            f"{opened.run.root}: the logs of iteration {iteration} are folded into {folded[-1]}",
            hint=f"`tar -xf {folded[-1]} -C FOLDER` unpacks them",
        )
    if not files:
        raise NothingDone(
            f"{opened.run.root}: no log yet",
            hint=f"`slurm-rl status {opened.run.root}` shows its jobs",
        )
    for file in files:
        say(f"==> {file}")
        if not only_list:
            lines = file.read_text(errors="replace").splitlines()
            say("\n".join(lines[-num_lines:]))


def _check_stage(opened: OpenRun, stage: str) -> None:
    graph = opened.chain.graph
    known = [node.kind for node in (*graph.setup, *graph.nodes)]
    known += [link.job_kind for link in graph.links(0) if link.pool]
    known += [rule.kind for rule in graph.evals]
    if stage not in known:
        close = nearest(stage, known)
        raise NoRunError(
            f"{opened.run.root}: {stage!r} is not one of its stages: {', '.join(known)}",
            hint=f"did you mean {close}?" if close else "choose one",
        )


def find_logs(opened: OpenRun, iteration: int | None, stage: str | None) -> list[Path]:
    """Log files of the newest attempts of the wanted stage, or pool of one, and of the jobs that
    made them."""
    graph = opened.chain.graph
    head = find_head(opened.run, graph, read_control(opened.run))
    for i in [iteration] if iteration is not None else [head, head - 1]:
        refs = []
        if 0 <= i < graph.num_iterations:
            refs = [StageRef(i, node.kind) for node in graph.stages(i)]
        if stage is not None and graph.has_eval(StageRef(i, stage)):
            refs = [StageRef(i, stage)]  # of an evaluation, `i` is the version
        for ref in reversed(refs):
            links = graph.links_of(ref)
            if stage not in (None, ref.kind):
                links = tuple(link for link in links if link.job_kind == stage)
            found = [path for link in links for path in _logs_of(opened, link, ref)]
            if found:
                return found
    return []


def _logs_of(opened: OpenRun, link: Link, ref: StageRef) -> list[Path]:
    """Of a link's newest submission, then of the newest attempt at each of a stage's slots."""
    run, found = opened.run, []
    for slot in link_slots(opened.chain.graph, read_control(run), link):
        claim = read_latest_claim(run, slot) if slot.stage == ref else None
        if claim is not None:
            found += sorted(attempt_dir(run, slot, claim).glob("*.log"))
    jobs = sorted(run.logs_dir(link.iteration).glob(f"{link.label}.*"))
    newest = jobs[-1].name.split(".")[1] if jobs else ""
    own = [path for path in jobs if path.name.split(".")[1] == newest]
    return [*own, *found] if found else []
