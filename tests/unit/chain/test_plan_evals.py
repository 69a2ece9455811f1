"""plan() with evaluations in the view: what is done about them, and that the chain never notices."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from slurm_rl.chain.graph import Link
from slurm_rl.chain.plan import plan
from slurm_rl.chain.plan_ticks import is_tick
from slurm_rl.chain.scheduler import JobState, QueuedJob
from slurm_rl.chain.view import (
    MAX_EVALS,
    Action,
    Cancel,
    GiveUp,
    HaltRun,
    LinkView,
    Repoint,
    SlotView,
    Spec,
    Submit,
    SubmitTick,
    View,
)
from slurm_rl.storage.control import Control
from slurm_rl.storage.evals import GivenUp
from slurm_rl.storage.intents import Intent

SPEC = Spec("toy", "id", max_attempts=3, ticks=False)
R0, T0, R1, T1 = (Link(i, (kind,)) for i in (0, 1) for kind in ("rollout", "train"))
E0, E1, E2 = (Link(version, ("eval-a",)) for version in range(3))
F1 = Link(1, ("eval-b",))


def seen(link: Link, *numbers: int, waits_for: tuple[Link, ...] = (), **slot: Any) -> LinkView:
    token = f"{link.label}{link.iteration}"
    made = tuple((Intent(n, f"{token}n{n}", 0.0), 500.0) for n in numbers)
    return LinkView(link, made, (SlotView(f"{link.anchor}.t0", **slot),), waits_for=waits_for)


def job(link: Link, number: int, state: JobState, job_id: str = "", **facts: Any) -> QueuedJob:
    name = link.job_name("toy", f"{link.label}{link.iteration}n{number}")
    facts.setdefault("age_s", 900.0)
    return QueuedJob(job_id or name, name, state, **facts)


def actions(view: View, **spec: Any) -> tuple[Action, ...]:
    return plan(dataclasses.replace(SPEC, **spec), view).actions


def chain(*links: LinkView) -> tuple[LinkView, ...]:
    return links or (seen(R0), seen(T0, waits_for=(R0,)))


# -- rules, one a test ----------------------------------------------------------------------------


def test_one_whose_weights_are_there_is_submitted_behind_the_chain_and_waits_for_nothing() -> None:
    view = View(Control(), chain(), (), evals=(seen(E0, waits_for=(Link(0, ("init",)),)),))
    assert actions(view) == (Submit(R0, 1), Submit(T0, 1, (R0,)), Submit(E0, 1))


def test_ahead_it_wakes_behind_what_makes_its_weights() -> None:
    view = View(Control(), chain(), (), evals=(seen(E1, waits_for=(T0,)),))
    assert actions(view, submits=False)[-1] == Submit(E1, 1, (T0,))


def test_in_turn_the_chain_waits_for_those_that_come_before() -> None:
    links = (seen(R0), seen(T0, waits_for=(R0,)), seen(R1, waits_for=(T0,)))
    evals = (seen(E0), seen(E1, waits_for=(T0,)), seen(F1, waits_for=(T0,)))
    assert actions(View(Control(), links, (), evals=evals), serial=True) == (
        Submit(E0, 1),
        Submit(R0, 1, (E0,)),
        Submit(T0, 1, (R0,)),
        Submit(E1, 1, (T0,)),
        Submit(F1, 1, (T0, E1)),
        Submit(R1, 1, (T0, F1)),
    )


def test_in_turn_it_does_not_wait_for_one_that_cannot_be_submitted() -> None:
    """Its last submission may still show up in the queue."""
    young = dataclasses.replace(seen(E0), intents=((Intent(1, "young", 0.0), 5.0),))
    view = View(Control(), chain(), (), evals=(young,))
    assert actions(view, serial=True) == (Submit(R0, 1), Submit(T0, 1, (R0,)))


def test_the_run_is_over_with_the_last_of_them() -> None:
    tick = QueuedJob("t", "toy.tick.x", JobState.PENDING)
    over = View(Control(), (), (tick,))
    assert plan(SPEC, over).waiting == ("complete",) and actions(over) == (
        Cancel(("t",), "the run is complete"),
    )
    left = View(Control(), (), (), evals=(seen(E2),))
    assert actions(left, ticks=True) == (Submit(E2, 1), SubmitTick(600.0))
    more = View(Control(), (), (tick,), has_more_evals=True)
    assert not any(isinstance(action, Cancel) for action in actions(more, ticks=True))


def test_one_that_failed_for_good_is_given_up() -> None:
    facts: dict[str, Any] = {"failures": 3, "last_error": "no", "log": "/log", "epoch": 5}
    view = View(Control(), chain(), (), now=9.0, evals=(seen(E0, 1, 2, **facts),))
    (found,) = (action for action in actions(view) if isinstance(action, GiveUp))
    said = "i0000.eval-a.t0: 3 attempts ended without a commit; the last said: no"
    assert found == GiveUp(E0.anchor, GivenUp(5, 2, said, "/log", 9.0))
    assert not any(isinstance(a, Submit) and a.link == E0 for a in actions(view))


def test_a_persons_mistake_gives_it_up_at_once_and_halts_nothing() -> None:
    facts: dict[str, Any] = {"failures": 1, "is_users": True, "last_error": "bad row", "epoch": 1}
    view = View(Control(), chain(), (), evals=(seen(E0, 1, **facts),))
    found = actions(view)
    assert [a.given_up.reason for a in found if isinstance(a, GiveUp)] == [
        "i0000.eval-a.t0: bad row"
    ]
    assert not any(isinstance(action, HaltRun) for action in found)


def test_one_that_may_be_at_work_is_not_given_up() -> None:
    view = View(Control(), (), (job(E0, 1, JobState.RUNNING),), evals=(seen(E0, 1, failures=9),))
    assert not any(isinstance(action, GiveUp) for action in actions(view))
    blind = View(Control(), (), None, evals=(seen(E0, 1, failures=9),))
    assert not any(isinstance(action, GiveUp) for action in actions(blind))


def test_pending_jobs_of_those_that_nobody_wants_are_cancelled() -> None:
    stale = job(E2, 1, JobState.PENDING, "9")
    assert actions(View(Control(), chain(), (stale,)))[-1] == Cancel(("9",), "nothing left to do")
    assert Cancel(("9",), "nothing left to do") in actions(
        View(Control(), (), (stale,), evals=(seen(E0),))
    )


def test_not_more_than_so_many_have_jobs() -> None:
    many = tuple(seen(Link(0, (f"eval-{i}",))) for i in range(9))
    found = [a for a in actions(View(Control(), chain(), (), evals=many)) if isinstance(a, Submit)]
    assert [a.link for a in found if a.link.anchor.is_eval] == [s.link for s in many[:MAX_EVALS]]
    busy = tuple(seen(s.link, 1) for s in many[5:7])
    queue = tuple(job(s.link, 1, JobState.RUNNING) for s in busy)
    view = View(Control(), chain(), queue, evals=(*many[:5], *busy))
    found = [a for a in actions(view) if isinstance(a, Submit)]
    assert [a.link for a in found if a.link.anchor.is_eval] == [s.link for s in many[:2]]


# -- any view at all ------------------------------------------------------------------------------

AGES = st.sampled_from([0.0, 60.0, 500.0])
STATES = st.sampled_from(list(JobState))


@st.composite
def views(draw: st.DrawFn) -> View:
    def draw_link(link: Link, waits_for: tuple[Link, ...]) -> tuple[LinkView, list[QueuedJob]]:
        numbers = range(1, 1 + draw(st.integers(0, 2)))
        facts: dict[str, Any] = {
            "failures": draw(st.sampled_from([0, 0, 1, 2])),
            "num_deferrals": draw(st.sampled_from([0, 0, 2])),
            "since_failure_s": draw(AGES),
        }
        if link.anchor.is_eval:
            facts |= {"is_users": draw(st.booleans()), "failures": draw(st.integers(0, 4))}
        found = seen(link, *numbers, waits_for=waits_for, **facts)
        jobs = [
            job(link, n, draw(STATES), age_s=draw(AGES)) for n in numbers if draw(st.booleans())
        ]
        return found, jobs

    order = (R0, T0, R1, T1)[: draw(st.integers(0, 4))]
    links, queue = [], []
    for number, link in enumerate(order):
        found, jobs = draw_link(link, order[number - 1 : number])
        links.append(found)
        queue += jobs
    evals = []
    for link, parent in ((E0, R0), (E1, T0), (F1, T0), (E2, T1)):
        if draw(st.booleans()):
            found, jobs = draw_link(link, (parent,) if parent in order else ())
            evals.append(found)
            queue += jobs
    queue += [QueuedJob(n, f"toy.tick.{n}", JobState.PENDING, age_s=50.0) for n in ("x", "y")]
    is_blind = draw(st.integers(0, 6)) == 0
    more = draw(st.booleans())
    return View(
        Control(),
        tuple(links),
        None if is_blind else tuple(queue),
        evals=tuple(evals),
        has_more_evals=more,
    )


def without_evals(view: View) -> View:
    queue = view.queue and tuple(job for job in view.queue if ".eval-" not in job.name)
    return dataclasses.replace(view, queue=queue, evals=(), has_more_evals=True)


def of_chain(found: tuple[Action, ...]) -> list[Action]:
    """What a plan does about the chain's own links."""
    kept: list[Action] = []
    for action in found:
        if isinstance(action, Submit) and action.link.anchor.is_eval:
            continue
        if isinstance(action, GiveUp):
            continue
        if isinstance(action, Cancel):
            ids = tuple(i for i in action.job_ids if ".eval-" not in i)
            if not ids:
                continue
            action = dataclasses.replace(action, job_ids=ids)
        if isinstance(action, Repoint) and ".eval-" in action.job_id:
            continue
        kept.append(action)
    return kept


