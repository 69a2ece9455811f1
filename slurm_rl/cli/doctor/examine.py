"""The examination: looks at everything in turn, prints a line each, and says how it ended.

It changes nothing of a run. All it writes lies in one folder, `.doctor-<token>`, which it removes;
after a crash the next doctor does.
"""

from __future__ import annotations

import getpass
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from slurm_rl.chain.observe import find_head, read_current
from slurm_rl.cli.doctor.judge_jobs import judge_jobs
from slurm_rl.cli.doctor.judge_run import (
    iteration_bytes,
    judge_purge,
    judge_quota,
    kept_iterations,
)
from slurm_rl.cli.doctor.judge_site import judge_site
from slurm_rl.cli.runs import find_run
from slurm_rl.cli.terminal import say
from slurm_rl.config.load import load_settings
from slurm_rl.config.pools import job_kinds, settings_of_pool
from slurm_rl.config.schema import POOL_PREFIX, Settings
from slurm_rl.errors import (
    NothingDone,
    SchedulerError,
    SchedulerUnavailable,
    SlurmRlError,
    UserError,
)
from slurm_rl.launch.build import OpenRun
from slurm_rl.launch.doctor_folder import find_parent, work_folder
from slurm_rl.launch.quota import read_quota
from slurm_rl.launch.shell import find_inputs, make_order
from slurm_rl.launch.site import read_site
from slurm_rl.launch.site_jobs import run_site_jobs, side_settings
from slurm_rl.launch.stage_check import check_stage
from slurm_rl.storage.control import read_control
from slurm_rl.storage.probe import (
    Finding,
    find_mount,
    judge_clock,
    judge_mount,
    judge_space,
    probe_files,
    probe_flock,
)
from slurm_rl.storage.rundir import RunDir
from slurm_rl.storage.snapshot import snapshot_code
from slurm_rl.storage.space import read_room
from slurm_rl.types import Order, StageRef

STAGES = ("train", "rollout", "init", "reference", "teacher", "critic")


@dataclass
class Report:
    """Findings as they come; printed at once unless they are for a program."""

    as_json: bool
    findings: list[Finding] = field(default_factory=list)

    def add(self, found: Iterable[Finding]) -> None:
        for finding in found:
            self.findings.append(finding)
            if not self.as_json:
                say(finding.line)

    def tell(self, text: str) -> None:
        """Progress, beside what is printed."""
        sys.stderr.write(f"slurm-rl doctor: {text}\n")
        sys.stderr.flush()

    def close(self, target: Path) -> None:
        """The end. Raises SchedulerError if the site is what is bad, UserError for the rest."""
        bad = [finding for finding in self.findings if finding.level == "bad"]
        num_warn = sum(finding.level == "warn" for finding in self.findings)
        if self.as_json:
            facts = {"target": str(target), "bad": len(bad), "warn": num_warn}
            facts |= {"findings": [finding.as_json() for finding in self.findings]}
            say(json.dumps(facts, indent=2))
        if not bad:
            if not self.as_json:
                say(f"{target}: nothing is bad, {num_warn} warning(s)")
            return
        names = ", ".join(dict.fromkeys(finding.name for finding in bad))
        error = SchedulerError if all(f.area == "site" for f in bad) else UserError
        raise error(f"{target}: bad: {names}", hint="what to set stands behind each")


def examine(
    target: Path,
    overrides: list[str],
    *,
    stage: str | None,
    jobs: bool,
    patience_s: float,
    as_json: bool,
) -> None:
    """Look at `target`, a configuration or a run; raise if something is bad."""
    settings, opened = _load(target, overrides)
    _check_arguments(settings, stage, jobs=jobs)
    if stage is not None and stage.startswith(POOL_PREFIX):
        settings, stage = settings_of_pool(settings, stage.removeprefix(POOL_PREFIX)), "rollout"
    report = Report(as_json)
    run_dir = settings.run_dir.absolute() if opened is None else opened.run.root
    try:
        with work_folder(find_parent(run_dir)) as folder:
            if stage is not None:
                _examine_stage(settings, opened, folder, stage, report, patience_s)
            else:
                report.add(examine_files(settings, opened, folder, jobs=jobs))
                if settings.launcher == "slurm":
                    _examine_site(settings, folder, report, jobs=jobs, patience_s=patience_s)
    except PermissionError as error:
        found = f"{error.filename}: not yours to write in"
        report.add([Finding("bad", "run.dir", found, "choose another run.dir")])
    report.close(target)


def _load(target: Path, overrides: list[str]) -> tuple[Settings, OpenRun | None]:
    """The settings of a configuration, or of a run, which then is open."""
    if target.is_dir():
        if overrides:
            raise UserError("--set is for a configuration; a run has its settings")
        opened = find_run(target)
        return opened.settings, opened
    return load_settings(target, overrides), None


