"""What squeue prints, as `QueuedJob`s. Pure and total: runs nothing, and never guesses an end.

Owns the format that is asked for, the meaning of each of Slurm's states and reasons, and the
forms of job ids, times and dependencies. A state that is not listed is UNKNOWN; a job that is
not listed is not there, which says nothing about it (DESIGN: the disk decides).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime

from slurm_rl.chain.scheduler import JobState, QueuedJob
from slurm_rl.errors import SchedulerUnavailable

#: A byte that no name holds. `-o` cuts nothing off, and has not changed since Slurm 17; the name
#: comes last, so that whatever a user puts into it stays in it.
SEPARATOR = "\x1f"
FORMAT = SEPARATOR.join(("%i", "%T", "%r", "%E", "%V", "%M", "%N", "%j"))
_NUM_FIELDS = FORMAT.count(SEPARATOR) + 1

_P, _H, _R, _E = JobState.PENDING, JobState.HELD, JobState.RUNNING, JobState.ENDED
#: Every state of Slurm 20.02 to 25.05 and its short code, except those whose end is not known.
STATES = {
    "PENDING": _P, "PD": _P,
    "REQUEUED": _P, "RQ": _P,
    "REQUEUE_FED": _P, "RF": _P,
    "REQUEUE_HOLD": _H, "RH": _H,
    "RESV_DEL_HOLD": _H, "RD": _H,
    "SPECIAL_EXIT": _H, "SE": _H,
    "RUNNING": _R, "R": _R,
    # It has nodes, or still has processes on them. A job that is being requeued or cancelled
    # shows as COMPLETING until the last of its processes is gone.
    "CONFIGURING": _R, "CF": _R,
    "COMPLETING": _R, "CG": _R,
    "RESIZING": _R, "RS": _R,
    "SIGNALING": _R, "SI": _R,
    "STAGE_OUT": _R, "SO": _R,
    "STOPPED": _R, "ST": _R,
    "SUSPENDED": _R, "S": _R,
    "POWER_UP_NODE": _R, "PN": _R,
    "BOOT_FAIL": _E, "BF": _E,
    "CANCELLED": _E, "CA": _E,
    "COMPLETED": _E, "CD": _E,
    "DEADLINE": _E, "DL": _E,
    "FAILED": _E, "F": _E,
    "NODE_FAIL": _E, "NF": _E,
    "OUT_OF_MEMORY": _E, "OOM": _E,
    "PREEMPTED": _E, "PR": _E,
    "TIMEOUT": _E, "TO": _E,
    # Another cluster of a federation took it: it may well run there.
    "REVOKED": JobState.UNKNOWN, "RV": JobState.UNKNOWN,
}  # fmt: skip

#: A person who holds a job means to release it; anything else that is held stays so.
_HELD_BY_USER = "jobhelduser"
_ABSENT = ("", "(null)", "N/A", "None")
_ARRAY_PART = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")
_ELAPSED = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")
_DEPENDENCY = re.compile(r"after[a-z]*:(.*)")
#: An array is spelled out; a range beyond any array is not one.
_MOST_TASKS = 4_000_001


def parse_queue(text: str, *, prefix: str, now: float) -> list[QueuedJob]:
    """The jobs whose name begins with `prefix`, one for each array task.

    text: squeue's output in `FORMAT`. now: seconds since the epoch. Lines that are not jobs
    (the rest of a foreign name with a line break in it) are skipped. Raises
    SchedulerUnavailable if such a line could be one of ours: then it cannot be said what is
    in the queue, and least of all that something is not.
    """
    jobs: list[QueuedJob] = []
    for line in text.split("\n"):
        fields = line.split(SEPARATOR, _NUM_FIELDS - 1)
        if len(fields) == _NUM_FIELDS and fields[-1].startswith(prefix):
            jobs.extend(_parse_fields(fields, now))
        elif len(fields) != _NUM_FIELDS and prefix in line:
            raise SchedulerUnavailable(f"squeue printed a line that is not a job: {line[:200]!r}")
    return jobs


def _parse_fields(fields: list[str], now: float) -> Iterator[QueuedJob]:
    job_id, raw, reason, dependency, submitted, elapsed, nodes, name = fields
    for single_id, task in expand_job_id(job_id):
        yield QueuedJob(
            job_id=single_id,
            name=name,
            state=parse_state(raw, reason),
            reason="" if reason in _ABSENT else reason,
            after=parse_dependency(dependency),
            age_s=_age(submitted, now),
            elapsed_s=parse_elapsed(elapsed),
            nodes="" if nodes in _ABSENT else nodes,
            task=task,
            raw=raw,
        )


def parse_state(raw: str, reason: str = "") -> JobState:
    """The state of a job from Slurm's word (long or short) and, where it is pending, its reason.

    Pending because a person holds it is PENDING; held by an administrator, by a failed launch
    (`launch failed requeued held`) or by `requeuehold` is HELD.
    """
    state = STATES.get(raw.strip().partition(" ")[0].upper(), JobState.UNKNOWN)
    if state is JobState.PENDING and _is_hold(reason):
        return JobState.HELD
    return state


def _is_hold(reason: str) -> bool:
    words = reason.strip("()").replace("_", " ").lower()
    if words == _HELD_BY_USER:
        return False
    return "held" in words or words.startswith("jobhold")


def expand_job_id(job_id: str) -> list[tuple[str, int | None]]:
    """Id and array task of each job that an id stands for.

    `7` and the two parts of a heterogeneous job, `7+0` and `7+1`, are themselves; `7_3` is a
    task; `7_[0-2,5%2]` is four tasks of which Slurm runs two at a time. A list that was cut
    short (`7_[0-2,...]`) stands for itself.

    >>> expand_job_id("7_[0,2-3%1]")
    [('7_0', 0), ('7_2', 2), ('7_3', 3)]
    """
    base, underscore, tail = job_id.partition("_")
    if not underscore:
        return [(job_id, None)]
    tasks: list[int] = []
    for part in tail.strip("[]").partition("%")[0].split(","):
        match = _ARRAY_PART.fullmatch(part)
        if match is None:
            return [(job_id, None)]
        first, last, step = match[1], match[2] or match[1], match[3] or "1"
        found = range(int(first), int(last) + 1, max(1, int(step)))
        if len(tasks) + len(found) > _MOST_TASKS:
            return [(job_id, None)]
        tasks.extend(found)
    return [(f"{base}_{task}", task) for task in tasks]


def parse_dependency(text: str) -> tuple[str, ...]:
    """Ids of the jobs that are waited for, an array by the id of the whole.

    >>> parse_dependency("afterany:12_*(unfulfilled),after:7+1(unfulfilled)?singleton")
    ('12', '7')
    """
    ids: dict[str, None] = {}
    for part in re.split(r"[,?]", text):
        match = _DEPENDENCY.match(part.strip())
        for item in match[1].split(":") if match else ():
            found = re.match(r"\d+", item)
            if found:
                ids[found[0]] = None
    return tuple(ids)


def parse_elapsed(text: str) -> float:
    """Seconds of `D-HH:MM:SS`, `HH:MM:SS` or `M:SS`; 0 for anything else, such as `INVALID`."""
    match = _ELAPSED.fullmatch(text.strip())
    if match is None:
        return 0.0
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def parse_time(text: str) -> float | None:
    """Seconds since the epoch, from `%s` as asked for or from local ISO time; None if neither."""
    text = text.strip()
    if re.fullmatch(r"\d{1,18}", text, re.ASCII):
        return float(text)
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def _age(submitted: str, now: float) -> float:
    time = parse_time(submitted)
    return 0.0 if time is None else max(0.0, now - time)
