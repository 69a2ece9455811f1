"""When a run must stop by itself, and what it says then. Pure.

Retries are for what a cluster does to a job. What a person has to mend, what comes again in the
same way, and what costs more than it may, ends the run with its reason and what to type.
"""

from __future__ import annotations

import time

from slurm_rl.chain.view import LinkView, SlotView, Spec, View
from slurm_rl.storage.control import Halt

#: Jobs of a link that may end without a claim, for each attempt that may fail.
LOST_PER_ATTEMPT = 3


def find_halt(spec: Spec, view: View) -> Halt | None:
    """Why the run must stop now, or None."""
    if view.conflict:
        hint = "see `slurm-rl verify RUN`; `slurm-rl rewind RUN --to I` makes it again from there"
        return Halt(view.conflict, hint)
    if view.is_complete:
        return None
    halt = _find_budget_halt(spec, view)
    for link in view.links:
        halt = halt or explain_end(spec, link)
    return halt


def is_used_up(spec: Spec, slot: SlotView) -> bool:
    """Whether another attempt at the slot would only be one more of the same."""
    return (
        slot.failures >= spec.max_attempts or slot.is_repeating or slot.num_stops >= spec.max_stops
    )


def _find_budget_halt(spec: Spec, view: View) -> Halt | None:
    if spec.until is not None and view.now >= spec.until:
        until = time.strftime("%Y-%m-%dT%H:%M", time.localtime(spec.until))
        return Halt(
            f"chain.budget.until = {until} has passed",
            "`slurm-rl set RUN chain.budget.until=TIME`, then `slurm-rl resume RUN`",
        )
    used = view.gpu_s / 3600
    if spec.gpu_hours is not None and used >= spec.gpu_hours:
        return Halt(
            f"chain.budget.gpu_hours = {spec.gpu_hours:g}: {used:.2f} are used",
            "`slurm-rl set RUN chain.budget.gpu_hours=N`, then `slurm-rl resume RUN`",
        )
    return None


def explain_end(spec: Spec, link: LinkView) -> Halt | None:
    """Why a link is not to be tried again; None if it is."""
    # A job that dies before it claims leaves no failed attempt; it must not go on for ever.
    if not link.is_done and link.num_lost > LOST_PER_ATTEMPT * spec.max_attempts:
        return Halt(
            f"{link.link}: {link.num_lost} jobs ended before they could look for work",
            "look at the jobs' own logs (`logs/` of the iteration), then `slurm-rl resume RUN`",
        )
    used_up = (slot for slot in link.open_slots if is_used_up(spec, slot))
    slot = next(used_up, None)
    return None if slot is None else _describe(spec, slot)


def _describe(spec: Spec, slot: SlotView) -> Halt:
    said = f"; the last said: {slot.last_error}" if slot.last_error else ""
    hint = "look at the log, mend the cause, then `slurm-rl resume RUN`"
    if slot.is_repeating:
        return Halt(f"{slot.name}: failed twice in the same way{said}", hint, slot.log)
    if slot.failures >= spec.max_attempts:
        count = f"{slot.failures} attempts ended without a commit"
        return Halt(f"{slot.name}: {count}{said}", hint, slot.log)
    hint = "make the stage shorter or ask for another qos or partition, then `slurm-rl resume RUN`"
    return Halt(f"{slot.name}: preempted {slot.num_stops} times", hint, slot.log)