def _check_arguments(settings: Settings, stage: str | None, *, jobs: bool) -> None:
    kinds = [kind for kind in job_kinds(settings) if kind.startswith(STAGES)]
    if stage is not None and stage not in kinds:
        raise UserError(f"--stage = {stage!r} is not one of {', '.join(kinds)}")
    if stage is not None and not jobs:
        raise UserError("--stage submits a job, and --no-jobs forbids that")


def examine_files(
    settings: Settings, opened: OpenRun | None, folder: Path, *, jobs: bool
) -> Iterator[Finding]:
    """The file system of the run directory, from this machine."""
    is_slurm = settings.launcher == "slurm"
    mount = find_mount(folder)
    yield judge_mount(mount, is_shared=is_slurm)
    place = folder / "files"
    place.mkdir()
    yield from probe_files(place)
    yield probe_flock(place)
    began = time.time()
    (place / "clock").touch()
    yield judge_clock((place / "clock").stat().st_mtime, (began + time.time()) / 2)
    room, kept = read_room(folder), kept_iterations(settings)
    each = iteration_bytes(settings)
    yield from judge_space(room.free_bytes, room.free_files, each_bytes=each, kept=kept)
    quota, tool = read_quota(mount, user=getpass.getuser())
    yield from judge_quota(quota, tool, needs_bytes=None if each is None else each * kept)
    yield judge_purge(settings, iteration_s=None if opened is None else measure_pace(opened))
    if is_slurm and not jobs:
        found = "not looked at (--no-jobs): other nodes may see files late, or not at all"
        yield Finding("warn", "visibility", found, "leave --no-jobs out once")


def measure_pace(opened: OpenRun) -> float | None:
    """Seconds from one committed iteration to the next, on the whole; None before there are two."""
    control, graph = read_control(opened.run), opened.chain.graph
    head = find_head(opened.run, graph, control)
    if head < 2:
        return None
    ends = []
    for iteration in (0, head - 1):
        commit = read_current(opened.run, graph, control, graph.last_stage(iteration))
        if commit is None or "ended" not in commit.provenance:
            return None
        ends.append(float(commit.provenance["ended"]))
    return max(0.0, ends[1] - ends[0]) / (head - 1)


def _examine_site(
    settings: Settings, folder: Path, report: Report, *, jobs: bool, patience_s: float
) -> None:
    try:
        site = read_site(user=getpass.getuser())
    except SchedulerUnavailable as error:
        hint = error.hint or "try again; nothing else of the site is looked at"
        report.add([Finding("bad", "Slurm", error.message, hint, area="site")])
        return
    report.add(judge_site(settings, site))
    if jobs:
        found = run_site_jobs(settings, folder, patience_s=patience_s, say=report.tell)
        report.add(judge_jobs(settings, found))


def _examine_stage(
    settings: Settings,
    opened: OpenRun | None,
    folder: Path,
    kind: str,
    report: Report,
    patience_s: float,
) -> None:
    try:
        if opened is not None:
            own, order = settings, _order_of_run(opened, kind, folder)
        else:
            own = side_settings(settings, folder)
            order = _order_of_config(own, kind, folder)
    except SlurmRlError as error:
        report.add([Finding("bad", kind, error.message, error.hint, area="stage")])
        return
    report.add(check_stage(own, folder, order, patience_s=patience_s, say=report.tell))


def _order_of_run(opened: OpenRun, kind: str, folder: Path) -> Order:
    """As the next stage of that kind will get it; its inputs are looked at if they are there."""
    control, graph = read_control(opened.run), opened.chain.graph
    head = min(find_head(opened.run, graph, control), graph.num_iterations - 1)
    ref = StageRef(0 if kind == "init" else head, kind)
    try:
        inputs = list(find_inputs(opened, control, ref).values())
    except NothingDone:
        inputs = []  # not committed yet: the stage will wait for them
    return make_order(opened, control, ref, inputs=inputs, attempt=folder)


def _order_of_config(side: Settings, kind: str, folder: Path) -> Order:
    """For a run that is not there: the folder stands in for its directory. Raises ConfigError."""
    run = RunDir(side.run_dir)
    run.fs.mkdir(run.root)
    digest = snapshot_code(run, [Path(path) for path in side.code])
    return Order(
        run_dir=str(run.root),
        run_id="doctor",
        kind=kind,
        iteration=0,
        timeline=0,
        attempt_dir=str(folder),
        settings_path="",
        code_dir=str(run.code_dir(digest)) if digest else "",
        inputs={},
    )
