"""What a run's own past says about time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy.world import FastFs, make_settings

from slurm_rl.chain.graph import Link, build_graph
from slurm_rl.chain.history import (
    WINDOW,
    Duration,
    count_timeouts,
    learn_wall_time,
    parse_duration,
    percentile,
    plan_deadline,
    plan_signal,
    plan_wall_time,
    read_durations,
)
from slurm_rl.chain.scheduler import WallTime
from slurm_rl.storage.claims import AttemptEnd, try_claim, write_end
from slurm_rl.storage.commits import assemble, publish_commit
from slurm_rl.storage.control import Control, TimelineStart
from slurm_rl.storage.rundir import RunDir
from slurm_rl.types import UNUSUAL, Claim, Commit, Slot

TRAIN = Link(9, ("train",))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "toy", FastFs())
    run.control_dir.mkdir(parents=True)
    return run


def commit(run: RunDir, slot: Slot, work_s: float | None, **facts: float) -> None:
    run.slot_dir(slot).mkdir(parents=True, exist_ok=True)
    times = {} if work_s is None else {"work_s": work_s, **facts}
    content = {"files": [], "parents": {}}
    publish_commit(run, slot, content=content, provenance={"attempt": "a", **times})


def of(*works: float, **facts: float) -> list[Duration]:
    return [Duration(work_s, **facts) for work_s in works]


def test_an_assembled_commit_has_the_times_of_its_slowest_shard() -> None:
    shards = [
        Commit({"shard": i}, {"attempt": "a", "work_s": work_s, "save_s": work_s / 2}, "d")
        for i, work_s in enumerate((3.0, 8.0, 5.0))
    ]
    assert parse_duration(assemble(shards)[1]) == Duration(8.0, 0.0, 4.0)


@pytest.mark.parametrize(
    ("provenance", "expected"),
    [
        ({"work_s": 4.5, "startup_s": 3.0, "save_s": 1.0}, Duration(4.5, 3.0, 1.0)),
        ({"work_s": 4, "started": 9}, Duration(4)),
        ({"attempts": {}}, None),
        ({"work_s": 0.0}, None),
        ({"work_s": "soon"}, None),
    ],
)  # fmt: skip
def test_times_of_a_commit(provenance: dict[str, Any], expected: Duration | None) -> None:
    assert parse_duration(provenance) == expected


def test_durations_are_the_newest_before_an_iteration_on_the_current_timeline(run: RunDir) -> None:
    graph = build_graph(make_settings(run.root.parent, num_rollout=100))
    for i in range(40):
        commit(run, Slot(i, "train", 0), 100.0 + i)
    control = Control(timelines=(TimelineStart(1, 38, "train"),))
    found = [d.work_s for d in read_durations(run, graph, Control(), "train", before=40)]
    assert found == [100.0 + i for i in range(39, 39 - WINDOW, -1)]
    rewound = read_durations(run, graph, control, "train", before=40)
    assert [d.work_s for d in rewound][:2] == [137.0, 136.0]
    assert read_durations(run, graph, Control(), "init", before=40) == []


def test_nothing_is_learnt_from_stages_that_did_not_do_the_work(run: RunDir) -> None:
    """A policy that was carried forward took two seconds; the first that trains takes an hour."""
    for i in range(4):
        slot = Slot(i, "train", 0)
        run.slot_dir(slot).mkdir(parents=True)
        content = {"files": [], "parents": {}, **({UNUSUAL: "carried"} if i < 3 else {})}
        times = {"attempt": "a", "work_s": 2.0 if i < 3 else 3600.0}
        publish_commit(run, slot, content=content, provenance=times)
    graph = build_graph(make_settings(run.root, num_rollout=9))
    assert read_durations(run, graph, Control(), "train", before=3) == []
    assert read_durations(run, graph, Control(), "train", before=4) == of(3600.0)


def test_too_little_is_known_at_first(run: RunDir) -> None:
    graph = build_graph(make_settings(run.root.parent, num_rollout=100))
    asked: dict[str, Any] = {"longest_s": 7200.0, "tries": 0}
    for i in (7, 8):
        commit(run, Slot(i, "train", 0), 100.0)
    assert learn_wall_time(run, graph, Control(), TRAIN, **asked) == WallTime(7200)
    commit(run, Slot(6, "train", 0), 100.0)
    learnt = learn_wall_time(run, graph, Control(), TRAIN, **asked)
    assert learnt.limit_s is not None and 100 < learnt.limit_s < 1000
    both = Link(9, ("rollout", "train"))
    assert learn_wall_time(run, graph, Control(), both, **asked) == WallTime(7200)
    assert learn_wall_time(run, graph, Control(), Link(0, ("train",)), **asked) == WallTime(7200)


def test_what_the_limit_ended_is_counted(run: RunDir) -> None:
    graph = build_graph(make_settings(run.root.parent, num_rollout=100))
    for epoch, outcome in enumerate(["timed_out", "failed", "timed_out", "stopped"], 1):
        made = Claim(epoch, "id", f"{epoch:012x}")
        assert try_claim(run, Slot(9, "train", 0), made)
        write_end(run, Slot(9, "train", 0), made, AttemptEnd(outcome))
    assert count_timeouts(run, graph, Control(), TRAIN) == 2
    assert count_timeouts(run, graph, Control(), Link(8, ("train",))) == 0


def test_the_limit_covers_the_past_with_a_margin_and_room_to_stop() -> None:
    past = [of(*[100.0] * 19, 300.0, startup_s=40.0, save_s=30.0)]
    wall = plan_wall_time(past, longest_s=None)
    assert wall.signal_s == 150
    # (40 + 100) · 1.3 + 120 + 150, in whole minutes: the one slow stage of twenty is left out.
    assert wall.limit_s == wall.shortest_s == 480


def test_each_time_out_asks_for_half_as_much_again() -> None:
    limits = [plan_wall_time([of(1000.0)], longest_s=None, tries=n).limit_s for n in range(4)]
    assert limits == sorted(limits) and len(set(limits)) == 4
    assert limits[2] is not None and limits[2] >= 1000 * 1.3 * 2.25


walls = st.lists(st.lists(st.floats(1, 1e5), min_size=1, max_size=20), min_size=1, max_size=3)


@given(walls, st.one_of(st.none(), st.floats(60, 1e6)), st.integers(0, 5))
def test_never_more_than_may_be_asked_never_less_than_is_needed(
    works: list[list[float]], longest_s: float | None, tries: int
) -> None:
    wall = plan_wall_time([of(*w) for w in works], longest_s=longest_s, tries=tries)
    assert wall.limit_s is not None and wall.shortest_s is not None and wall.signal_s is not None
    assert 0 < wall.shortest_s <= wall.limit_s
    assert 0 < wall.signal_s <= wall.limit_s
    if longest_s is not None:
        assert wall.limit_s <= longest_s + 1
    needed = sum(percentile(w, 0.95) for w in works) + wall.signal_s
    assert wall.limit_s >= (needed if longest_s is None else min(needed, longest_s))


def test_the_warning_leaves_time_for_the_longest_save_twice() -> None:
    assert plan_signal([of(1.0, save_s=5.0), of(1.0, save_s=60.0)]) == 210
    assert plan_signal([]) == 90


def test_a_deadline_is_far_above_what_was_seen() -> None:
    assert plan_deadline(of(100.0, 100.0), longest_s=9000.0) == 9000.0
    assert plan_deadline(of(*[10.0] * 3), longest_s=9000.0) == 600.0
    assert plan_deadline(of(*[1000.0] * 3), longest_s=9000.0) == 5000.0
    assert plan_deadline(of(*[5000.0] * 3), longest_s=9000.0) == 9000.0
