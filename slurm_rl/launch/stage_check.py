"""`slurm-rl doctor --stage`: the stage's own job, with the check program in its place.

Everything is the stage's: options, setup lines, container, interpreter, environment, srun. Only
the wall time is five minutes at most, and there is one shard. Under Slurm this module's
`run_check_job` is the batch process (`… job check FOLDER KIND`); locally the command itself starts
the ranks. It claims nothing and lies outside of every slot.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurm_rl.chain.scheduler import LinkRequest
from slurm_rl.config.derive import stage_time_s
from slurm_rl.config.roles import stage_ranks
from slurm_rl.config.schema import Settings
from slurm_rl.errors import SlurmRlError
from slurm_rl.launch.payload import LocalPayload, LocalRunner, SrunRunner
from slurm_rl.launch.probe_node import job_name
from slurm_rl.launch.site_jobs import await_report, cancel_jobs, find_job, read_tail
from slurm_rl.launch.slurm import SlurmScheduler
from slurm_rl.launch.wall_times import format_limit
from slurm_rl.storage.durable import write_file, write_hint
from slurm_rl.storage.probe import Finding
from slurm_rl.types import Order, StageRef, dump_record

logger = logging.getLogger(__name__)

JOB_S = 300
#: What is left of the job's time for saying that the check did not end.
_MARGIN_S = 40
_SIGNAL_S = 20
_POLL_S = 0.2


def shorten(settings: Settings, kind: str) -> Settings:
    """The settings with at most five minutes for the stage's job, and nothing else changed."""
    limit_s = min(JOB_S, stage_time_s(settings, kind) or JOB_S)
    stage = settings.stage(kind)
    changes = {"time": format_limit(limit_s), "time_min": None, "signal_s": _SIGNAL_S}
    shared = settings.slurm.model_copy(update={"time_min": None})
    own = stage.model_copy(update={"slurm": stage.slurm.model_copy(update=changes)})
    return settings.model_copy(update={kind: own, "slurm": shared})


def prepare(folder: Path, settings: Settings, order: Order) -> Path:
    """Write the settings and the order of a check into `folder`; the order's path."""
    attempt = folder / f"check-{folder.name.rpartition('-')[2]}"
    attempt.mkdir()
    path = folder / "resolved.json"
    write_file(path, settings.model_dump_json().encode())
    changed = replace(
        order, kind=f"check.{order.kind}", attempt_dir=str(attempt), settings_path=str(path)
    )
    write_file(attempt / "order.json", dump_record(changed))
    return attempt / "order.json"


def check_stage(
    settings: Settings,
    folder: Path,
    order: Order,
    *,
    patience_s: float,
    say: Callable[[str], None],
) -> list[Finding]:
    """Run the check of the stage `order.kind` and fold what its ranks found.

    settings: of the stage, with a `run_dir` that exists. Nothing that fails is raised.
    """
    kind, short = order.kind, shorten(settings, order.kind)
    order_path = prepare(folder, short, order)
    world = stage_ranks(settings, kind)
    try:
        if settings.launcher == "local":
            say(f"starting the {kind} stage's {world} process(es) here")
            payload = LocalRunner(short).start(order_path, kind=kind)
            status, problem = str(wait_for_payload(payload, JOB_S)), ""
        else:
            status, problem = _run_job(short, folder, kind, patience_s, say)
    except SlurmRlError as error:
        return [Finding("bad", f"{kind} job", error.message, error.hint, area="site")]
    if problem:
        return [Finding("bad", f"{kind} job", problem, area="site")]
    return fold_ranks(order_path.parent, num_expected=world, status=status)


