"""plan() on arrays: each shard has a job, and none waits for another. Pools are arrays of their own."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_rl.chain.graph import Graph, Link, StageNode
from slurm_rl.chain.plan import plan
from slurm_rl.chain.scheduler import JobState, QueuedJob
from slurm_rl.chain.view import (
    Action,
    Cancel,
    LinkView,
    Repoint,
    SlotView,
    Spec,
    Submit,
    View,
)
from slurm_rl.storage.control import Control
from slurm_rl.storage.intents import Intent

PENDING, RUNNING, HELD, ENDED = (
    JobState.PENDING,
    JobState.RUNNING,
    JobState.HELD,
    JobState.ENDED,
)
SPEC = Spec("toy", "id", ticks=False, max_attempts=9)
R0, T0 = Link(0, ("rollout",)), Link(0, ("train",))
SPOT, FIXED = Link(0, ("rollout",), "spot"), Link(0, ("rollout",), "fixed")
FIRST, SECOND = Intent(1, "r-1", 0.0, shards=(0, 1, 2)), Intent(2, "r-2", 0.0, shards=(2,))


def seen(
    link: Link,
    *intents: Intent,
    shards: tuple[int, ...] = (0, 1, 2),
    done: tuple[int, ...] = (),
    age_s: float = 1000.0,
    **facts: Any,
) -> LinkView:
    slot = facts.pop("slot", {})
    slots = tuple(SlotView(f"s{n}", n, n in done, **slot) for n in shards)
    return LinkView(link, tuple((intent, age_s) for intent in intents), slots, **facts)


def tasks(link: Link, token: str, **states: Any) -> list[QueuedJob]:
    """Tasks of array 1: `_0=RUNNING`, or a state and facts."""
    found = []
    for name, told in states.items():
        state, facts = told if isinstance(told, tuple) else (told, {})
        number = int(name[1:])
        base = facts.pop("base", "1")
        facts = {"age_s": 1000.0, **facts}
        name_ = link.job_name("toy", token)
        found.append(QueuedJob(f"{base}_{number}", name_, state, task=number, **facts))
    return found


def train(token: str = "t-1", after: tuple[str, ...] = ("1",), **facts: Any) -> QueuedJob:
    return QueuedJob("9", T0.job_name("toy", token), PENDING, after=after, age_s=500.0, **facts)


def behind(*parents: Link) -> LinkView:
    return LinkView(T0, ((Intent(1, "t-1", 0.0), 500.0),), (SlotView("t"),), waits_for=parents)


def actions(*links: LinkView, queue: list[QueuedJob], own: Any = None, **spec: Any) -> list[Action]:
    view = View(Control(), links, tuple(queue), own=own)
    return list(plan(dataclasses.replace(SPEC, **spec), view).actions)


# -- a shard that failed --------------------------------------------------------------------------


def test_a_shard_that_failed_is_tried_again_while_the_others_work() -> None:
    queue = tasks(R0, "r-1", _0=RUNNING, _1=PENDING, _2=ENDED)
    assert actions(seen(R0, FIRST), queue=queue) == [Submit(R0, 2, (), (2,))]


def test_the_task_that_is_about_to_end_counts_for_nothing_and_its_siblings_do() -> None:
    queue = tasks(R0, "r-1", _0=RUNNING, _1=RUNNING, _2=RUNNING)
    assert actions(seen(R0, FIRST), queue=queue) == []
    found = actions(seen(R0, FIRST), queue=queue, own=("r-1", 1))
    assert found == [Submit(R0, 2, (), (1,))]


def test_a_shard_that_is_committed_needs_no_job() -> None:
    queue = tasks(R0, "r-1", _0=RUNNING, _1=ENDED, _2=ENDED)
    assert actions(seen(R0, FIRST, done=(1, 2)), queue=queue) == []


def test_one_whose_task_the_queue_does_not_show_is_waited_for_until_the_deadline() -> None:
    queue = tasks(R0, "r-1", _0=RUNNING, _1=RUNNING)
    assert actions(seen(R0, FIRST, age_s=5.0), queue=queue) == []
    assert actions(seen(R0, FIRST, age_s=90.0), queue=queue) == [Submit(R0, 2, (), (2,))]


def test_what_was_just_submitted_for_another_shard_says_nothing_of_this_one() -> None:
    """Shard 1 fails while the second submission, for shard 2, is not in the queue yet."""
    young = LinkView(
        R0, ((FIRST, 1000.0), (SECOND, 2.0)), tuple(SlotView(f"s{n}", n) for n in range(2))
    )
    queue = tasks(R0, "r-1", _0=RUNNING, _1=ENDED)
    assert actions(young, queue=queue) == [Submit(R0, 3, (), (1,))]


def test_a_held_task_is_replaced_and_the_others_stay() -> None:
    queue = tasks(R0, "r-1", _0=RUNNING, _1=HELD, _2=RUNNING)
    assert actions(seen(R0, FIRST), queue=queue) == [
        Cancel(("1_1",), "held; replaced"),
        Submit(R0, 2, (), (1,)),
    ]


def test_the_delay_and_the_nodes_are_those_of_the_shard() -> None:
    slots = (SlotView("s0", 0, failures=3, since_failure_s=0.0), SlotView("s1", 1))
    links = LinkView(R0, ((FIRST, 1000.0),), slots)
    queue = tasks(R0, "r-1", _0=RUNNING, _1=ENDED)
    assert actions(links, queue=queue) == [Submit(R0, 2, (), (1,))]


def with_ages(*intents: tuple[Intent, float], shards: int = 3, **facts: Any) -> LinkView:
    slots = tuple(SlotView(f"s{n}", n) for n in range(shards))
    return LinkView(R0, intents, slots, **facts)


@pytest.mark.parametrize("state", [ENDED, HELD])
def test_a_young_submission_holds_back_its_own_shard_alone(state: JobState) -> None:
    """Shard 1 was submitted two seconds ago, and is not in the queue yet; the job of 2 is over."""
    again = Intent(2, "r-2", 0.0, shards=(1,))
    queue = tasks(R0, "r-1", _0=RUNNING, _1=ENDED, _2=state)
    found = actions(with_ages((FIRST, 1000.0), (again, 2.0)), queue=queue)
    assert [a for a in found if isinstance(a, Submit)] == [Submit(R0, 3, (), (2,))]


def test_shards_that_failed_as_often_are_one_array_and_others_come_with_the_next_look() -> None:
    """Else one would wait as long as the other, which failed five times."""
    slots = tuple(
        SlotView(f"s{n}", n, failures=failures, since_failure_s=0.0)
        for n, failures in enumerate((1, 5, 1))
    )
    links = LinkView(R0, ((FIRST, 1000.0),), slots)
    view_ = View(Control(), (links,), tuple(tasks(R0, "r-1", _0=ENDED, _1=ENDED, _2=ENDED)))
    made = plan(SPEC, view_)
    assert made.actions == (Submit(R0, 2, (), (0, 2), begin_s=15.0),) and made.goes_on
    second = Intent(2, "r-2", 0.0, shards=(0, 2))
    queue = [
        *view_.queue,
        *tasks(R0, "r-2", _0=(PENDING, {"base": "2"}), _2=(PENDING, {"base": "2"})),
    ]
    links = dataclasses.replace(links, intents=((FIRST, 1000.0), (second, 0.0)))
    made = plan(SPEC, View(Control(), (links,), tuple(queue)))
    assert made.actions == (Submit(R0, 3, (), (1,), begin_s=240.0),) and not made.goes_on


def test_a_shard_that_failed_at_home_stays_there_when_a_sibling_failed_elsewhere() -> None:
    gone = Intent(2, "r-2", 0.0, shards=(1,), fallback=True)
    queue = [
        *tasks(R0, "r-1", _0=RUNNING, _2=ENDED),
        *tasks(R0, "r-2", _1=(ENDED, {"base": "2"})),
    ]
    first = plan(SPEC, View(Control(), (with_ages((FIRST, 1e3), (gone, 500.0)),), tuple(queue)))
    assert first.actions == (Submit(R0, 3, (), (1,), fallback=True),) and first.goes_on


def test_a_shard_that_is_at_work_is_not_sent_elsewhere_for_a_duplicate_that_waits() -> None:
    twice = Intent(2, "r-2", 0.0, shards=(1,))
    late = (PENDING, {"reason": "Resources", "base": "2"})
    queue = [*tasks(R0, "r-1", _0=RUNNING, _1=RUNNING, _2=RUNNING), *tasks(R0, "r-2", _1=late)]
    links = with_ages((FIRST, 1000.0), (twice, 1000.0), ready_s=1e6)
    assert actions(links, queue=queue, fallbacks=(("rollout", 600.0),)) == []


def test_nodes_of_siblings_are_not_stayed_away_from() -> None:
    links = dataclasses.replace(seen(R0, FIRST, done=(0, 1)), num_lost=1)
    facts = [(ENDED, {"nodes": node}) for node in ("good1", "good2", "bad")]
    queue = tasks(R0, "r-1", _0=facts[0], _1=facts[1], _2=facts[2])
    assert actions(links, queue=queue) == [Submit(R0, 2, (), (2,), exclude=("bad",))]


# -- what is behind -------------------------------------------------------------------------------


def test_what_waits_for_the_array_waits_for_the_shard_that_is_tried_again_too() -> None:
    queue = [*tasks(R0, "r-1", _0=RUNNING, _1=ENDED, _2=ENDED), train()]
    now = actions(seen(R0, FIRST, done=(1,)), behind(R0), queue=queue)
    assert now == [Submit(R0, 2, (), (2,)), Repoint("9", ("1", R0))]
    queue += tasks(R0, "r-2", _2=(PENDING, {"base": "2"}))
    later = actions(seen(R0, FIRST, SECOND, done=(1,)), behind(R0), queue=queue)
    assert later == [Repoint("9", ("1", "2"))]
    queue = [job for job in queue if job.base_id != "9"] + [train(after=("1", "2"))]
    assert actions(seen(R0, FIRST, SECOND, done=(1,)), behind(R0), queue=queue) == []


def test_what_waits_for_the_job_that_looks_waits_for_its_sibling_too() -> None:
    """The array that ends now was the last that the train stage waited for; another one lives."""
    queue = [
        *tasks(R0, "r-1", _1=RUNNING),
        *tasks(R0, "r-2", _2=(RUNNING, {"base": "2"})),
        train(after=("2",)),
    ]
    links = (seen(R0, FIRST, SECOND, done=(0, 2)), behind(R0))
    assert actions(*links, queue=queue, own=("r-2", 2)) == [Repoint("9", ("1",))]


def test_what_is_behind_pools_waits_for_all_of_them() -> None:
    spot, fixed = Intent(1, "s-1", 0.0, shards=(0, 1)), Intent(1, "f-1", 0.0, shards=(2,))
    links = (seen(SPOT, spot, shards=(0, 1)), seen(FIXED, fixed, shards=(2,)))
    queue = [
        *tasks(SPOT, "s-1", _0=RUNNING, _1=RUNNING),
        *tasks(FIXED, "f-1", _2=(RUNNING, {"base": "2"})),
    ]
    fresh = LinkView(T0, (), (SlotView("t"),), waits_for=(SPOT, FIXED))
    assert actions(*links, fresh, queue=queue) == [Submit(T0, 1, ("1", "2"))]
    short = actions(*links, behind(SPOT, FIXED), queue=[*queue, train(after=("2",))])
    assert short == [Repoint("9", ("1", "2"))]


def test_a_pool_that_is_done_does_not_hold_another() -> None:
    fixed = Intent(1, "f-1", 0.0, shards=(2,))
    links = (seen(SPOT, shards=(0, 1), done=(0, 1)), seen(FIXED, fixed, shards=(2,)))
    queue = tasks(FIXED, "f-1", _2=ENDED)
    assert actions(*links, queue=queue) == [Submit(FIXED, 2, (), (2,))]


# -- a shard that waits too long ------------------------------------------------------------------

AFTER = (("rollout", 600.0),)
LATE = (PENDING, {"reason": "Resources"})


def test_a_shard_that_waits_too_long_goes_elsewhere_while_the_others_work() -> None:
    queue = tasks(R0, "r-1", _0=RUNNING, _1=LATE, _2=RUNNING)
    assert actions(seen(R0, FIRST, ready_s=1e6), queue=queue, fallbacks=AFTER) == [
        Submit(R0, 2, (), (1,), fallback=True),
        Cancel(("1_1",), "waited too long; goes to its fallback", R0),
    ]


def test_only_the_shard_that_went_elsewhere_has_gone() -> None:
    gone = Intent(2, "r-2", 0.0, shards=(1,), fallback=True)
    queue = [*tasks(R0, "r-1", _0=LATE, _2=RUNNING), *tasks(R0, "r-2", _1=(ENDED, {"base": "2"}))]
    (retry,) = actions(seen(R0, FIRST, gone, ready_s=1e6), queue=queue, fallbacks=AFTER)
    assert retry == Submit(R0, 3, (), (1,), fallback=True), "its retries stay there"
    there = [
        *tasks(R0, "r-1", _0=LATE, _2=RUNNING),
        *tasks(R0, "r-2", _1=(*LATE[:1], {"base": "2"})),
    ]
    first = actions(seen(R0, FIRST, gone, ready_s=1e6), queue=there, fallbacks=AFTER)[0]
    assert first == Submit(R0, 3, (), (0,), fallback=True), "another one goes by itself"


def test_a_shard_that_its_own_throttle_holds_stays() -> None:
    throttled = (PENDING, {"reason": "JobArrayTaskLimit"})
    queue = tasks(R0, "r-1", _0=RUNNING, _1=throttled, _2=throttled)
    assert actions(seen(R0, FIRST, ready_s=1e6), queue=queue, fallbacks=AFTER) == []


def test_a_pool_goes_by_its_own_rule() -> None:
    intents = Intent(1, "s-1", 0.0, shards=(0, 1)), Intent(1, "f-1", 0.0, shards=(2,))
    links = (
        seen(SPOT, intents[0], shards=(0, 1), ready_s=1e6),
        seen(FIXED, intents[1], shards=(2,), ready_s=1e6),
    )
    queue = [
        *tasks(SPOT, "s-1", _0=LATE, _1=RUNNING),
        *tasks(FIXED, "f-1", _2=(PENDING, {"reason": "Resources", "base": "2"})),
    ]
    found = actions(*links, queue=queue, fallbacks=(("rollout-spot", 600.0),))
    assert [a.link for a in found if isinstance(a, Submit)] == [SPOT]


# -- any queue ------------------------------------------------------------------------------------

STATES = st.sampled_from([PENDING, RUNNING, HELD, ENDED, None])
SHARD = st.tuples(
    STATES,  # of its task in the first array
    st.one_of(st.none(), STATES),  # of its task in a second one, if it is in that
    st.booleans(),  # committed
    st.integers(0, 2),  # failures
)


@given(
    st.lists(SHARD, min_size=1, max_size=6),
    st.sampled_from([2.0, 1000.0]),
    st.booleans(),
    st.booleans(),
)
def test_every_open_shard_has_one_live_job_after_a_few_looks(
    shards: list[tuple[Any, Any, bool, int]], age_s: float, is_gone: bool, falls: bool
) -> None:
    """However the second submission, whatever its age, fared: no shard is submitted twice, and none
    is left out but one whose last submission may still have a job."""
    numbers = range(len(shards))
    second = tuple(n for n in numbers if shards[n][1] is not None)
    intents = [(Intent(1, "r-1", 0.0, shards=tuple(numbers)), 1000.0)]
    if second:
        intents.append((Intent(2, "r-2", 0.0, shards=second, fallback=is_gone), age_s))
    queue = [
        *_shown("r-1", {n: shards[n][0] for n in numbers}, "1"),
        *_shown("r-2", {n: shards[n][1] for n in second}, "2"),
    ]
    slots = tuple(
        SlotView(f"s{n}", n, is_done, failures, 1e6)
        for n, (_, _, is_done, failures) in enumerate(shards)
    )
    missing = {n for n in numbers if not shards[n][2]}
    before = {n: _num_live(queue, n) for n in numbers}
    for number in range(3, 9):
        link = LinkView(R0, tuple(intents), slots, ready_s=1e6)
        made = plan(
            dataclasses.replace(SPEC, fallbacks=AFTER if falls else ()),
            View(Control(), (link,), tuple(queue)),
        )
        gone = {i for a in made.actions if isinstance(a, Cancel) for i in a.job_ids}
        queue = [job for job in queue if job.job_id not in gone]
        (submit,) = [a for a in made.actions if isinstance(a, Submit)] or (None,)
        if submit is not None:
            assert set(submit.shards) <= missing
            intents.append((Intent(submit.number, f"r-{number}", 0.0, shards=submit.shards), 0.0))
            queue += _shown(f"r-{number}", dict.fromkeys(submit.shards, PENDING), str(number))
        if not made.goes_on:
            break
    for n in missing:
        in_doubt = n in second and age_s < 90.0 and shards[n][1] is None
        assert _num_live(queue, n) <= max(1, before[n]), "two jobs for one shard"
        assert _num_live(queue, n) >= 1 or in_doubt, f"shard {n} is left out"


def _shown(token: str, states: dict[int, JobState | None], base: str) -> list[QueuedJob]:
    facts = {"reason": "Priority", "base": base}
    told = {f"_{n}": (state, dict(facts)) for n, state in states.items() if state is not None}
    return tasks(R0, token, **told)


def _num_live(queue: list[QueuedJob], shard: int) -> int:
    return sum(job.state.is_live for job in queue if job.task == shard)


# -- the graph ------------------------------------------------------------------------------------


def test_pools_are_links_of_one_stage() -> None:
    node = StageNode("rollout", num_shards=3, pools=(("fixed", (2,)), ("spot", (0, 1))))
    graph = Graph(1, (StageNode("init"),), (node, StageNode("train")))
    assert [str(link) for link in graph.links(0)] == [
        "i0000.init",
        "i0000.rollout-fixed",
        "i0000.rollout-spot",
        "i0000.train",
    ]
    assert {link.anchor for link in graph.links(0)[1:3]} == {R0.anchor}
    assert SPOT.job_name("toy", "t") == "toy.i0000.rollout-spot.t"
