"""Slurm as the chain's scheduler: sbatch, squeue, scancel and scontrol, each with a timeout.

Owns every effect on Slurm. What a job's text is and what an answer means is decided elsewhere
(`sbatch.py`, `squeue.py`). Of submitit it takes the executor's checks and the job environment;
nothing is pickled, sacct is never asked, and no state is kept: Slurm's view is only a hint.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from submitit.slurm.slurm import (
    SlurmExecutor,
    SlurmJobEnvironment,
    SlurmParseException,
    _parse_node_list,
)

from slurm_rl.chain.scheduler import LinkRequest, QueuedJob
from slurm_rl.config.schema import Settings
from slurm_rl.errors import SchedulerError, SchedulerUnavailable, SubmitRefused
from slurm_rl.launch.environment import scrub_environment
from slurm_rl.launch.sbatch import (
    classify_refusal,
    parse_submission,
    plan_options,
    quote_answer,
    render_job,
)
from slurm_rl.launch.squeue import FORMAT, parse_queue, parse_time

__all__ = ["SlurmScheduler", "expand_nodes", "render_job"]

#: A busy controller takes tens of seconds; sbatch itself retries for two minutes at MaxJobCount.
SUBMIT_TIMEOUT_S = 60.0
QUERY_TIMEOUT_S = 60.0
CONTROL_TIMEOUT_S = 30.0

#: squeue's times as seconds since the epoch, and no array's list cut short.
_SQUEUE_ENV = {"SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}
_JOB_ID = re.compile(r"\d+(?:_\d+)?")
#: Answers of scancel and scontrol that say that there is nothing to do any more.
_OVER = ("invalid job id", "already finished", "already completing", "no longer pending")
_NO_REQUEUE = (*_OVER, "presently disabled", "permission denied", "pending execution")


class SbatchExecutor(SlurmExecutor):  # type: ignore[misc]  # submitit's types say little
    """submitit's executor with our text: one for each submission.

    submitit checks the parameters that it knows; other options of sbatch pass as additional.
    Its own `submit`, which pickles a function and has no timeout, is not used.
    """

    def __init__(self, settings: Settings, request: LinkRequest) -> None:
        super().__init__(folder=settings.run_dir)
        self._job = (settings, request)
        options = plan_options(settings, request)
        known = self._valid_parameters() & options.keys()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its advice about other options is not ours
            self.update_parameters(
                **{name: options[name] for name in known},
                additional_parameters={k: v for k, v in options.items() if k not in known},
            )

    def _make_submission_file_text(self, command: str = "", uid: str = "") -> str:
        return render_job(*self._job)

    def _make_submission_command(self, submission_file_path: Path | None = None) -> list[str]:
        # From its standard input sbatch reads the script: no file is left behind.
        path = [] if submission_file_path is None else [str(submission_file_path)]
        return ["sbatch", "--parsable", *path]

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        text = string if isinstance(string, str) else string.decode(errors="replace")
        job_id = parse_submission(text)
        if job_id is None:
            raise SchedulerUnavailable(
                f"sbatch succeeded and named no job: {quote_answer(text)[:200]!r}"
            )
        return job_id


class SlurmScheduler:
    """Implements `Scheduler`. Makes no call before it is asked something."""

    def __init__(
        self, settings: Settings, run_name: str, *, submit_timeout_s: float = SUBMIT_TIMEOUT_S
    ) -> None:
        self._settings = settings
        self._prefix = f"{run_name}."
        self._submit_timeout_s = submit_timeout_s

    def submit(self, request: LinkRequest) -> str:
        """Submit one job and return its id.

        Raises SubmitRefused, SubmitDeferred, ConfigError; or SchedulerUnavailable, after which
        the job may be there: it is found by its name. If this process dies midway, likewise.
        """
        try:
            executor = SbatchExecutor(self._settings, request)
        except RuntimeError as error:  # submitit's word for a machine without srun
            raise SchedulerUnavailable(str(error), hint=_NO_SLURM) from error
        except ValueError as error:  # submitit lists the valid names
            raise SubmitRefused(f"{request.name}: {quote_answer(str(error))}") from error
        text = executor._make_submission_file_text()
        argv = executor._make_submission_command()
        try:
            done = run_command(argv, timeout_s=self._submit_timeout_s, stdin=text)
        except subprocess.TimeoutExpired as error:
            said = _decode(error.stderr)
            raise classify_refusal(said, name=request.name, timed_out=True) from error
        if done.returncode != 0:
            raise classify_refusal(done.stderr + done.stdout, name=request.name)
        return executor._get_job_id_from_submission_command(done.stdout)

    def query(self) -> list[QueuedJob]:
        """This user's jobs whose name begins with the run's, ended ones that Slurm still knows
        included. One call of squeue. Raises SchedulerUnavailable."""
        # The number: names may be looked up elsewhere, and --me is younger than some sites.
        argv = ["squeue", "-h", "-u", str(os.getuid()), "-t", "all", "-r", "-o", FORMAT]
        done = self._ask(argv, timeout_s=QUERY_TIMEOUT_S, env=_SQUEUE_ENV)
        if done.returncode != 0:
            raise SchedulerUnavailable(f"squeue: {_say(done)}")
        return parse_queue(done.stdout, prefix=self._prefix, now=time.time())

    def cancel(self, job_ids: list[str], *, only_pending: bool = False) -> None:
        """Cancel jobs, or whole arrays by their base id; those that have ended are no error."""
        if not job_ids:
            return
        options = ["--state=PENDING"] if only_pending else []
        done = self._ask(["scancel", *options, *map(_check_id, job_ids)])
        # scancel goes on after an error: what is left in its words is what went wrong.
        wrong = [line for line in done.stderr.splitlines() if not _says(line, _OVER)]
        if done.returncode != 0 and wrong:
            raise SchedulerUnavailable(f"scancel: {quote_answer(chr(10).join(wrong))}")

    def repoint(self, job_id: str, after: tuple[str, ...]) -> None:
        """Let a pending job wait for the ends of all of `after`, or for nothing. No error if it
        is not pending any more."""
        dependency = "afterany:" + ":".join(map(_check_id, after)) if after else ""
        argv = ["scontrol", "update", f"JobId={_check_id(job_id)}", f"Dependency={dependency}"]
        done = self._ask(argv)
        if done.returncode != 0 and not _says(_say(done), _OVER):
            raise SchedulerUnavailable(f"scontrol update: {_say(done)}")

    def was_cancelled(self, job_id: str) -> bool:
        """Whether a running job is being ended by scancel. False if Slurm does not say.

        Asked by the job itself, from its own environment. squeue shows COMPLETING for that and
        for a requeue alike; but a requeue has counted one restart more by then, a preemption has
        a time, and the time limit is a reason.
        """
        done = self._ask(["scontrol", "show", "job", "-o", _check_id(job_id)])
        words = dict(word.partition("=")[::2] for word in done.stdout.split())
        return (
            words.get("JobState") in ("COMPLETING", "CANCELLED")
            and words.get("Restarts") == os.environ.get("SLURM_RESTART_COUNT", "0")
            and words.get("Reason") == "None"
            and words.get("PreemptTime", "None") in ("None", "Unknown", "N/A")
        )

    def read_end_time(self, job_id: str) -> float | None:
        """When a running job's time is over, in seconds since the epoch; None if Slurm does not
        say. Its environment says it from 23.02 on only."""
        argv = ["squeue", "-h", "-j", _check_id(job_id), "-o", "%e"]
        try:
            done = self._ask(argv, timeout_s=5.0, env=_SQUEUE_ENV)
        except SchedulerError:
            return None
        return parse_time(done.stdout.strip()) if done.returncode == 0 else None

    def requeue(self, job_id: str) -> bool:
        """Put a job back in the queue, under the same id; False where Slurm will not."""
        done = self._ask(["scontrol", "requeue", _check_id(job_id)])
        if done.returncode == 0:
            return True
        if _says(_say(done), _NO_REQUEUE):
            return False
        raise SchedulerUnavailable(f"scontrol requeue: {_say(done)}")

    def _ask(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float = CONTROL_TIMEOUT_S,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        try:
            return run_command(argv, timeout_s=timeout_s, env=env)
        except subprocess.TimeoutExpired as error:
            raise SchedulerUnavailable(f"{argv[0]} did not answer in {timeout_s:.0f} s") from error


_NO_SLURM = "Slurm's commands are not on PATH here; on a machine without it use launcher: local"


def run_command(
    argv: Sequence[str],
    *,
    timeout_s: float,
    stdin: str = "",
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands. Raises TimeoutExpired, or SchedulerUnavailable if it cannot
    be started."""
    try:
        return subprocess.run(
            argv,
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            env={**scrub_environment(os.environ), **(env or {})},
            check=False,
        )
    except FileNotFoundError as error:
        raise SchedulerUnavailable(f"{argv[0]} is not there", hint=_NO_SLURM) from error
    except OSError as error:
        raise SchedulerUnavailable(f"{argv[0]} cannot be started: {error.strerror}") from error


def expand_nodes(text: str) -> list[str]:
    """Names of the nodes in a node list such as `a[01-03,7],b`. Raises SchedulerError."""
    try:
        nodes: list[str] = _parse_node_list(text)
    except SlurmParseException as error:
        raise SchedulerError(f"{text!r} is not a list of nodes") from error
    return nodes


def job_nodes() -> list[str]:
    """Names of the nodes of the job that this process is in; of this machine, outside of one."""
    environment: Any = SlurmJobEnvironment()
    return list(environment.hostnames)


def _check_id(job_id: str) -> str:
    """A job id, and not an option of the command."""
    if not _JOB_ID.fullmatch(job_id):
        raise SchedulerError(f"{job_id!r} is not the id of a Slurm job")
    return job_id


def _says(text: str, phrases: tuple[str, ...]) -> bool:
    return any(phrase in text.lower() for phrase in phrases)


def _say(done: subprocess.CompletedProcess[str]) -> str:
    return quote_answer(done.stderr + done.stdout) or f"ended with status {done.returncode}"


def _decode(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""
