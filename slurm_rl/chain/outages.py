"""Outages: a stage that waits for a service outside of the run. Pure.

An attempt that finds a service down ends as *deferred*. That is no failure and no stop: it blames
no node and counts against no cap. Its stage is looked at again after a while, ever later, for as
long as the outage lasts; in between it holds no allocation.
"""

from __future__ import annotations

import time

from slurm_rl.chain.view import SlotView, Spec

#: However long a service has been down: it is asked again after this.
LONGEST_S = 600.0


def plan_deferral(num_deferrals: int, *, poll_s: float) -> float:
    """Seconds from the end of the last of so many deferrals in a row to the next look.

    >>> [plan_deferral(n, poll_s=30.0) for n in (1, 2, 3, 9)]
    [30.0, 60.0, 120.0, 600.0]
    """
    doubled = poll_s * 2.0 ** min(num_deferrals - 1, 30)
    return max(poll_s, min(LONGEST_S, doubled))


def deferred_for(slot: SlotView, spec: Spec) -> float:
    """Seconds that a slot should still wait for a service; 0 if it waits for none."""
    if not slot.num_deferrals or slot.committed:
        return 0.0
    left_s = plan_deferral(slot.num_deferrals, poll_s=spec.poll_s) - slot.since_deferral_s
    return max(0.0, left_s)


def describe_outage(slot: SlotView, *, now: float) -> str:
    """What a slot waits for, in words; `now` by the clock of the run's file system."""
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(now - slot.outage_s))
    what = f"service {slot.service}" if slot.service else "a service"
    looks = f"looked {slot.num_deferrals} time" + ("s" if slot.num_deferrals > 1 else "")
    return f"waits for {what} (down since {since}; {looks}): {slot.last_outage}"
