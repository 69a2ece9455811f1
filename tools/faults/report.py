"""What a run of faults came to. Pure: records in, figures and text out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from faults.schedule import KINDS

#: GPUs of a stage's job in the chaos run.
GPUS = {"init": 0, "rollout": 1, "train": 2}


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault that was done, `at_s` seconds after the submission; `note` says to what."""

    kind: str
    at_s: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class Stop:
    """The run was paused or halted, for `reason`, and a person typed `slurm-rl resume`."""

    at_s: float
    word: str
    reason: str


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """One attempt, from its claim to its last sign of life, and whether its result is the
    committed one. `slot` is as `000003/train.t0`."""

    slot: str
    began: float
    seconds: float
    committed: bool

    @property
    def kind(self) -> str:
        return self.slot.split("/")[1].partition(".")[0]


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is known at the end.

    commits:     seconds after the submission at which each stage committed.
    differences: slots whose digest is not the reference's, or that only one run has.
    left:        names of the jobs in the queue after the end.
    problems:    what else went wrong, in words.
    """

    injected: Sequence[Injected]
    stops: Sequence[Stop]
    attempts: Sequence[AttemptRecord]
    commits: Sequence[float]
    num_stages: int
    num_submissions: int
    undisturbed_s: float
    differences: Sequence[str] = ()
    left: Sequence[str] = ()
    problems: Sequence[str] = ()

    @property
    def disturbed_s(self) -> float:
        return max(self.commits, default=0.0)


def count_kinds(evidence: Evidence) -> dict[str, tuple[int, int]]:
    """Kind -> faults injected, and survived: a stage committed after it, and nothing differs."""
    last = max(evidence.commits, default=0.0)
    is_equal = not evidence.differences and len(evidence.commits) == evidence.num_stages
    injected = Counter(fault.kind for fault in evidence.injected)
    survived = Counter(f.kind for f in evidence.injected if is_equal and f.at_s < last)
    return {kind: (injected[kind], survived[kind]) for kind in KINDS}


def wasted_gpu_seconds(attempts: Sequence[AttemptRecord]) -> float:
    """GPUs × seconds of attempts whose result is not the committed one.

    What they left for their successors (finished groups) is not taken off.
    """
    return sum(GPUS[a.kind] * a.seconds for a in attempts if not a.committed)


def count_overlaps(attempts: Sequence[AttemptRecord]) -> int:
    """Attempts that began while an earlier one at the same slot was still at work."""
    by_slot: dict[str, list[AttemptRecord]] = {}
    for attempt in sorted(attempts, key=lambda a: a.began):
        by_slot.setdefault(attempt.slot, []).append(attempt)
    return sum(
        any(earlier.began + earlier.seconds > later.began for earlier in found[:number])
        for found in by_slot.values()
        for number, later in enumerate(found)
    )


def compare_digests(wanted: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Slots that are not the same in both, by name."""
    names = sorted({*wanted, *found})
    return [name for name in names if wanted.get(name) != found.get(name)]


def find_failures(evidence: Evidence) -> list[str]:
    """Why the whole is not a success; nothing if it is."""
    found = list(evidence.problems)
    for kind, (injected, survived) in count_kinds(evidence).items():
        if injected == 0:
            found.append(f"{kind}: was never injected")
        elif survived < injected:
            found.append(f"{kind}: {injected - survived} of {injected} not survived")
    if len(evidence.commits) < evidence.num_stages:
        found.append(f"{len(evidence.commits)} of {evidence.num_stages} stages are committed")
    found += [f"{name}: not the reference's digest" for name in evidence.differences]
    found += [f"{name}: still in the queue" for name in evidence.left]
    return found


def render_report(evidence: Evidence) -> str:
    """The figures, for people."""
    lines = [f"{'fault':<30} {'injected':>8} {'survived':>8}"]
    kinds = count_kinds(evidence)
    lines += [f"{kind:<30} {i:>8} {s:>8}" for kind, (i, s) in kinds.items()]
    total = [sum(pair[n] for pair in kinds.values()) for n in (0, 1)]
    lines += [f"{'all':<30} {total[0]:>8} {total[1]:>8}", ""]
    lost_s = evidence.disturbed_s - evidence.undisturbed_s
    attempts = evidence.attempts
    wasted = [a for a in attempts if not a.committed]
    lines += [
        f"stages committed            {len(evidence.commits)} of {evidence.num_stages}",
        f"digests that differ         {len(evidence.differences)}",
        f"time                        {evidence.disturbed_s:.0f} s;"
        f" undisturbed {evidence.undisturbed_s:.0f} s; lost {lost_s:.0f} s",
        f"GPU-seconds wasted          {wasted_gpu_seconds(attempts):.0f}"
        f" (GPUs × seconds of the {len(wasted)} attempts that are not the committed ones)",
        f"link submissions            {evidence.num_submissions}",
        f"claims                      {len(attempts)};"
        f" {count_overlaps(attempts)} while an earlier attempt was still at work",
        f"stops that a person resumed {len(evidence.stops)}",
    ]
    lines += [f"  at {stop.at_s:.0f} s, {stop.word}: {stop.reason}" for stop in evidence.stops]
    failures = find_failures(evidence)
    lines += ["", *(f"FAILED: {failure}" for failure in failures)]
    if not failures:
        lines.append("the run ended with the same committed history as the undisturbed one")
    return "\n".join(lines)
