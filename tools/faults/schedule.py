"""Which fault comes when. Pure: the same seed gives the same schedule."""

from __future__ import annotations

import random
from dataclasses import dataclass

#: Every kind of fault, and what is done.
KINDS = {
    "preempt": "a job of the higher partition takes the node of a running job",
    "requeue-running": "scontrol requeue of a running job",
    "requeue-completed": "scontrol requeue of a job that has completed",
    "scancel": "scancel of a running job, by hand",
    "node-poweroff": "a node at work loses power; it is switched on again later",
    "kill-slurmd": "SIGKILL of a slurmd: its job is requeued, the old processes live on",
    "hang-slurmd": "SIGSTOP of a slurmd for a while",
    "kill-controller": "SIGKILL of slurmctld; it is started again",
    "kill-controller-at-submission": "SIGKILL of slurmctld within a second of a submission",
    "controller-silent": "SIGSTOP of slurmctld for longer than its clients wait",
    "hold": "pending jobs are held, or a running one is requeued and held",
    "kill-supervisor": "SIGKILL of a job's supervisor",
    "kill-payload": "SIGKILL of a stage's program",
    "disk-full": "the run's file system is filled to the last byte; freed later",
    "corrupt-uncommitted": "a byte of an attempt's file is changed, then its program is killed",
    "corrupt-committed": "a byte of a committed file is changed",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: `Fault(3, "preempt", due=4)` comes once four stages have committed.

    allowed: place of the last stage that may end before the fault has been injected.
    """

    number: int
    kind: str
    due: int
    allowed: int


def draw_schedule(seed: int, *, num_faults: int, num_stages: int) -> tuple[Fault, ...]:
    """`num_faults` faults in random order, spread over the run; every kind at least once.

    Raises ValueError if there are fewer faults than kinds.
    """
    if num_faults < len(KINDS):
        raise ValueError(f"{num_faults} faults cannot be of {len(KINDS)} kinds; ask for more")
    rng = random.Random(seed)
    more = [rng.choice(tuple(KINDS)) for _ in range(num_faults - len(KINDS))]
    kinds = [*KINDS, *more]
    rng.shuffle(kinds)
    # The last stage is kept for the end: no fault may find a run that is complete.
    last = num_stages - 2
    found = []
    for number, kind in enumerate(kinds):
        due = number * last // num_faults
        found.append(Fault(number, kind, due, min(due + 1, last)))
    return tuple(found)


def draw_for(seed: int, fault: Fault) -> random.Random:
    """What a fault draws its own choices from."""
    return random.Random(f"{seed}.{fault.number}.{fault.kind}")
