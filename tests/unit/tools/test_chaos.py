"""The pure parts of tools/chaos.py: the schedule of faults, and what the report says of a run."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

TOOLS = str(Path(__file__).parents[3] / "tools")


def load(name: str) -> ModuleType:
    sys.path.insert(0, TOOLS)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(TOOLS)


schedule = load("faults.schedule")
report = load("faults.report")
NUM_KINDS = len(schedule.KINDS)


@given(
    seed=st.integers(0, 10_000),
    num_faults=st.integers(NUM_KINDS, 90),
    num_stages=st.integers(3, 81),
)
def test_a_schedule_has_every_kind_and_never_waits_for_what_it_holds_back(
    seed: int, num_faults: int, num_stages: int
) -> None:
    drawn = schedule.draw_schedule(seed, num_faults=num_faults, num_stages=num_stages)
    assert drawn == schedule.draw_schedule(seed, num_faults=num_faults, num_stages=num_stages)
    assert len(drawn) == num_faults
    assert {fault.kind for fault in drawn} == set(schedule.KINDS)
    assert [fault.number for fault in drawn] == list(range(num_faults))
    assert [f.due for f in drawn] == sorted(f.due for f in drawn)
    for fault in drawn:
        # Stages 0 to `allowed` may commit: that makes as many commits as the fault waits for.
        assert fault.due <= fault.allowed + 1
        # Something must be left to disturb, and the end must wait for the last fault.
        assert fault.due < num_stages - 1
        assert fault.allowed < num_stages - 1


def test_seeds_differ_and_faults_of_a_seed_draw_apart() -> None:
    def kinds(seed: int) -> list[str]:
        drawn = schedule.draw_schedule(seed, num_faults=60, num_stages=41)
        return [fault.kind for fault in drawn]

    assert kinds(1) != kinds(2)
    assert max(Counter(kinds(1)).values()) < 20
    first, second = schedule.draw_schedule(1, num_faults=16, num_stages=13)[:2]
    assert schedule.draw_for(1, first).random() != schedule.draw_for(1, second).random()
    assert schedule.draw_for(1, first).random() == schedule.draw_for(1, first).random()


def test_fewer_faults_than_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be of"):
        schedule.draw_schedule(1, num_faults=NUM_KINDS - 1, num_stages=13)


def evidence(**changes: object) -> object:
    """Of a run of three stages under one fault of every kind, all of it well."""
    attempt = report.AttemptRecord
    defaults: dict[str, object] = {
        "injected": [report.Injected(kind, 10.0) for kind in schedule.KINDS],
        "stops": [report.Stop(12.0, "PAUSE", "job 7 was cancelled by hand")],
        "attempts": [
            attempt("000000/init.t0", 0.0, 1.0, True),
            attempt("000000/rollout.t0", 1.0, 7.0, False),
            attempt("000000/rollout.t0", 10.0, 5.0, True),
            attempt("000000/train.t0", 15.0, 4.0, False),
            attempt("000000/train.t0", 18.0, 6.0, True),
        ],
        "commits": [1.0, 15.0, 24.0],
        "num_stages": 3,
        "num_submissions": 5,
        "undisturbed_s": 9.0,
    }
    return report.Evidence(**defaults | changes)


def test_a_whole_run_is_a_success_and_its_figures_are_told() -> None:
    found = evidence()
    assert report.find_failures(found) == []
    text = report.render_report(found)
    assert "24 s; undisturbed 9 s; lost 15 s" in text
    assert "GPU-seconds wasted          15 " in text, "1 GPU × 7 s and 2 GPUs × 4 s"
    assert "of the 2 attempts" in text
    assert "5; 1 while an earlier attempt was still at work" in text
    assert "at 12 s, PAUSE: job 7 was cancelled by hand" in text
    assert "same committed history" in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"injected": []}, "preempt: was never injected"),
        ({"commits": [1.0, 15.0]}, "2 of 3 stages are committed"),
        ({"commits": [1.0, 5.0, 9.0]}, "preempt: 1 of 1 not survived"),
        ({"differences": ["000000/train.t0"]}, "000000/train.t0: not the reference's digest"),
        ({"differences": ["000000/train.t0"]}, "scancel: 1 of 1 not survived"),
        ({"left": ["toy.tick.ab"]}, "toy.tick.ab: still in the queue"),
        ({"problems": ["no empty queue in 90 s"]}, "no empty queue in 90 s"),
    ],
)
def test_what_is_wrong_is_said_and_is_no_success(changes: dict[str, object], said: str) -> None:
    found = evidence(**changes)
    assert said in report.find_failures(found)
    text = report.render_report(found)
    assert f"FAILED: {said}" in text
    assert "same committed history" not in text


def test_one_kind_left_out_is_no_success() -> None:
    for kind in schedule.KINDS:
        rest = [report.Injected(other, 1.0) for other in schedule.KINDS if other != kind]
        failures = report.find_failures(dataclasses.replace(evidence(), injected=rest))
        assert failures == [f"{kind}: was never injected"]


def test_digests_are_compared_both_ways() -> None:
    wanted, found = {"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "x", "d": "4"}
    assert report.compare_digests(wanted, found) == ["b", "c", "d"]
    assert report.compare_digests(wanted, wanted) == []
