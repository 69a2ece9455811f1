"""logs: the log files of the newest attempt of a stage."""

from __future__ import annotations

import itertools
from pathlib import Path

from slurm_rl.chain.observe import find_head
from slurm_rl.chain.slots import slots_of
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
    known += [rule.kind for rule in graph.evals]
    if stage not in known:
        close = nearest(stage, known)
        raise NoRunError(
            f"{opened.run.root}: {stage!r} is not one of its stages: {', '.join(known)}",
            hint=f"did you mean {close}?" if close else "choose one",
        )


def find_logs(opened: OpenRun, iteration: int | None, stage: str | None) -> list[Path]:
    """Log files of the newest attempt of the wanted stage, and of the jobs that made it."""
    graph = opened.chain.graph
    control = read_control(opened.run)
    head = find_head(opened.run, graph, control)
    wanted = [iteration] if iteration is not None else [head, head - 1]
    for i in wanted:
        kinds = []
        if 0 <= i < graph.num_iterations:
            kinds = [node.kind for node in graph.stages(i) if stage in (None, node.kind)]
        if stage is not None and graph.has_eval(StageRef(i, stage)):
            kinds = [stage]  # of an evaluation, `i` is the version
        for kind in reversed(kinds):
            found: list[Path] = []
            for slot in slots_of(graph, control, StageRef(i, kind)):
                claim = read_latest_claim(opened.run, slot)
                if claim is not None:
                    found += sorted(attempt_dir(opened.run, slot, claim).glob("*.log"))
            if found:
                labels = {link.label for link in graph.links_of(StageRef(i, kind))}
                jobs = [sorted(opened.run.logs_dir(i).glob(f"{label}.*"))[-1:] for label in labels]
                return [*itertools.chain(*jobs), *found]
    return []
