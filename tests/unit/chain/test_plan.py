"""plan() as tables: each rule of the planner has its row."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from slurm_rl.chain.graph import Link
from slurm_rl.chain.plan import plan
from slurm_rl.chain.plan_ticks import is_tick
from slurm_rl.chain.scheduler import JobState, QueuedJob
from slurm_rl.chain.view import (
    Cancel,
    HaltRun,
    LinkView,
    Plan,
    Repoint,
    SlotView,
    Spec,
    Submit,
    SubmitTick,
    View,
)
from slurm_rl.storage.control import Control, Halt
from slurm_rl.storage.intents import Intent

PENDING, RUNNING, HELD, ENDED, UNKNOWN = (
    JobState.PENDING,
    JobState.RUNNING,
    JobState.HELD,
    JobState.ENDED,
    JobState.UNKNOWN,
)
SPEC = Spec(
    run_name="toy",
    short_id="id",
    window=3,
    max_attempts=3,
    submit_deadline_s=90.0,
    retry_delay_s=15.0,
    tick_s=600.0,
    ticks=False,
)
R0, T0, R1, T1 = (Link(i, (kind,)) for i in (0, 1) for kind in ("rollout", "train"))


def seen(
    link: Link,
    *intents: tuple[int, float],
    shards: int = 1,
    committed: tuple[int, ...] = (),
    **slot: Any,
) -> LinkView:
    """A link with intents (number, age); tokens are `<stage><number>`, as r0-1."""
    short = f"{link.kinds[0][0]}{link.iteration}"
    slots = tuple(
        SlotView(f"{short}.{shard}", None if shards == 1 else shard, shard in committed, **slot)
        for shard in range(shards)
    )
    made = tuple((Intent(n, f"{short}-{n}", 0.0), age) for n, age in intents)
    order = [R0, T0, R1, T1]
    before = order[: order.index(link)][-1:]
    return LinkView(link, made, slots, waits_for=tuple(before))


def job(token: str, state: JobState, job_id: str = "", **facts: Any) -> QueuedJob:
    kind = {"r": "rollout", "t": "train"}.get(token[0], "tick")
    middle = "tick" if kind == "tick" else f"i{int(token[1]):04d}.{kind}"
    facts.setdefault("age_s", 1000.0)
    return QueuedJob(job_id or token, f"toy.{middle}.{token}", state, **facts)


def view(*links: LinkView, queue: Any = (), **facts: Any) -> View:
    facts.setdefault("control", Control())
    return View(links=links, queue=None if queue is None else tuple(queue), **facts)


def actions(seen_view: View, **spec: Any) -> tuple[Any, ...]:
    return plan(dataclasses.replace(SPEC, **spec), seen_view).actions


# -- submitting -----------------------------------------------------------------------------------


def test_a_fresh_run_gets_its_window_each_job_waking_on_the_one_before() -> None:
    assert actions(view(seen(R0), seen(T0), seen(R1))) == (
        Submit(R0, 1, ()),
        Submit(T0, 1, (R0,)),
        Submit(R1, 1, (T0,)),
    )


@pytest.mark.parametrize("state", [PENDING, RUNNING, UNKNOWN])
def test_a_live_job_stands_for_its_link_and_the_next_waits_for_it(state: JobState) -> None:
    found = actions(view(seen(R0, (1, 5.0)), seen(T0), queue=[job("r0-1", state, "7")]))
    assert found == (Submit(T0, 1, ("7",)),)


def test_a_job_of_an_earlier_intent_stands_too() -> None:
    links = seen(R0, (1, 500.0), (2, 400.0))
    assert actions(view(links, queue=[job("r0-1", RUNNING)])) == ()


@pytest.mark.parametrize(("age_s", "number"), [(89.0, None), (90.0, 2), (1e6, 2)])
def test_an_intent_that_the_queue_does_not_show_is_over_after_the_deadline(
    age_s: float, number: int | None
) -> None:
    found = actions(view(seen(R0, (1, age_s))))
    assert found == (() if number is None else (Submit(R0, number, ()),))


def test_a_job_that_the_queue_knows_to_be_over_needs_no_deadline() -> None:
    found = actions(view(seen(R0, (1, 5.0)), queue=[job("r0-1", ENDED)]))
    assert found == (Submit(R0, 2, ()),)


def test_only_missing_shards_are_submitted_again() -> None:
    links = seen(R0, (1, 500.0), shards=3, committed=(1,))
    assert actions(view(links)) == (Submit(R0, 2, (), shards=(0, 2)),)


def test_the_job_that_looks_and_is_about_to_end_counts_for_nothing() -> None:
    queue = [job("r0-1", RUNNING)]
    assert actions(view(seen(R0, (1, 5.0)), queue=queue)) == ()
    own = ("r0-1", None)
    assert actions(view(seen(R0, (1, 5.0)), queue=queue, own=own)) == (Submit(R0, 2, ()),)


# -- an unknown queue -----------------------------------------------------------------------------


def test_an_unknown_queue_submits_no_second_number() -> None:
    found = plan(SPEC, view(seen(R0, (1, 1e6)), seen(T0), queue=None))
    assert found.actions == ()
    assert any("does not answer" in reason for reason in found.waiting)


def test_an_unknown_queue_does_not_hinder_a_first_number() -> None:
    assert actions(view(seen(R0), queue=None)) == (Submit(R0, 1, ()),)


def test_an_unknown_queue_submits_no_tick() -> None:
    assert actions(view(seen(R0, (1, 1e6)), queue=None), ticks=True) == ()


def test_a_link_without_a_live_parent_is_left_out() -> None:
    found = plan(SPEC, view(seen(R0, (1, 5.0)), seen(T0), seen(R1)))
    assert found.actions == ()


# -- retries --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failures", "since_s", "begin_s"),
    [(1, 14.0, 1.0), (1, 15.0, None), (2, 29.0, 1.0), (3, 0.0, 60.0)],
)
def test_a_failed_stage_waits_in_the_queue_and_longer_each_time(
    failures: int, since_s: float, begin_s: float | None
) -> None:
    links = seen(R0, (1, 500.0), failures=failures, since_failure_s=since_s)
    found = actions(view(links), max_attempts=9)
    assert found == (Submit(R0, 2, (), begin_s=begin_s),)


@pytest.mark.parametrize(("num_lost", "halts"), [(9, False), (10, True)])
def test_jobs_that_die_before_they_claim_do_not_go_on_for_ever(num_lost: int, halts: bool) -> None:
    links = dataclasses.replace(seen(R0, (10, 500.0)), num_lost=num_lost)
    found = actions(view(links))
    assert isinstance(found[0], HaltRun) is halts
    if halts:
        assert "10 jobs ended before they could look for work" in found[0].halt.reason


def test_the_cap_halts_says_why_and_cancels_what_waits() -> None:
    links = seen(R0, (1, 500.0), failures=3, last_error="no disk", log="/log")
    queue = [job("t0-1", PENDING, "8"), job("xtick", PENDING, "9")]
    halt, cancel = actions(view(links, seen(T0, (1, 5.0)), queue=queue))
    assert isinstance(halt, HaltRun)
    assert "3 attempts" in halt.halt.reason
    assert "no disk" in halt.halt.reason
    assert halt.halt.log == "/log"
    assert isinstance(cancel, Cancel)
    assert cancel.job_ids == ("8", "9")


def test_failures_of_a_committed_shard_do_not_count() -> None:
    done = SlotView("a", 0, True, failures=9)
    links = LinkView(R0, (), (done, SlotView("b", 1)))
    assert actions(view(links)) == (Submit(R0, 1, (), shards=(1,)),)


# -- control --------------------------------------------------------------------------------------

HALTED = Control(halt=Halt("why"))


@pytest.mark.parametrize("control", [HALTED, Control(paused="me")], ids=["halt", "pause"])
def test_a_stopped_run_submits_nothing(control: Control) -> None:
    assert actions(view(seen(R0), seen(T0), control=control), ticks=True) == ()


def test_a_halted_run_cancels_what_waits_and_nothing_that_runs() -> None:
    queue = [
        job("r0-1", RUNNING, "7_0", task=0),
        job("r0-1", PENDING, "7_1", task=1),
        job("t0-1", HELD, "8"),
        job("xtick", PENDING, "9"),
    ]
    (cancel,) = actions(view(seen(R0, (1, 5.0)), control=HALTED, queue=queue))
    assert cancel.job_ids == ("7_1", "8", "9")


def test_a_complete_run_cancels_what_waits() -> None:
    found = plan(SPEC, view(queue=[job("xtick", PENDING, "9")]))
    assert [a.job_ids for a in found.actions if isinstance(a, Cancel)] == [("9",)]
    assert found.waiting == ("complete",)


def test_a_commit_of_other_parents_halts() -> None:
    (halt,) = actions(view(seen(R0), conflict="made from others"))
    assert isinstance(halt, HaltRun)
    assert halt.halt.reason == "made from others"


# -- dependencies ---------------------------------------------------------------------------------


def test_a_job_that_waits_for_a_stranger_is_repointed() -> None:
    queue = [job("r0-1", RUNNING, "7"), job("t0-1", PENDING, "8", after=("666",))]
    links = (seen(R0, (1, 5.0)), seen(T0, (1, 5.0)))
    assert actions(view(*links, queue=queue)) == (Repoint("8", ("7",)),)


def test_a_first_link_that_waits_is_freed() -> None:
    queue = [job("t0-1", PENDING, "8", after=("7",))]
    assert actions(view(seen(T0, (1, 5.0)), queue=queue)) == (Repoint("8", ()),)


def test_waiting_for_the_job_that_looks_is_fine() -> None:
    queue = [job("r0-1", RUNNING, "7"), job("t0-1", PENDING, "8", after=("7",))]
    assert actions(view(seen(T0, (1, 5.0)), queue=queue, own=("r0-1", None))) == ()


@pytest.mark.parametrize("after", [(), ("7",)])
def test_a_job_that_waits_for_its_parent_or_nothing_is_let_be(after: tuple[str, ...]) -> None:
    queue = [job("r0-1", RUNNING, "7"), job("t0-1", PENDING, "8", after=after)]
    assert actions(view(seen(R0, (1, 5.0)), seen(T0, (1, 5.0)), queue=queue)) == ()


# -- held jobs and strays -------------------------------------------------------------------------


def test_a_held_job_is_replaced() -> None:
    queue = [job("r0-1", HELD, "7", reason="launch failed requeued held")]
    found = plan(SPEC, view(seen(R0, (1, 5.0)), queue=queue))
    assert found.actions == (Cancel(("7",), "held; replaced"), Submit(R0, 2, ()))
    assert "launch failed" in found.waiting[0]


@pytest.mark.parametrize(
    ("stray", "is_cancelled"),
    [
        (job("r0-9", PENDING, "5"), True),
        (job("r0-9", HELD, "5"), True),
        (job("r0-9", PENDING, "5", age_s=89.0), False),  # its intent may be younger than our look
        (job("r0-9", RUNNING, "5"), False),
        (job("r0-9", ENDED, "5"), False),
        (job("t9-1", PENDING, "5"), False),  # ahead of the window
        (job("xtick", PENDING, "5"), False),
    ],
)
def test_a_waiting_job_that_stands_for_nothing_is_cancelled(
    stray: QueuedJob, is_cancelled: bool
) -> None:
    found = actions(view(seen(R0, (1, 5.0)), queue=[job("r0-1", RUNNING, "7"), stray]))
    assert found == ((Cancel(("5",), "nothing left to do"),) if is_cancelled else ())


def test_a_stray_task_is_cancelled_without_its_array() -> None:
    queue = [
        job("r0-1", RUNNING, "7"),
        job("r0-9", RUNNING, "5_0", task=0),
        job("r0-9", PENDING, "5_1", task=1),
    ]
    assert actions(view(seen(R0, (1, 5.0)), queue=queue)) == (
        Cancel(("5_1",), "nothing left to do"),
    )


# -- ticks ----------------------------------------------------------------------------------------

LIVE = (seen(R0, (1, 5.0)),)
WORKING = job("r0-1", RUNNING, "7")


@pytest.mark.parametrize(
    ("ticks", "expected"),
    [
        ((), (SubmitTick(600.0),)),
        ((job("x1", PENDING, age_s=11.0),), (SubmitTick(1200.0),)),
        ((job("x1", PENDING, age_s=9.0),), ()),  # too soon: one crash could forget both
        ((job("x1", PENDING), job("x2", PENDING)), ()),
        ((job("x1", RUNNING), job("x2", PENDING)), (SubmitTick(1200.0),)),  # running is nothing
        (
            (job("x1", RUNNING), job("x2", HELD)),
            (Cancel(("x2",), "a held tick never wakes"), SubmitTick(600.0)),
        ),
    ],
)
def test_two_pending_ticks_are_kept(ticks: tuple[QueuedJob, ...], expected: Any) -> None:
    assert actions(view(*LIVE, queue=[WORKING, *ticks]), ticks=True) == expected


def test_from_the_login_node_there_are_no_ticks() -> None:
    assert actions(view(*LIVE, queue=[WORKING]), ticks=False) == ()


def test_names_of_ticks() -> None:
    assert is_tick("toy.tick.abc")
    assert not is_tick("tick.i0000.train.abc")
    assert not is_tick("toy.i0000.tick-like.abc")


# -- limits ---------------------------------------------------------------------------------------


def test_a_limit_defers() -> None:
    found = plan(dataclasses.replace(SPEC, max_submit_jobs=2), view(seen(R0), seen(T0), seen(R1)))
    assert found.actions == (Submit(R0, 1, ()), Submit(T0, 1, (R0,)))
    assert "limit" in found.waiting[0]


def test_what_is_queued_counts_against_the_limit_and_what_has_ended_does_not() -> None:
    queue = [job("r0-1", RUNNING, "7"), job("r9-1", ENDED), job("r9-2", ENDED)]
    links = (seen(R0, (1, 5.0)), seen(T0), seen(R1))
    assert actions(view(*links, queue=queue), max_submit_jobs=2) == (Submit(T0, 1, ("7",)),)


def test_an_array_that_does_not_fit_below_the_limit_waits_as_a_whole() -> None:
    assert actions(view(seen(R0, shards=4)), max_submit_jobs=3) == ()


def test_links_ahead_leave_room_for_the_ticks() -> None:
    found = actions(view(seen(R0), seen(T0), seen(R1)), max_submit_jobs=4, ticks=True)
    assert [type(a) for a in found] == [Submit, Submit, SubmitTick]


def test_the_first_link_goes_before_the_ticks() -> None:
    found = actions(view(seen(R0), seen(T0)), max_submit_jobs=1, ticks=True)
    assert found[0] == Submit(R0, 1, ())


def test_a_plan_is_pure() -> None:
    seen_view = view(seen(R0), seen(T0), queue=[job("r0-9", PENDING)])
    first: Plan = plan(SPEC, seen_view)
    assert plan(SPEC, seen_view) == first
