"""Outages: how long a deferred stage waits, and what is planned meanwhile."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from slurm_rl.chain.graph import Link
from slurm_rl.chain.outages import LONGEST_S, deferred_for, describe_outage, plan_deferral
from slurm_rl.chain.plan import plan
from slurm_rl.chain.scheduler import JobState, QueuedJob
from slurm_rl.chain.view import LinkView, Repoint, SlotView, Spec, Submit, View
from slurm_rl.storage.control import Control
from slurm_rl.storage.intents import Intent

SPEC = Spec("toy", "id", ticks=False, poll_s=30.0, max_attempts=1, max_stops=1)
SCORE, TRAIN = Link(0, ("score",)), Link(0, ("train",))


@given(st.integers(1, 5_000), st.floats(0.1, 3_000.0))
def test_waits_grow_from_the_poll_to_ten_minutes(number: int, poll_s: float) -> None:
    waits = [plan_deferral(n, poll_s=poll_s) for n in (number, number + 1)]
    assert poll_s <= waits[0] <= waits[1] <= max(poll_s, LONGEST_S)
    assert plan_deferral(1, poll_s=poll_s) == poll_s


@given(st.floats(1.0, 600.0), st.floats(0.0, 1e6))
def test_looks_are_bounded_by_the_length_of_the_outage(poll_s: float, outage_s: float) -> None:
    looks, now = 0, 0.0
    while now <= outage_s:
        looks += 1
        now += plan_deferral(looks, poll_s=poll_s)
    assert looks <= 1 + outage_s / poll_s
    assert looks <= 12 + outage_s / LONGEST_S


def slot(**facts: Any) -> SlotView:
    return SlotView("i0000.score.t0", num_deferrals=3, service="judge", **facts)


def test_what_is_left_of_a_wait() -> None:
    assert deferred_for(slot(since_deferral_s=20.0), SPEC) == 100.0
    assert deferred_for(slot(since_deferral_s=500.0), SPEC) == 0.0
    assert deferred_for(SlotView("x"), SPEC) == 0.0
    assert deferred_for(dataclasses.replace(slot(), committed=True), SPEC) == 0.0


def test_the_words_name_the_service_and_since_when() -> None:
    said = describe_outage(slot(outage_s=60.0, last_outage="it said 503"), now=1_000_060.0)
    assert said.startswith("waits for service judge (down since 1970-01-1")
    assert said.endswith("; looked 3 times): it said 503")


def seen(link: Link, *numbers: int, waits_for: tuple[Link, ...] = (), **facts: Any) -> LinkView:
    short = link.kinds[0][0]
    made = tuple((Intent(n, f"{short}{n}", 0.0), 500.0) for n in numbers)
    return LinkView(link, made, (SlotView(f"{link.anchor}.t0", **facts),), waits_for=waits_for)


def job(token: str, state: JobState, job_id: str, *after: str) -> QueuedJob:
    kind = {"s": "score", "t": "train"}[token[0]]
    return QueuedJob(job_id, f"toy.i0000.{kind}.{token}", state, after=after, age_s=900.0)


def make_view(*jobs: QueuedJob, own: tuple[str, None] | None, deferrals: int = 1) -> View:
    score = seen(SCORE, 1, num_deferrals=deferrals, since_deferral_s=0.0, epoch=deferrals)
    train = seen(TRAIN, 1, waits_for=(SCORE,))
    return View(Control(), (score, train), jobs, own)


def test_a_deferred_job_is_followed_by_another_and_those_behind_wait_for_that() -> None:
    """Its own number, no node avoided, no halt although no attempt may fail."""
    score = job("s1", JobState.RUNNING, "7")
    found = plan(SPEC, make_view(score, job("t1", JobState.PENDING, "8", "7"), own=("s1", None)))
    assert found.actions == (Submit(SCORE, 2, (), (), 30.0), Repoint("8", (SCORE,)))
    assert any("waits for" in line for line in found.waiting)


def test_after_an_ordinary_failure_they_are_woken_as_ever() -> None:
    view = make_view(
        job("s1", JobState.RUNNING, "7"), job("t1", JobState.PENDING, "8", "7"), own=("s1", None)
    )
    failed = dataclasses.replace(view.links[0], slots=(SlotView("i0000.score.t0", failures=1),))
    view = dataclasses.replace(view, links=(failed, view.links[1]))
    found = plan(dataclasses.replace(SPEC, max_attempts=3), view)
    assert not any(isinstance(action, Repoint) for action in found.actions)


@given(st.integers(1, 500), st.booleans())
def test_however_long_it_lasts_it_never_halts(number: int, is_ending: bool) -> None:
    jobs = [job("s1", JobState.RUNNING, "7")] if is_ending else []
    view = make_view(*jobs, own=("s1", None) if is_ending else None, deferrals=number)
    (submit, *_) = plan(SPEC, view).actions
    assert isinstance(submit, Submit) and submit.link == SCORE
    assert submit.begin_s == plan_deferral(number, poll_s=30.0) and submit.exclude == ()
