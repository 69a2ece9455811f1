"""Wall times against what the partitions give: before anything is submitted.

sbatch takes a job that is too long on many sites (`EnforcePartLimits=NO`), and it then pends for
ever (`PartitionTimeLimit`). Judging is pure; `check_wall_times` asks Slurm, briefly.
"""

from __future__ import annotations

from collections.abc import Sequence

from slurm_rl.config.derive import slurm_sections, stage_fallback, stage_slurm, stage_time_s
from slurm_rl.config.pools import job_kinds
from slurm_rl.config.problems import Path as Place
from slurm_rl.config.problems import Problem
from slurm_rl.config.schema import Settings
from slurm_rl.errors import SchedulerUnavailable
from slurm_rl.launch.site import Partition, Qos, read_partitions, read_qos

#: A submission does not wait longer for what it could do without.
_TIMEOUT_S = 8.0


def partitions_of(named: str | None, partitions: Sequence[Partition]) -> list[Partition]:
    """The partitions that a job may run in: those that it names, or the default one."""
    if not named:
        return [part for part in partitions if part.is_default]
    names = [name.strip() for name in named.split(",")]
    return [part for part in partitions if part.name in names]


def limit_of(named: str | None, partitions: Sequence[Partition]) -> int | None:
    """The longest wall time that any of a job's partitions gives; None if one has no limit, or
    none is known."""
    limits = [part.max_time_s for part in partitions_of(named, partitions)]
    return None if None in limits else max((n for n in limits if n is not None), default=None)


def find_too_long(settings: Settings, partitions: Sequence[Partition]) -> list[Problem]:
    """Stages whose wall time no partition of theirs gives. sbatch takes such a job on many sites
    (`EnforcePartLimits=NO`), and it then pends for ever (`PartitionTimeLimit`)."""
    problems = []
    for kind in job_kinds(settings):
        named = stage_slurm(settings, kind).get("partition")
        time_s = stage_time_s(settings, kind)
        where, text = _owner_of_time(settings, kind)
        found = _judge_length(named, time_s, partitions, where, text)
        fallback = stage_fallback(settings, kind)
        if found is None and fallback is not None and fallback.partition is not None:
            found = _judge_length(fallback.partition, time_s, partitions, where, text)
        if found is not None and found not in problems:
            problems.append(found)
    return problems


def _judge_length(
    named: str | None,
    time_s: int | None,
    partitions: Sequence[Partition],
    where: Place,
    text: str | None,
) -> Problem | None:
    limit_s = limit_of(named, partitions)
    if limit_s is None or time_s is None or time_s <= limit_s:
        return None
    names = ",".join(part.name for part in partitions_of(named, partitions))
    rule = f"is longer than partition {names} lets a job run (MaxTime {format_limit(limit_s)})"
    return Problem(
        where, rule, f"lower {'.'.join(map(str, where))} or choose another partition", text
    )


def _owner_of_time(settings: Settings, kind: str) -> tuple[Place, str | None]:
    """The key that a stage's wall time was set with, and what it says."""
    options = stage_slurm(settings, kind)
    name = "time_max" if options.get("time") == "auto" else "time"
    sections = slurm_sections(settings, kind)
    if kind == "tick":
        sections = sections[:1]
    for place, section in sections:
        if getattr(section, name) is not None:
            return (*place, name), getattr(section, name)
    place, _ = sections[-1]
    return (*place, name), options.get("time") if kind == "tick" else None


def format_limit(seconds: int) -> str:
    """As Slurm writes it: `1-00:00:00`.

    >>> format_limit(90061), format_limit(600)
    ('1-01:01:01', '00:10:00')
    """
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


def check_wall_times(settings: Settings) -> list[Problem]:
    """`find_too_long` with what Slurm says now: one call of scontrol, a second where the first
    speaks against the run. Nothing if Slurm does not answer: the submission will say so.

    A quality of service may lift the partition's limit (`PartitionTimeLimit`); where it cannot
    be known that ours does not, the job is let through.
    """
    if settings.launcher != "slurm":
        return []
    try:
        problems = find_too_long(settings, read_partitions(timeout_s=_TIMEOUT_S))
    except SchedulerUnavailable:
        return []
    if not problems:
        return []
    qos = read_qos(timeout_s=_TIMEOUT_S)
    named = {str(stage_slurm(settings, kind).get("qos") or "") for kind in job_kinds(settings)}
    return [] if may_lift_limits(named - {""}, qos) else problems


def may_lift_limits(named: set[str], qos: Sequence[Qos] | None) -> bool:
    """Whether a quality of service may let a job run longer than its partition does.

    named: those that the run asks for; none: it gets whichever is the user's default.
    """
    if qos is None:
        return bool(named)
    lifting = {entry.name for entry in qos if "PartitionTimeLimit" in entry.flags}
    return bool(lifting & named) if named else bool(lifting)
