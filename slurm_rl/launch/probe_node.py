"""What a tiny job finds out on a node, for `slurm-rl doctor`: `… job probe FOLDER ROLE`.

`first` reports, tries to submit a job from where it is (the job is begun in an hour and cancelled
at once), and then throws back what others throw, until the folder says `stop`. `second`, on
another node, reports and throws to the first. Both have the shape of a tick: one core, no GPU.
Nothing of a run is read or written; reports lie in the folder as `report-ROLE.json`.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slurm_rl.chain.scheduler import LinkRequest
from slurm_rl.config.schema import Settings
from slurm_rl.errors import SchedulerError, SlurmRlError
from slurm_rl.launch.ping import echo, throw_rounds
from slurm_rl.launch.slurm import SlurmScheduler
from slurm_rl.rollout.sandbox.runner import describe, find_isolation
from slurm_rl.storage.claims import node_name
from slurm_rl.storage.durable import write_hint
from slurm_rl.storage.probe import find_mount

NUM_ROUNDS = 3
#: A name that takes longer than readers wait is as good as never seen.
PATIENCE_S = 60.0
#: A first job whose doctor is gone leaves by itself.
_LIFE_S = 480.0
_BEGIN_S = 3600.0


def run_probe(argv: list[str]) -> int:
    """The job's program; 0 if it could report. If it dies midway, its report is missing."""
    folder, role = Path(argv[0]), argv[1]
    settings = Settings.model_validate_json((folder / "run" / "resolved.json").read_bytes())
    began = time.monotonic()
    report = look_at_node(folder)
    if role == "first":
        report["submission"] = try_submission(settings, folder)
    _write(folder, role, report)
    if role == "first":
        echo(folder / "ping", channel="login", is_over=lambda: _is_over(folder, began, "login"))
        echo(folder / "ping", channel="nodes", is_over=lambda: _is_over(folder, began, "nodes"))
    else:
        rounds = throw_rounds(
            folder / "ping", channel="nodes", num_rounds=NUM_ROUNDS, patience_s=PATIENCE_S
        )
        _write(folder, role, report | {"rounds": [asdict(entry) for entry in rounds]})
    return 0


def _is_over(folder: Path, began: float, channel: str) -> bool:
    names = os.listdir(folder) if folder.is_dir() else ["stop"]
    return f"stop-{channel}" in names or "stop" in names or time.monotonic() - began > _LIFE_S


def look_at_node(folder: Path) -> dict[str, Any]:
    """What can be seen of the node without any help."""
    mount = find_mount(folder)
    clock = folder / f".clock-{os.getpid()}"
    clock.touch()
    off_s = clock.stat().st_mtime - time.time()
    clock.unlink()
    return {
        "host": socket.gethostname(),
        "node": node_name(),
        "job_id": os.environ.get("SLURM_JOB_ID", ""),
        "mount": None if mount is None else mount.kind,
        "clock_off_s": off_s,
        "user_namespaces": try_namespaces(),
        "sandbox": describe(find_isolation()),
        "cgroup": Path("/proc/self/cgroup").read_text(),
        "address": find_address(),
    }


def try_namespaces() -> str:
    """Empty if an unprivileged process may make a user namespace; else what it was told."""
    if shutil.which("unshare") is None:
        return "unshare is not there"
    argv = ["unshare", "--user", "--map-root-user", "true"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=10, check=False)
    except subprocess.TimeoutExpired:
        return "unshare did not end"
    return "" if done.returncode == 0 else done.stderr.strip() or f"status {done.returncode}"


def find_address() -> str:
    """What this node's name leads to; empty if nowhere."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def try_submission(settings: Settings, folder: Path) -> dict[str, Any]:
    """Submit a job from here by the very code that ticks use, and cancel it.

    If this process dies in between, the job finds no folder in an hour and ends.
    """
    scheduler = SlurmScheduler(settings, settings.run.name)
    name = job_name(settings, folder, "never")
    command = ("probe", str(folder), "never")
    request = LinkRequest(name, command, begin_s=_BEGIN_S, log=str(folder / "never"))
    try:
        job_id = scheduler.submit(request)
    except SlurmRlError as error:
        return {"ok": False, "error": type(error).__name__, "said": error.message}
    try:
        seen = any(job.name == name for job in scheduler.query())
        scheduler.cancel([job_id])
    except SchedulerError as error:
        return {"ok": False, "error": type(error).__name__, "said": error.message}
    return {"ok": True, "seen": seen}


def job_name(settings: Settings, folder: Path, role: str) -> str:
    """The name of a doctor's job. Its token is no hexadecimal number, as those of runs are."""
    return f"{settings.run.name}.doctor-{role}.doctor{folder.name.rpartition('-')[2]}"


def _write(folder: Path, role: str, report: dict[str, Any]) -> None:
    write_hint(folder / f"report-{role}.json", json.dumps(report).encode())
