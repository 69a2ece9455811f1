"""The text of a job, and what sbatch's answer means. Pure: submits nothing.

Owns the options that are ours (name, log, array, dependency, signal, requeue), how the user's
are written, and the template `sbatch/job.sh`. Values are quoted for what reads them: sbatch for
`#SBATCH` lines, the shell for the command. Secrets never come here: the supervisor reads
`env_file` when it starts.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from slurm_rl.chain.scheduler import LinkRequest, WallTime
from slurm_rl.config.derive import (
    AUTO,
    parse_wall_time,
    stage_fallback,
    stage_signal_s,
    stage_slurm,
)
from slurm_rl.config.roles import num_ranks
from slurm_rl.config.schema import Settings
from slurm_rl.config.stages import is_megatron_stage
from slurm_rl.errors import (
    ConfigError,
    SchedulerError,
    SchedulerUnavailable,
    SubmitDeferred,
    SubmitRefused,
)

_PACKAGE_DIR = Path(__file__).resolve().parents[1]
#: In a wheel, then in a checkout.
_TEMPLATES = (_PACKAGE_DIR / "_sbatch" / "job.sh", _PACKAGE_DIR.parent / "sbatch" / "job.sh")
_PLACES = ("options", "setup", "command")
_PLACE = re.compile(r"\{\{(\w+)\}\}")
#: Characters that sbatch's own reader of `#SBATCH` lines takes as they are.
_PLAIN = re.compile(r"[\w@%+=:,./*-]+", re.ASCII)
#: Any of these says how many tasks there are.
_TASK_OPTIONS = ("ntasks", "ntasks_per_node", "ntasks_per_gpu", "gpus_per_task")


def render_job(settings: Settings, request: LinkRequest) -> str:
    """Exactly what sbatch is given. Reads the template and nothing else.

    Raises ConfigError for a template or a value that cannot be used.
    """
    options = plan_options(settings, request)
    python = settings.host_python or sys.executable
    command = [python, "-m", "slurm_rl.launch.job", *request.command]
    for word in (*settings.setup, *command):
        _check_line(word, "a line of setup or the command")
    parts = {
        "options": "\n".join(
            _render_option(name, value) for name, value in options.items() if value is not False
        ),
        "setup": "\n".join(settings.setup) or "# (no setup lines)",
        "command": shlex.join(command),
    }
    return fill_template(read_template(settings.sbatch_template), parts)


def plan_options(settings: Settings, request: LinkRequest) -> dict[str, Any]:
    """sbatch's options by name with underscores, in the order in which they are written."""
    kind = request.job_kind
    user = dict(stage_slurm(settings, kind))
    ours: dict[str, Any] = {"job_name": request.name}
    pattern = "%A_%a" if request.shards else "%j"
    ours["output"] = f"{request.log.replace('%', '%%')}.{pattern}.log"
    ours["open_mode"] = "append"  # else a requeue empties the log
    # Python looks for modules where it starts: not in whatever directory one submits from.
    ours["chdir"] = str(settings.run_dir)
    if not user.get("no_requeue"):
        ours["no_requeue" if user.pop("requeue", True) is False else "requeue"] = True
    _learn_times(request.wall or WallTime(), ours, user, stage_signal_s(settings, kind))
    if request.fallback:
        _go_elsewhere(settings, kind, user)
    if request.shards:
        throttle = settings.rollout.array_throttle
        ours["array"] = format_ranges(request.shards) + (f"%{throttle}" if throttle else "")
    if request.after:
        ours["dependency"] = "afterany:" + ":".join(request.after)
    if request.begin_s is not None:
        ours["begin"] = f"now+{math.ceil(request.begin_s)}"
    if request.exclude:
        own = [str(user["exclude"])] if user.get("exclude") else []
        user["exclude"] = ",".join([*own, *request.exclude])
    if is_megatron_stage(settings, kind):
        _add_tasks(settings, kind, user)
    if settings.gpu_request == "gres":
        _move_gpus(user)
    return ours | user


def _learn_times(wall: WallTime, ours: dict[str, Any], user: dict[str, Any], signal_s: int) -> None:
    """The warning before the time limit, and the limit itself where it is to be learnt."""
    ours["signal"] = f"B:USR1@{wall.signal_s or signal_s}"
    if user.get("time") == AUTO:
        del user["time"]
        if wall.limit_s is not None:
            user["time"] = format_wall_time(wall.limit_s)
        asked = user.pop("time_min", None)
        asked_s = None if asked is None else parse_wall_time(str(asked))
        shortest_s = wall.shortest_s if asked_s is None else asked_s
        if shortest_s is not None and wall.limit_s is not None:
            user["time_min"] = format_wall_time(min(shortest_s, wall.limit_s))


def format_wall_time(seconds: int) -> str:
    """Seconds as Slurm's `days-hours:minutes:seconds`.

    >>> format_wall_time(90061)
    '1-01:01:01'
    """
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02d}:{minutes:02d}:{rest:02d}"


def _go_elsewhere(settings: Settings, kind: str, options: dict[str, Any]) -> None:
    """The partition and quality of service of the stage's fallback."""
    fallback = stage_fallback(settings, kind)
    if fallback is not None:
        options |= fallback.model_dump(include={"partition", "qos"}, exclude_none=True)


def _add_tasks(settings: Settings, kind: str, options: dict[str, Any]) -> None:
    """One task for each rank, where the user has not said: else srun finds too few."""
    ranks = num_ranks(settings, kind)
    if ranks > 1 and not any(name in options for name in _TASK_OPTIONS):
        options["ntasks_per_node"] = math.ceil(ranks / int(options.get("nodes", 1)))