@given(views(), st.booleans(), st.booleans())
def test_whatever_becomes_of_them_the_chain_is_planned_as_if_there_were_none(
    view: View, ticks: bool, submits: bool
) -> None:
    spec = dataclasses.replace(SPEC, ticks=ticks, submits=submits)
    view = dataclasses.replace(view, has_more_evals=True)  # the end of a run is another matter
    with_them, without = plan(spec, view), plan(spec, without_evals(view))
    assert of_chain(with_them.actions) == of_chain(without.actions)
    assert with_them.lacks_tick == without.lacks_tick


@given(views(), st.integers(3, 12))
def test_where_places_are_few_they_take_none_that_the_chain_needs(view: View, limit: int) -> None:
    """Two links of the chain and two ticks always find a place, or were there before."""
    spec = dataclasses.replace(SPEC, ticks=True, max_submit_jobs=limit)
    found = [a for a in plan(spec, view).actions if isinstance(a, Submit)]
    new = sum(action.link.anchor.is_eval for action in found)
    live = [j for j in view.queue or () if j.state is not JobState.ENDED]
    ticks = sum(is_tick(j.name) for j in live)
    if new:
        evals = new + sum(".eval-" in j.name and j.state.is_live for j in live)
        reserved = 4 if view.links else 2
        assert evals <= limit - reserved and len(live) + len(found) <= limit - max(0, 2 - ticks)


@given(views(), st.booleans())
def test_in_turn_nothing_waits_for_what_is_not_there(view: View, submits: bool) -> None:
    spec = dataclasses.replace(SPEC, serial=True, submits=submits)
    there = {j.base_id for j in view.queue or ()}
    for action in plan(spec, view).actions:
        if isinstance(action, Submit):
            assert all(at in there for at in action.after)
            there.add(action.link)
        assert not isinstance(action, HaltRun)


@given(views())
def test_each_has_one_job_and_no_submission_beside_a_live_one(view: View) -> None:
    live = {j.token for j in view.queue or () if j.state.is_live}
    found = [a for a in plan(SPEC, view).actions if isinstance(a, Submit)]
    assert len({a.link for a in found}) == len(found)
    for action in found:
        (known,) = (s for s in view.all_links if s.link == action.link)
        assert not {intent.token for intent, _ in known.intents} & live
