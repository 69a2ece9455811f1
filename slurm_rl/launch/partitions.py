"""Partitions that are asked for, against those that there are: before anything is submitted.

sbatch refuses a job whose partition is not there; but of a rollout in pools the others would have
been submitted by then, and work for nothing. What Slurm does not say is no reason to refuse.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from slurm_rl.config.derive import slurm_sections, stage_fallback, stage_slurm
from slurm_rl.config.pools import job_kinds
from slurm_rl.config.problems import Path as Place
from slurm_rl.config.problems import Problem, nearest
from slurm_rl.config.schema import Settings
from slurm_rl.errors import SchedulerUnavailable
from slurm_rl.launch.site import read_partitions

#: A submission does not wait longer for what it could do without.
_TIMEOUT_S = 8.0
#: With one of these the partition may be another cluster's.
_ELSEWHERE = ("clusters", "cluster_constraint")


def check_partitions(settings: Settings) -> list[Problem]:
    """`find_unknown` with what Slurm says now, hidden partitions included; nothing if it does not
    answer."""
    if settings.launcher != "slurm":
        return []
    try:
        known = {part.name for part in read_partitions(timeout_s=_TIMEOUT_S, hidden=True)}
    except SchedulerUnavailable:
        return []
    return find_unknown(settings, known) if known else []


def find_unknown(settings: Settings, known: Collection[str]) -> list[Problem]:
    """Each setting that names a partition which is not there. Pure."""
    found: list[Problem] = []
    for kind in job_kinds(settings):
        if kind == "tick" and settings.submit_from == "login":
            continue
        if any(stage_slurm(settings, kind).get(name) for name in _ELSEWHERE):
            continue
        for place, text in _named(settings, kind):
            wrong = [name for name in map(str.strip, text.split(",")) if name not in known]
            if wrong and all(problem.path != place for problem in found):
                close = nearest(wrong[0], sorted(known))
                fix = f"did you mean {close}?" if close else f"one of {', '.join(sorted(known))}"
                found.append(Problem(place, "is no partition of this cluster", fix, text))
    return found


def _named(settings: Settings, kind: str) -> Iterator[tuple[Place, str]]:
    """Where a kind of job, and its fallback, are told their partition."""
    sections = slurm_sections(settings, kind)
    named = str(stage_slurm(settings, kind).get("partition") or "")
    owners = (at for at, section in sections if section.partition is not None)
    if named:
        yield (*next(owners, sections[-1][0]), "partition"), named
    fallback = stage_fallback(settings, kind)
    if fallback is not None and fallback.partition is not None:
        at = next(at for at, section in sections if section.fallback is not None)
        yield (*at, "fallback", "partition"), fallback.partition