def _move_gpus(options: dict[str, Any]) -> None:
    """`gpus_per_node` as `--gres=gpu:…`, beside other resources that the user asks for."""
    gpus = options.pop("gpus_per_node", None)
    if gpus is not None:
        others = [options["gres"]] if options.get("gres") else []
        options["gres"] = ",".join([f"gpu:{gpus}", *others])


def _render_option(name: str, value: Any) -> str:
    """One `#SBATCH` line; true is a bare flag."""
    flag = "--" + name.replace("_", "-")
    if value is True:
        return f"#SBATCH {flag}"
    text = str(value)
    _check_line(text, f"slurm option {name}")
    return f"#SBATCH {flag}={quote_directive(text)}"


def quote_directive(text: str) -> str:
    """`text` as sbatch reads it back from an `#SBATCH` line.

    Its rules are not the shell's: a backslash escapes inside either kind of quotes, and
    nothing is expanded.

    >>> print(quote_directive("preemption=yes;requeue=true"))
    "preemption=yes;requeue=true"
    """
    if _PLAIN.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _check_line(text: str, what: str) -> None:
    if any(c in text for c in "\n\r\0"):
        raise ConfigError(f"{what} has a line break in it: {text[:60]!r}", hint="one line for each")


def format_ranges(numbers: Iterable[int]) -> str:
    """Numbers as an array's list.

    >>> format_ranges([0, 1, 2, 5])
    '0-2,5'
    """
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def read_template(path: str | None) -> str:
    """The user's template at `path`, or ours. Raises ConfigError."""
    places = [Path(path)] if path else [at for at in _TEMPLATES if at.is_file()]
    if not places:
        raise ConfigError(f"{_TEMPLATES[0]} is missing", hint="install slurm-rl again")
    try:
        return places[0].read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"sbatch_template = {path} cannot be read: {error}", hint="correct the path"
        ) from error


def fill_template(template: str, parts: Mapping[str, str]) -> str:
    """The template with each `{{word}}` replaced once over. Raises ConfigError.

    What is filled in is not looked at again: braces in a user's value stay.
    """
    used = [match[1] for match in _PLACE.finditer(template)]
    missing = [f"{{{{{name}}}}}" for name in _PLACES if name not in used]
    if missing:
        raise ConfigError(f"the job template lacks {', '.join(missing)}", hint="put it in")
    strange = next((name for name in used if name not in _PLACES), None)
    if strange is not None:
        known = ", ".join(f"{{{{{name}}}}}" for name in _PLACES)
        raise ConfigError(f"the job template has {{{{{strange}}}}}", hint=f"known are {known}")
    return _PLACE.sub(lambda match: parts[match[1]], template)


#: A limit on how many jobs may be in the queue. Slurm uses one message for these and for a job
#: that is too large or too long for good; the limit's name, where it is printed, tells which.
_LIMIT_NAME = re.compile(r"\b(?:QOS|Assoc)\w+|\bMaxSubmit\w*")
_LIMITS = (
    "violates accounting/qos policy",
    "temporarily unable to accept job",  # MaxJobCount: sbatch retries for two minutes
    "resource temporarily unavailable",
    "submit limit",
)
_UNAVAILABLE = (
    "unable to contact slurm controller",
    "socket timed out",
    "connection refused",
    "connection timed out",
    "communication connection failure",
    "communication shutdown failure",
    "zero bytes were transmitted",
    "transport endpoint",
    "broken pipe",
    "message receive failure",
    "message send failure",
    "unexpected message received",
    "authentication error",
    "authentication credential",
    "munged",
    "munge encode",
    "standby mode",
    "slurmctld is currently",
    "i/o error",
    "configuration source",
    "configuration file",
)
_NOT_FROM_HERE = (
    "access/permission denied",
    "not allowed from this host",
    "submission is not allowed",
)
_NOISE = re.compile(r"^(?:sbatch|scontrol|scancel|squeue|slurm_\w+)?:? ?(?:error|fatal):? ", re.I)


def classify_refusal(output: str, *, name: str, timed_out: bool = False) -> SchedulerError:
    """What sbatch meant, by its words. An answer that is not known is a refusal.

    output: what it wrote. timed_out: it was stopped before it ended, so the job may exist.
    """
    words = output.lower()
    said = quote_answer(output)
    if any(text in words for text in _LIMITS):
        limit = _LIMIT_NAME.search(output)
        if limit is None or "submit" in limit[0].lower():
            return SubmitDeferred(f"{name}: sbatch: {said}")
        return SubmitRefused(f"{name}: sbatch: {said}", hint="ask for less in slurm")
    if timed_out:
        return SchedulerUnavailable(f"{name}: sbatch did not answer in time{said and ': ' + said}")
    if any(text in words for text in _NOT_FROM_HERE):
        return SubmitRefused(
            f"{name}: sbatch: {said}",
            hint="set submit_from: login if compute nodes may not submit jobs",
        )
    if not said or any(text in words for text in _UNAVAILABLE):
        return SchedulerUnavailable(f"{name}: sbatch: {said or 'ended without a word'}")
    return SubmitRefused(f"{name}: sbatch: {said}", hint="see what slurm-rl plan prints")


def quote_answer(output: str) -> str:
    """What a Slurm command said, as one line without its prefixes."""
    lines = [_NOISE.sub("", line.strip()) for line in output.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line))


def parse_submission(output: str) -> str | None:
    """The job's id from what sbatch printed; None if there is none.

    Takes `123`, `123;cluster` (`--parsable`) and `Submitted batch job 123`; other lines, such
    as a site's greeting, are passed over.
    """
    pattern = re.compile(r"(?:Submitted batch job )?(\d+)(?:;\S+)?(?: on cluster \S+)?")
    found = [match[1] for line in output.splitlines() if (match := pattern.fullmatch(line.strip()))]
    return found[-1] if found else None
