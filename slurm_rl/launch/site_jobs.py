"""The tiny jobs of `slurm-rl doctor`: submitted, waited for, and always cancelled at the end.

One job of a tick's shape tells whether such jobs run, whether they may submit jobs, and how late
it sees what this machine writes; a second, kept away from the first one's node, how late two
compute nodes see each other. What the answers mean is judged in `cli/doctor/`.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_rl.chain.scheduler import JobState, LinkRequest, QueuedJob
from slurm_rl.config.schema import Settings
from slurm_rl.errors import SchedulerError, SchedulerUnavailable, SlurmRlError
from slurm_rl.launch.ping import Round, Sighting, throw_rounds
from slurm_rl.launch.probe_node import NUM_ROUNDS, PATIENCE_S, job_name
from slurm_rl.launch.slurm import SlurmScheduler

_POLL_S = 0.3
_QUERY_S = 3.0
#: A node may show a job's report late, and a job that ended without one is given up after that.
_AFTER_END_S = 20.0


@dataclass(frozen=True)
class JobAnswer:
    """What became of one tiny job.

    report:  what it wrote; None if it did not get so far.
    problem: why not, in words; refused: sbatch said no.
    """

    report: dict[str, Any] | None = None
    problem: str = ""
    refused: bool = False


@dataclass(frozen=True)
class SiteJobs:
    """What both jobs told. `login` and `nodes`: throws between this machine and the first node,
    and between two nodes."""

    first: JobAnswer
    second: JobAnswer | None = None
    login: tuple[Round, ...] = ()
    nodes: tuple[Round, ...] = ()


def side_settings(settings: Settings, folder: Path) -> Settings:
    """The settings with `folder/run` as the run's directory, for jobs that belong to no run."""
    run = settings.run.model_copy(update={"dir": str(folder), "name": "run"})
    return settings.model_copy(update={"run": run})


def run_site_jobs(
    settings: Settings, folder: Path, *, patience_s: float, say: Callable[[str], None]
) -> SiteJobs:
    """Run both jobs. Raises nothing that the scheduler does: it becomes an answer.

    patience_s: how long each may wait in the queue.
    """
    side = side_settings(settings, folder)
    for name in ("run", "ping"):
        (folder / name).mkdir()
    (folder / "run" / "resolved.json").write_text(side.model_dump_json())
    scheduler = SlurmScheduler(side, side.run.name)
    try:
        first = _run_job(scheduler, side, folder, "first", patience_s, say)
        if first.report is None:
            return SiteJobs(first)
        login = _throw(folder, "login", say)
        (folder / "stop-login").touch()
        excluded = (str(first.report["node"]),)
        second = _run_job(scheduler, side, folder, "second", patience_s, say, excluded)
        rounds = (second.report or {}).get("rounds", [])
        return SiteJobs(first, second, login, tuple(parse_round(entry) for entry in rounds))
    finally:
        with contextlib.suppress(OSError):
            (folder / "stop").touch()
        cancel_jobs(scheduler, folder)


def _throw(folder: Path, channel: str, say: Callable[[str], None]) -> tuple[Round, ...]:
    say("looking how late the node sees what is written here")
    ping = folder / "ping"
    return tuple(throw_rounds(ping, channel=channel, num_rounds=NUM_ROUNDS, patience_s=PATIENCE_S))


def parse_round(raw: dict[str, Any]) -> Round:
    """A round as a node wrote it."""
    there, back = raw["there"], raw["back"]
    return Round(raw["total_s"], there and Sighting(**there), back and Sighting(**back))


def _run_job(
    scheduler: SlurmScheduler,
    settings: Settings,
    folder: Path,
    role: str,
    patience_s: float,
    say: Callable[[str], None],
    exclude: tuple[str, ...] = (),
) -> JobAnswer:
    """Submit one job and wait for its report."""
    name = job_name(settings, folder, role)
    command = ("probe", str(folder), role)
    log = str(folder / f"job-{role}")
    try:
        job_id = scheduler.submit(LinkRequest(name, command, log=log, exclude=exclude))
    except SlurmRlError as error:
        return JobAnswer(problem=error.message, refused=True)
    say(f"waiting for job {job_id} (one core, no GPU), at most {patience_s:.0f} s")
    needed = "rounds" if role == "second" else "host"
    return await_report(
        lambda: _read_report(folder, role, needed),
        lambda: find_job(scheduler, name),
        patience_s=patience_s,
        log=Path(f"{log}.{job_id}.log"),
    )


def await_report(
    read: Callable[[], dict[str, Any] | None],
    look: Callable[[], QueuedJob | None],
    *,
    patience_s: float,
    log: Path,
    run_s: float = 240.0,
) -> JobAnswer:
    """Wait until `read` finds a report, or the job that `look` shows cannot bring one any more.

    patience_s: in the queue; run_s: once it runs. An unanswered query is asked again.
    """
    began, asked = time.monotonic(), 0.0
    running = ended = None
    last: QueuedJob | None = None
    while True:
        report = read()
        if report is not None:
            return JobAnswer(report)
        now = time.monotonic()
        if now - asked > _QUERY_S:
            asked = now
            with contextlib.suppress(SchedulerUnavailable):
                last = look()
                at_work = last is not None and last.state is JobState.RUNNING
                is_over = last is not None and last.state is JobState.ENDED
                running = running or (now if at_work else None)
                ended = ended or (now if is_over else None)
        if ended is not None and now - ended > _AFTER_END_S:
            return JobAnswer(problem=f"it ended without a report: {read_tail(log)}")
        if running is None and ended is None and now - began > patience_s:
            why = (last.reason if last is not None else "") or "no reason told"
            return JobAnswer(problem=f"it did not start within {patience_s:.0f} s ({why})")
        if running is not None and now - running > run_s:
            return JobAnswer(problem=f"no report in {run_s:.0f} s: {read_tail(log)}")
        time.sleep(_POLL_S)


def find_job(scheduler: SlurmScheduler, name: str) -> QueuedJob | None:
    """The job of that name, if the queue shows it. Raises SchedulerUnavailable."""
    return next((job for job in scheduler.query() if job.name == name), None)


def cancel_jobs(scheduler: SlurmScheduler, folder: Path) -> None:
    """Cancel whatever a doctor's folder has in the queue, and wait a moment for its end."""
    token = f"doctor{folder.name.rpartition('-')[2]}"
    for _ in range(20):
        try:
            live = [j for j in scheduler.query() if j.token == token and j.state.is_live]
            if not live:
                return
            scheduler.cancel([job.base_id for job in live])
        except SchedulerError:
            pass
        time.sleep(0.5)


def read_tail(log: Path) -> str:
    """The last line of a log that says something."""
    try:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return f"no log at {log}"
    return lines[-1].strip()[:300] if lines else f"{log} is empty"


def _read_report(folder: Path, role: str, needed: str) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads((folder / f"report-{role}.json").read_bytes())
    except (OSError, ValueError):
        return None
    return found if needed in found else None
