"""When a run stops by itself, and what it says then."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_rl.chain.graph import Link
from slurm_rl.chain.halts import LOST_PER_ATTEMPT, find_halt, is_used_up
from slurm_rl.chain.plan import plan
from slurm_rl.chain.scheduler import JobState, QueuedJob
from slurm_rl.chain.view import Cancel, HaltRun, LinkView, SlotView, Spec, View
from slurm_rl.storage.control import Control

SPEC = Spec("toy", "id", max_attempts=3, max_stops=5, ticks=False)
LINK = Link(0, ("train",))


def view(*slots: SlotView, num_lost: int = 0, **facts: Any) -> View:
    links = (LinkView(LINK, (), slots, num_lost),) if slots else ()
    facts.setdefault("control", Control())
    return View(links=links, queue=(), **facts)


FINE = SlotView("i0000.train.t0")


@pytest.mark.parametrize(
    ("slot", "words"),
    [
        (SlotView("s", failures=2), None),
        (SlotView("s", failures=3, last_error="no GPU", log="/l"), "s: 3 attempts ended without a commit; the last said: no GPU"),
        (SlotView("s", failures=2, is_repeating=True, last_error="OOM"), "s: failed twice in the same way; the last said: OOM"),
        (SlotView("s", num_stops=4), None),
        (SlotView("s", num_stops=5), "s: preempted 5 times"),
        (SlotView("s", committed=True, failures=9, num_stops=9), None),
    ],
)  # fmt: skip
def test_a_slot_that_is_used_up(slot: SlotView, words: str | None) -> None:
    halt = find_halt(SPEC, view(slot))
    assert (halt.reason if halt else None) == words
    if halt is not None:
        assert "slurm-rl resume" in halt.hint
        assert halt.log == slot.log
        assert is_used_up(SPEC, slot)


@pytest.mark.parametrize("num_lost", [LOST_PER_ATTEMPT * 3, LOST_PER_ATTEMPT * 3 + 1])
def test_jobs_that_never_look_for_work(num_lost: int) -> None:
    halt = find_halt(SPEC, view(FINE, num_lost=num_lost))
    assert (halt is not None) == (num_lost > 9)


def test_a_link_that_is_done_has_lost_nothing() -> None:
    assert find_halt(SPEC, view(SlotView("s", committed=True), num_lost=99)) is None


@pytest.mark.parametrize(
    ("spec", "facts", "words"),
    [
        ({"gpu_hours": 2.0}, {"gpu_s": 7199.0}, None),
        ({"gpu_hours": 2.0}, {"gpu_s": 7200.0}, "chain.budget.gpu_hours = 2: 2.00 are used"),
        ({"gpu_hours": None}, {"gpu_s": 1e9}, None),
        ({"until": 1000.0}, {"now": 999.0}, None),
        ({"until": 1000.0}, {"now": 1000.0}, "has passed"),
    ],
)
def test_what_costs_more_than_it_may(spec: Any, facts: Any, words: str | None) -> None:
    halt = find_halt(Spec("toy", "id", **spec), view(FINE, **facts))
    assert (halt is None) == (words is None)
    if halt is not None:
        assert words is not None and words in halt.reason
        assert "slurm-rl set" in halt.hint and "resume" in halt.hint


def test_a_complete_run_may_have_cost_what_it_likes() -> None:
    assert find_halt(Spec("toy", "id", gpu_hours=1.0, until=1.0), view(now=9.0, gpu_s=1e9)) is None


def test_a_conflict_goes_before_all_else() -> None:
    halt = find_halt(SPEC, view(SlotView("s", failures=9), conflict="made from another"))
    assert halt is not None and halt.reason == "made from another"
    assert "rewind" in halt.hint


def test_a_paused_run_is_not_halted_as_well() -> None:
    """The person who paused it is at work on it."""
    seen = view(SlotView("s", failures=9), control=Control(paused="by a person"))
    assert not any(isinstance(action, HaltRun) for action in plan(SPEC, seen).actions)


def test_a_halt_cancels_what_waits() -> None:
    waits = QueuedJob("7", "toy.i0001.rollout.id1", JobState.PENDING)
    runs = QueuedJob("8", "toy.i0000.train.id2", JobState.RUNNING)
    seen = View(Control(), (LinkView(LINK, (), (SlotView("s", failures=9),)),), (waits, runs))
    halt, cancel = plan(SPEC, seen).actions
    assert isinstance(halt, HaltRun)
    assert isinstance(cancel, Cancel) and cancel.job_ids == ("7",)