def _run_job(
    settings: Settings,
    folder: Path,
    kind: str,
    patience_s: float,
    say: Callable[[str], None],
) -> tuple[str, str]:
    """(the check's status, what kept it from ending)."""
    scheduler = SlurmScheduler(settings, settings.run.name)
    name, log = job_name(settings, folder, kind), str(folder / "job")
    command = ("check", str(folder), kind)
    try:
        job_id = scheduler.submit(LinkRequest(name, command, (StageRef(0, kind),), log=log))
        say(f"waiting for job {job_id}, at most {patience_s:.0f} s in the queue")
        answer = await_report(
            lambda: _read_end(folder),
            lambda: find_job(scheduler, name),
            patience_s=patience_s,
            log=Path(f"{log}.{job_id}.log"),
            run_s=float(JOB_S),
        )
    finally:
        cancel_jobs(scheduler, folder)
    return ("", answer.problem) if answer.report is None else (str(answer.report["status"]), "")


def run_check_job(argv: list[str]) -> int:
    """The batch process: start the check as the stage is started, and tell how it ended."""
    folder, kind = Path(argv[0]), argv[1]
    settings = Settings.model_validate_json((folder / "resolved.json").read_bytes())
    order_path = next(folder.glob("check-*/order.json"))
    payload = SrunRunner(settings).start(order_path, kind=kind)
    status = wait_for_payload(payload, (stage_time_s(settings, kind) or JOB_S) - _MARGIN_S)
    write_hint(folder / "end.json", json.dumps({"status": status}).encode())
    return 0 if status == 0 else 1


def wait_for_payload(payload: LocalPayload, limit_s: float) -> int | None:
    """The program's exit status; None if it had to be ended."""
    deadline = time.monotonic() + limit_s
    while (status := payload.poll()) is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    if status is None:
        payload.kill()
    return status


def fold_ranks(folder: Path, *, num_expected: int, status: str) -> list[Finding]:
    """One line for what all ranks found alike; one for each rank where they differ.

    A rank that is missing, or that was still at something when time was up, is a finding too.
    """
    reports = [_read_report(folder, rank) for rank in range(num_expected)]
    told = [report for report in reports if report is not None]
    missing = [rank for rank, report in enumerate(reports) if report is None]
    found = []
    if missing:
        tail = read_tail(folder / f"rank-{missing[0]}.log")
        srun = read_tail(folder / "srun.log") if (folder / "srun.log").exists() else ""
        said = f"rank(s) {', '.join(map(str, missing))} said nothing (status {status}): {tail}"
        found.append(Finding("bad", "ranks", f"{said} {srun}".strip(), area="stage"))
    for report in told:
        if report["at"]:
            said = f"rank {report['rank']} on {report['host']} never came back from it"
            found.append(Finding("bad", report["at"], said, area="stage"))
    found += _fold_alike(told, num_expected)
    return sorted(found, key=lambda entry: _ORDER[entry.level])


def _fold_alike(told: list[dict[str, Any]], num_expected: int) -> list[Finding]:
    """Findings of all ranks. What is well everywhere is said once, in the first rank's words:
    numbers such as seconds differ."""
    lines: dict[Finding | str, tuple[Finding, list[str]]] = {}
    for report in told:
        for raw in report["findings"]:
            finding = Finding(**raw)
            key = finding.name if finding.level == "ok" else finding
            who = f"{report['rank']}@{report['host']}"
            lines.setdefault(key, (finding, []))[1].append(who)
    return [_name_ranks(finding, ranks, num_expected) for finding, ranks in lines.values()]


_ORDER = {"ok": 0, "warn": 1, "bad": 2}


def _name_ranks(finding: Finding, ranks: list[str], num_expected: int) -> Finding:
    if num_expected == 1:
        return finding
    if len(ranks) == num_expected:
        return replace(finding, found=f"{finding.found} (all {num_expected} ranks)")
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return replace(finding, found=f"{finding.found} (ranks {', '.join(ranks[:4])}{more})")


def _read_report(folder: Path, rank: int) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads((folder / f"findings-{rank}.json").read_bytes())
    except (OSError, ValueError):
        return None
    return found


def _read_end(folder: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads((folder / "end.json").read_bytes())
    except (OSError, ValueError):
        return None
    return found
