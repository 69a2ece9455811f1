"""What quota, space and the site's purge policy mean for this run, a line each. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from slurm_rl.config.derive import stage_time_s
from slurm_rl.config.schema import Settings
from slurm_rl.launch.quota import Quota
from slurm_rl.storage.probe import Finding, Level
from slurm_rl.storage.space import first_need

_NEARLY = 0.9
_DAY_S = 86400.0


def iteration_bytes(settings: Settings) -> int | None:
    """What an iteration writes at most; None where the model cannot be read from here."""
    train = first_need(settings, "train").size_bytes
    rollout = first_need(settings, "rollout").size_bytes * settings.rollout.shards
    return train + rollout if train else None


def kept_iterations(settings: Settings) -> int:
    """Iterations whose files are there at once at most, the one at work included."""
    kept = settings.retention.keep_last
    if kept is None:
        return settings.num_rollout
    every = settings.retention.keep_every
    older = 0 if every is None else max(0, settings.num_rollout - kept) // every
    return min(settings.num_rollout, kept + 1 + older)


def judge_quota(quota: Quota | None, tool: str, *, needs_bytes: int | None) -> Iterator[Finding]:
    """needs_bytes: of what the run keeps; None if that is not known."""
    if quota is None:
        who = f"{tool} tells of none here" if tool else "no tool here tells of one"
        yield _say("ok", "quota", f"{who} (best effort: ask the site)")
        return
    for used, limit, what in (
        (quota.used_bytes, quota.limit_bytes, "bytes"),
        (quota.used_files, quota.limit_files, "files"),
    ):
        if limit is None:
            yield _say("ok", f"quota of {what}", f"no limit ({tool})")
            continue
        left = limit - used
        shown = f"{used} of {limit} {what} used ({tool})"
        fix = "free some, lower retention.keep_last, or choose another run.dir"
        if left <= 0:
            yield _say("bad", f"quota of {what}", f"{shown}: nothing can be written", fix)
        elif used > _NEARLY * limit or (what == "bytes" and (needs_bytes or 0) > left):
            yield _say("warn", f"quota of {what}", f"{shown}: it will not last", fix)
        else:
            yield _say("ok", f"quota of {what}", shown)


def expected_s(settings: Settings, *, iteration_s: float | None) -> float | None:
    """How long the run takes: by the pace of what was done, else at most its wall times.

    iteration_s: mean of the iterations that are committed.
    """
    if iteration_s is not None:
        return iteration_s * settings.num_rollout
    times = [stage_time_s(settings, kind) for kind in ("rollout", "train")]
    if settings.launcher == "local" or None in times:
        return None
    return float(settings.num_rollout * sum(time or 0 for time in times))


def judge_purge(settings: Settings, *, iteration_s: float | None) -> Finding:
    """Whether the run, or what it keeps, outlives the files that nobody reads."""
    days, total_s = settings.purge_days, expected_s(settings, iteration_s=iteration_s)
    if days is None:
        fix = "purge_days in the site file, if old files are deleted there"
        return _say("ok", "purge", "no policy is set", fix)
    if total_s is None:
        return _say("ok", "purge", f"after {days} days; how long the run takes is not known yet")
    about = "about" if iteration_s is not None else "at most"
    takes = f"{about} {total_s / _DAY_S:.1f} days"
    if total_s <= days * _DAY_S:
        return _say("ok", "purge", f"after {days} days; the run takes {takes}")
    kept = settings.retention.keep_last
    fix = "retention.archive on a file system that is not purged, or a shorter run"
    if kept is None:
        what = "everything is kept, and early commits would be deleted under it"
    elif kept * total_s / settings.num_rollout > days * _DAY_S:
        what = f"{kept} iterations are kept, longer than that"
    else:
        what = "early commits would be deleted under it, `verify` and `rewind` with them"
    return _say("warn", "purge", f"after {days} days, and the run takes {takes}: {what}", fix)


def _say(level: Level, name: str, found: str, fix: str = "") -> Finding:
    return Finding(level, name, found, fix, area="files")
