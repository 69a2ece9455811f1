"""What the run's own commits say about time: how long stages take, start and save.

Reading is bounded by the last `WINDOW` iterations; deciding is pure. Durations are differences of
one machine's clock, so clocks that disagree do not matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slurm_rl.chain.graph import Graph, Link
from slurm_rl.chain.scheduler import WallTime
from slurm_rl.chain.slots import link_slots
from slurm_rl.storage.claims import read_claims, read_end
from slurm_rl.storage.commits import DURATIONS, read_commit
from slurm_rl.storage.control import Control
from slurm_rl.storage.rundir import RunDir
from slurm_rl.types import UNUSUAL, Slot

WINDOW = 20
#: A learnt time is this much longer than what was measured, and this many seconds.
_FACTOR, _EXTRA_S = 1.3, 120.0
#: Slurm warns up to a minute early and looks at its limits every half minute.
_SIGNAL_EXTRA_S, _LEAST_SIGNAL_S = 90.0, 120.0
#: Fewer than these say little.
_FEWEST = 3


@dataclass(frozen=True, slots=True)
class Duration:
    """One committed stage, in seconds.

    work_s:  from the claim to the commit. startup_s: from the start of its job to the claim.
    save_s:  the part of `work_s` in which the program wrote its results.
    """

    work_s: float
    startup_s: float = 0.0
    save_s: float = 0.0


def read_durations(
    run: RunDir, graph: Graph, control: Control, kind: str, *, before: int, pool: str = ""
) -> list[Duration]:
    """Of the last committed stages of `kind`, those of iterations below `before`, newest first; of
    a pool's shards the one that took longest."""
    found = []
    for ref in graph.earlier(kind, before=before, most=WINDOW):
        slots = [Slot(ref.iteration, kind, control.timeline_of(ref))]
        if pool:
            slots = link_slots(graph, control, Link(ref.iteration, (kind,), pool))
        commits = [commit for slot in slots if (commit := read_commit(run, slot)) is not None]
        # One that was carried forward, or learnt labels, says nothing of those that do the work.
        usual = [commit for commit in commits if UNUSUAL not in commit.content]
        durations = [parse_duration(commit.provenance) for commit in usual]
        known = [duration for duration in durations if duration is not None]
        if known:
            found.append(max(known, key=lambda duration: duration.work_s))
    return found


def parse_duration(provenance: dict[str, object]) -> Duration | None:
    """The times in a commit's provenance; None if it holds none."""
    numbers = {
        name: value
        for name in DURATIONS
        if isinstance(value := provenance.get(name, 0.0), int | float)
    }
    return Duration(**numbers) if numbers.get("work_s", 0.0) > 0 else None


def learn_wall_time(
    run: RunDir, graph: Graph, control: Control, link: Link, *, longest_s: float | None, tries: int
) -> WallTime:
    """What to ask for a link's job.

    longest_s: the most that may be asked for (the partition's limit), None: not known.
    tries: attempts that the time limit ended; each asks for half as much again.
    """
    past = [
        read_durations(run, graph, control, kind, before=link.iteration, pool=link.pool)
        for kind in link.kinds
    ]
    if link.iteration == 0 or any(len(durations) < _FEWEST for durations in past):
        return WallTime(None if longest_s is None else int(longest_s))
    return plan_wall_time(past, longest_s=longest_s, tries=tries)


def count_timeouts(run: RunDir, graph: Graph, control: Control, link: Link) -> int:
    """Attempts of a link's stages that the time limit ended."""
    ends = [
        read_end(run, slot, claim)
        for slot in link_slots(graph, control, link)
        for claim in read_claims(run, slot)
    ]
    return sum(end is not None and end.outcome == "timed_out" for end in ends)


def plan_wall_time(
    past: Sequence[Sequence[Duration]], *, longest_s: float | None, tries: int = 0
) -> WallTime:
    """Wall time of a job that runs stages with these pasts in turn. Pure.

    The limit is the sum of their 95th percentiles and a margin; the shortest of use is made
    from their medians in the same way, so that backfill finds gaps.
    """
    signal_s = plan_signal(past, longest_s=longest_s)
    startup_s = max((d.startup_s for durations in past for d in durations), default=0.0)

    def asked(share: float) -> int:
        work_s = sum(percentile([d.work_s for d in durations], share) for durations in past)
        seconds = ((startup_s + work_s) * _FACTOR + _EXTRA_S) * 1.5**tries + signal_s
        seconds = seconds if longest_s is None else min(seconds, longest_s)
        return 60 * math.ceil(seconds / 60) if longest_s is None else math.ceil(seconds)

    limit_s = asked(0.95)
    return WallTime(limit_s, min(asked(0.5), limit_s), signal_s)


def plan_signal(past: Iterable[Sequence[Duration]], *, longest_s: float | None = None) -> int:
    """How long before its end a job must be told: twice its longest save, and Slurm's own slack.

    longest_s: its wall time, if that is given; the warning comes when what the stages take (their
    95th percentile and a tenth) should be over, not before.
    """
    past = list(past)
    saves = [d.save_s for durations in past for d in durations]
    wanted = _SIGNAL_EXTRA_S + 2 * max(saves, default=0.0)
    if longest_s is not None:
        work_s = sum(
            percentile([d.work_s for d in durations], 0.95) for durations in past if durations
        )
        startup_s = max((d.startup_s for durations in past for d in durations), default=0.0)
        wanted = min(wanted, max(_LEAST_SIGNAL_S, longest_s - 1.1 * (work_s + startup_s)))
        wanted = min(wanted, longest_s / 2)  # a job that is told to stop at once does nothing
    return math.ceil(wanted)


def plan_deadline(durations: Sequence[Duration], *, longest_s: float) -> float:
    """Seconds after which a stage is taken to hang: far above all that was seen, at most
    `longest_s`."""
    if len(durations) < _FEWEST:
        return longest_s
    return min(longest_s, max(600.0, 5 * percentile([d.work_s for d in durations], 0.95)))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of them do not exceed.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 0.5)
    2.0
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
