"""plan() on where jobs go and what wakes them: fallbacks, nodes, two parents, strange clocks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from slurm_rl.chain.graph import Link
from slurm_rl.chain.plan import plan
from slurm_rl.chain.plan_ticks import TICKS_WANTED
from slurm_rl.chain.scheduler import JobState, QueuedJob
from slurm_rl.chain.view import (
    Action,
    Cancel,
    LinkView,
    Repoint,
    SlotView,
    Spec,
    Submit,
    SubmitTick,
    View,
)
from slurm_rl.storage.control import Control
from slurm_rl.storage.intents import Intent

SPEC = Spec("toy", "id", ticks=False, max_attempts=9)
R0, T0, R1, R2 = (
    Link(0, ("rollout",)),
    Link(0, ("train",)),
    Link(1, ("rollout",)),
    Link(2, ("rollout",)),
)


def name_of(link: Link, token: str) -> str:
    return link.job_name("toy", token)


def job(link: Link, token: str, state: JobState, **facts: Any) -> QueuedJob:
    facts.setdefault("age_s", 1000.0)
    return QueuedJob(facts.pop("job_id", token), name_of(link, token), state, **facts)


def seen(link: Link, *intents: Intent, age_s: float = 1000.0, **facts: Any) -> LinkView:
    slot = facts.pop("slot", SlotView(str(link.anchor)))
    return LinkView(link, tuple((intent, age_s) for intent in intents), (slot,), **facts)


def view(*links: LinkView, queue: Any = (), **facts: Any) -> View:
    return View(Control(), links, None if queue is None else tuple(queue), **facts)


def actions(seen_view: View, **spec: Any) -> tuple[Action, ...]:
    return plan(dataclasses.replace(SPEC, **spec), seen_view).actions


# -- fallback -------------------------------------------------------------------------------------

FIRST, SECOND = Intent(1, "r0-1", 0.0), Intent(2, "r0-2", 0.0, fallback=True)
AFTER = (("rollout", 600.0),)


def waiting(age_s: float, ready_s: float | None, reason: str = "Priority", **facts: Any) -> View:
    queue = [job(R0, "r0-1", JobState.PENDING, age_s=age_s, reason=reason, **facts)]
    return view(seen(R0, FIRST, ready_s=ready_s), queue=queue)


@pytest.mark.parametrize(
    ("age_s", "ready_s", "goes"),
    [
        (601.0, 601.0, True),
        (599.0, 5000.0, False),  # not long in the queue
        (5000.0, 599.0, False),  # its parent has only just committed
        (601.0, None, True),  # a link without parents
    ],
)
def test_a_job_that_waits_too_long_goes_elsewhere(
    age_s: float, ready_s: float | None, goes: bool
) -> None:
    done = actions(waiting(age_s, ready_s), fallbacks=AFTER)
    expected = (
        Submit(R0, 2, fallback=True),
        Cancel(("r0-1",), "waited too long; goes to its fallback", R0),
    )
    assert done == (expected if goes else ())


def test_a_stage_without_a_fallback_waits_for_ever() -> None:
    assert actions(waiting(1e6, 1e6), fallbacks=(("train", 600.0),)) == ()


@pytest.mark.parametrize("reason", ["BeginTime", "Dependency"])
def test_a_job_whose_time_has_not_come_does_not_wait_for_a_place(reason: str) -> None:
    assert actions(waiting(1e6, 1e6, reason), fallbacks=AFTER) == ()


def test_it_goes_once_and_its_retries_stay_there() -> None:
    pending = job(R0, "r0-2", JobState.PENDING, age_s=1e6, reason="Priority")
    there = view(seen(R0, FIRST, SECOND, ready_s=1e6), queue=[pending])
    assert actions(there, fallbacks=AFTER) == ()
    gone = view(seen(R0, FIRST, SECOND))
    (submit,) = actions(gone, fallbacks=AFTER)
    assert isinstance(submit, Submit) and submit.fallback and submit.number == 3


def test_what_waits_behind_it_waits_for_the_new_job() -> None:
    """Its dependency moves over before the end of the old job would wake it."""
    queue = [
        job(R0, "r0-1", JobState.PENDING, reason="Priority"),
        job(T0, "t0-1", JobState.PENDING, after=("r0-1",)),
    ]
    train = seen(T0, Intent(1, "t0-1", 0.0), waits_for=(R0,))
    done = actions(view(seen(R0, FIRST, ready_s=1e6), train, queue=queue), fallbacks=AFTER)
    assert [type(action) for action in done] == [Submit, Repoint, Cancel], "it never wakes between"
    assert [action.after for action in done if isinstance(action, Repoint)] == [(R0,)]


# -- nodes ----------------------------------------------------------------------------------------


def test_a_retry_stays_away_from_nodes_that_failed() -> None:
    slot = SlotView("s", failures=1, bad_nodes=("n2", "n1"))
    (submit,) = actions(view(seen(R0, FIRST, slot=slot)))
    assert isinstance(submit, Submit) and submit.exclude == ("n1", "n2")


def test_many_bad_nodes_are_none() -> None:
    """Then it is not the nodes."""
    slot = SlotView("s", failures=1, bad_nodes=tuple(f"n{i}" for i in range(9)))
    (submit,) = actions(view(seen(R0, FIRST, slot=slot)))
    assert isinstance(submit, Submit) and submit.exclude == ()


@pytest.mark.parametrize(("num_lost", "exclude"), [(0, ()), (1, ("n7",))])
def test_where_a_job_died_before_it_began_is_a_bad_node(
    num_lost: int, exclude: tuple[str, ...]
) -> None:
    dead = job(R0, "r0-1", JobState.ENDED, nodes="n7")
    (submit,) = actions(view(seen(R0, FIRST, num_lost=num_lost), queue=[dead]))
    assert isinstance(submit, Submit) and submit.exclude == exclude


# -- what wakes a link ----------------------------------------------------------------------------


def test_a_link_wakes_when_all_its_parents_have_ended() -> None:
    """With lag 1 a rollout waits for the rollout before, and for the train stage before that."""
    queue = [job(T0, "t0-1", JobState.RUNNING), job(R1, "r1-1", JobState.RUNNING)]
    links = (seen(T0, Intent(1, "t0-1", 0.0)), seen(R1, Intent(1, "r1-1", 0.0)))
    (submit,) = actions(view(*links, seen(R2, waits_for=(T0, R1)), queue=queue))
    assert submit == Submit(R2, 1, ("t0-1", "r1-1"))


def test_a_parent_that_is_done_is_not_waited_for() -> None:
    done = seen(T0, slot=SlotView("s", committed=True))
    queue = [job(R1, "r1-1", JobState.RUNNING)]
    links = (done, seen(R1, Intent(1, "r1-1", 0.0)), seen(R2, waits_for=(T0, R1)))
    (submit,) = actions(view(*links, queue=queue))
    assert submit == Submit(R2, 1, ("r1-1",))


def test_without_one_of_its_parents_jobs_a_link_is_not_submitted() -> None:
    """Nothing would hold it: it would wake at once, and be gone."""
    queue = [job(R1, "r1-1", JobState.RUNNING)]
    unsure = seen(T0, Intent(1, "t0-1", 0.0), age_s=5.0)
    links = (unsure, seen(R1, Intent(1, "r1-1", 0.0)), seen(R2, waits_for=(T0, R1)))
    assert actions(view(*links, queue=queue)) == ()


@pytest.mark.parametrize(
    ("after", "moves"),
    [(("t0-1", "r1-1"), False), (("t0-1",), False), ((), False), (("t0-1", "666"), True)],
)
def test_one_dependency_on_a_stranger_is_enough_to_move(
    after: tuple[str, ...], moves: bool
) -> None:
    queue = [
        job(T0, "t0-1", JobState.RUNNING),
        job(R1, "r1-1", JobState.RUNNING),
        job(R2, "r2-1", JobState.PENDING, after=after),
    ]
    links = (
        seen(T0, Intent(1, "t0-1", 0.0)),
        seen(R1, Intent(1, "r1-1", 0.0)),
        seen(R2, Intent(1, "r2-1", 0.0), waits_for=(T0, R1)),
    )
    expected = (Repoint("r2-1", ("t0-1", "r1-1")),) if moves else ()
    assert actions(view(*links, queue=queue)) == expected


# -- the one who looks, and the clock -------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "counts"),
    [(JobState.RUNNING, False), (JobState.UNKNOWN, False), (JobState.PENDING, True)],
)
def test_the_job_that_looks_counts_if_it_is_queued_again(state: JobState, counts: bool) -> None:
    """A node was given up, its process lives on and looks: its very job is about to run again."""
    queue = [job(R0, "r0-1", state, age_s=1.0)]
    done = actions(view(seen(R0, FIRST, age_s=1.0), queue=queue, own=("r0-1", None)))
    assert bool(done) != counts


def test_a_complete_run_cancels_its_own_second_life_too() -> None:
    again = job(R0, "r0-1", JobState.PENDING)
    (cancel,) = actions(view(queue=[again], own=("r0-1", None)))
    assert isinstance(cancel, Cancel) and cancel.job_ids == ("r0-1",)


@pytest.mark.parametrize(("age_s", "is_over"), [(-80.0, False), (-100.0, True), (-1e9, True)])
def test_an_intent_of_the_future_is_not_waited_for(age_s: float, is_over: bool) -> None:
    """A clock was set back: it would be waited for until that time comes."""
    done = actions(view(seen(R0, FIRST, age_s=age_s)))
    assert bool(done) == is_over


# -- ticks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ages", "submits", "lacks"),
    [((), True, True), ((5.0,), False, True), ((50.0,), True, False), ((50.0, 5.0), False, False)],
)
def test_a_plan_says_whether_a_tick_is_still_missing(
    ages: tuple[float, ...], submits: bool, lacks: bool
) -> None:
    queue = [
        QueuedJob(str(n), f"toy.tick.k{n}", JobState.PENDING, age_s=age)
        for n, age in enumerate(ages)
    ]
    running = job(R0, "r0-1", JobState.RUNNING)
    made = plan(Spec("toy", "id"), view(seen(R0, FIRST), queue=[*queue, running]))
    assert any(isinstance(action, SubmitTick) for action in made.actions) == submits
    assert made.lacks_tick == lacks
    assert len(ages) + submits + lacks >= TICKS_WANTED
