"""plan() on any view at all: what it must never do."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from slurm_rl.chain.graph import Link
from slurm_rl.chain.plan import plan
from slurm_rl.chain.scheduler import JobState, QueuedJob
from slurm_rl.chain.view import (
    Action,
    Cancel,
    HaltRun,
    LinkView,
    Repoint,
    SlotView,
    Spec,
    Submit,
    SubmitTick,
    View,
)
from slurm_rl.storage.control import Control, Halt
from slurm_rl.storage.intents import Intent

LINKS = tuple(Link(i, (kind,)) for i in range(2) for kind in ("rollout", "train"))
AGES = st.sampled_from([0.0, 5.0, 11.0, 60.0, 90.0, 500.0])


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    return Spec(
        run_name="toy",
        short_id="id",
        window=draw(st.integers(1, 4)),
        max_attempts=draw(st.integers(1, 3)),
        ticks=draw(st.booleans()),
        max_submit_jobs=draw(st.sampled_from([None, 1, 3, 6])),
    )


@st.composite
def link_views(draw: st.DrawFn, link: Link) -> LinkView:
    num_shards = draw(st.sampled_from([1, 1, 2]))
    slots = tuple(
        SlotView(
            f"{link.anchor}/{shard}",
            shard if num_shards > 1 else None,
            draw(st.integers(0, 9)) < 2,
            failures=draw(st.sampled_from([0, 0, 0, 1, 3])),
            since_failure_s=draw(AGES),
        )
        for shard in range(num_shards)
    )
    intents = tuple(
        (Intent(n, f"{link.label}{link.iteration}n{n}", 0.0), draw(AGES))
        for n in range(1, 1 + draw(st.integers(0, 3)))
    )
    before = LINKS[: LINKS.index(link)][-1:]
    return LinkView(link, intents, slots, waits_for=before)


@st.composite
def views(draw: st.DrawFn) -> View:
    links = tuple(draw(link_views(link)) for link in LINKS[: draw(st.integers(0, 4))])
    names = [
        seen.link.job_name("toy", intent.token) for seen in links for intent, _ in seen.intents
    ]
    names += ["toy.tick.a", "toy.tick.b", "toy.tick.c", "toy.i0000.rollout.gone"]
    queue = tuple(
        QueuedJob(
            str(number),
            name,
            draw(st.sampled_from(list(JobState))),
            after=draw(st.sampled_from([(), (), ("1",), ("99",)])),
            age_s=draw(AGES),
        )
        for number, name in enumerate(names)
        if draw(st.booleans())
    )
    control = draw(
        st.sampled_from([Control()] * 4 + [Control(paused="x"), Control(halt=Halt("x"))])
    )
    own = draw(st.sampled_from([None, None, *[(job.token, None) for job in queue]]))
    return View(control, links, None if draw(st.integers(0, 5)) == 0 else queue, own)


def live_tokens(view: View) -> set[str]:
    jobs = view.queue or ()
    return {job.token for job in jobs if job.state.is_live and not view.is_own(job)}


def submits(actions: tuple[Action, ...]) -> list[Submit]:
    return [action for action in actions if isinstance(action, Submit)]


@given(specs(), views())
def test_a_link_with_a_live_job_or_a_commit_is_not_submitted(spec: Spec, view: View) -> None:
    seen = {link.link: link for link in view.links}
    for action in submits(plan(spec, view).actions):
        assert not seen[action.link].is_done
        tokens = {intent.token for intent, _ in seen[action.link].intents}
        assert not tokens & live_tokens(view)


@given(specs(), views())
def test_numbers_go_up_by_one_and_each_link_once(spec: Spec, view: View) -> None:
    seen = {link.link: link for link in view.links}
    found = submits(plan(spec, view).actions)
    assert len({action.link for action in found}) == len(found)
    for action in found:
        assert action.number == len(seen[action.link].intents) + 1
        missing = seen[action.link].missing_shards
        assert set(action.shards) <= set(missing) and bool(action.shards) == bool(missing)


@given(specs(), views())
def test_an_unknown_queue_never_makes_another_number(spec: Spec, view: View) -> None:
    blind = dataclasses.replace(view, queue=None)
    found = plan(spec, blind).actions
    assert all(action.number == 1 for action in submits(found))
    assert not any(isinstance(action, SubmitTick | Cancel | Repoint) for action in found)


@given(specs(), views())
def test_a_stopped_run_is_given_no_work(spec: Spec, view: View) -> None:
    for control in (Control(paused="x"), Control(halt=Halt("x"))):
        found = plan(spec, dataclasses.replace(view, control=control)).actions
        assert all(isinstance(action, Cancel) for action in found)


@given(specs(), views())
def test_what_runs_is_never_cancelled_nor_the_job_that_looks(spec: Spec, view: View) -> None:
    jobs = {job.job_id: job for job in view.queue or ()}
    for action in plan(spec, view).actions:
        if isinstance(action, Cancel):
            for job_id in action.job_ids:
                assert jobs[job_id].state in (JobState.PENDING, JobState.HELD)
                assert not view.is_own(jobs[job_id])


@given(specs(), views())
def test_the_limit_holds(spec: Spec, view: View) -> None:
    if spec.max_submit_jobs is None or view.queue is None:
        return
    used = sum(job.state is not JobState.ENDED for job in view.queue)
    new = sum(max(1, len(action.shards)) for action in submits(plan(spec, view).actions))
    assert new == 0 or used + new <= spec.max_submit_jobs


@given(specs(), views())
def test_each_job_but_the_first_waits_for_one_before_it(spec: Spec, view: View) -> None:
    open_links = [seen.link for seen in view.links if not seen.is_done]
    for action in submits(plan(spec, view).actions):
        waits_for = next(seen.waits_for for seen in view.links if seen.link == action.link)
        assert len(action.after) == len([link for link in waits_for if link in open_links])
        for parent in action.after:
            assert not isinstance(parent, Link) or parent in waits_for


@given(specs(), views())
def test_a_plan_that_was_carried_out_leaves_nothing_to_do(spec: Spec, view: View) -> None:
    """Apply the actions to the view; the next plan submits, cancels and repoints nothing."""
    if view.queue is None or view.own is not None:
        return
    after = view
    for _ in range(8):  # a halt takes two looks, and a stray must grow old
        after = apply(spec, after)
    found = plan(spec, after).actions
    assert not submits(found)
    assert not any(isinstance(action, Cancel | Repoint | HaltRun | SubmitTick) for action in found)


def apply(spec: Spec, view: View) -> View:
    """The view after a scheduler and a disk have done what was planned."""
    queue = list(view.queue or ())
    links = {seen.link: seen for seen in view.links}
    ids: dict[Link, str] = {}
    control = view.control
    for number, action in enumerate(plan(spec, view).actions):
        new_id = str(1000 + len(queue) + number)
        if isinstance(action, Submit):
            token = f"new{action.link.label}{action.link.iteration}n{action.number}"
            seen = links[action.link]
            intents = (*seen.intents, (Intent(action.number, token, 0.0), 0.0))
            links[action.link] = dataclasses.replace(seen, intents=intents)
            waits = tuple(ids[at] if isinstance(at, Link) else at for at in action.after)
            name = action.link.job_name("toy", token)
            for task in action.shards or (None,):
                job_id = new_id if task is None else f"{new_id}_{task}"
                queue.append(QueuedJob(job_id, name, JobState.PENDING, after=waits, task=task))
            ids[action.link] = new_id
        elif isinstance(action, SubmitTick):
            queue.append(QueuedJob(new_id, f"toy.tick.{new_id}", JobState.PENDING))
        elif isinstance(action, Cancel):
            queue = [job for job in queue if job.job_id not in action.job_ids]
        elif isinstance(action, Repoint):
            queue = [
                dataclasses.replace(job, after=action.after)
                if job.base_id == action.job_id
                else job
                for job in queue
            ]
        elif isinstance(action, HaltRun):
            control = Control(halt=action.halt)
    # A dependency on a job that is not there any more has been lifted.
    known = {job.base_id for job in queue if job.state is not JobState.ENDED} | {"99"}
    queue = [
        dataclasses.replace(job, after=tuple(i for i in job.after if i in known)) for job in queue
    ]
    # Time goes by, so that the second tick may follow the first.
    aged = [dataclasses.replace(job, age_s=job.age_s + 20.0) for job in queue]
    return dataclasses.replace(
        view, control=control, links=tuple(links.values()), queue=tuple(aged)
    )
