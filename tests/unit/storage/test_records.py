"""Claims, intents, control and the run's identity: exclusive, readable, and never lenient."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_rl.errors import CorruptError, FormatError, NoRunError
from slurm_rl.storage.claims import (
    AttemptEnd,
    attempt_dir,
    is_superseded,
    read_claims,
    read_elapsed,
    read_end,
    read_heartbeat,
    read_latest_claim,
    try_claim,
    write_end,
    write_heartbeat,
)
from slurm_rl.storage.control import (
    Control,
    Halt,
    TimelineStart,
    clear_stops,
    read_control,
    start_timeline,
    write_budget,
    write_halt,
    write_pause,
)
from slurm_rl.storage.intents import Intent, publish_intent, read_intents, write_job_id
from slurm_rl.storage.rundir import RunDir, RunIdentity, create_run, read_identity, write_copies
from slurm_rl.types import Claim, Slot, StageRef

SLOT = Slot(12, "train", 0)
IDENTITY = RunIdentity("abcdef01", "toy", 1.0, "me", "0.1", {"a": 1}, "a: 1\n")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "run")
    create_run(found, IDENTITY)
    return found


# -- claims ---------------------------------------------------------------------------------------


def test_an_epoch_is_taken_once(run: RunDir) -> None:
    first, second = Claim(1, "job1", "aaa"), Claim(1, "job2", "bbb")
    assert try_claim(run, SLOT, first)
    assert not try_claim(run, SLOT, second)
    assert read_claims(run, SLOT) == [first]
    assert attempt_dir(run, SLOT, first).is_dir()
    assert not attempt_dir(run, SLOT, second).exists()


def test_two_attempts_of_one_job_are_told_apart(run: RunDir) -> None:
    assert try_claim(run, SLOT, Claim(1, "job", "aaa"))
    assert not try_claim(run, SLOT, Claim(1, "job", "bbb"))


def test_the_highest_epoch_holds_the_slot(run: RunDir) -> None:
    claims = [Claim(epoch, f"job{epoch}", "t") for epoch in range(1, 13)]
    for claim in claims:
        assert try_claim(run, SLOT, claim)
    assert read_latest_claim(run, SLOT) == claims[-1]
    assert [is_superseded(run, SLOT, claim) for claim in claims] == [True] * 11 + [False]


def test_a_damaged_claim_raises(run: RunDir) -> None:
    try_claim(run, SLOT, Claim(1, "job", "aaa"))
    (run.slot_dir(SLOT) / "claim.0001").write_bytes(b"{")
    with pytest.raises(CorruptError, match=r"claim\.0001"):
        read_claims(run, SLOT)


def test_heartbeats_and_last_words_are_hints(run: RunDir) -> None:
    claim = Claim(1, "job", "aaa")
    try_claim(run, SLOT, claim)
    assert read_heartbeat(run, SLOT, claim) == ""
    assert read_end(run, SLOT, claim) is None
    write_heartbeat(run, SLOT, claim, 7, elapsed_s=1.5)
    write_end(run, SLOT, claim, AttemptEnd("failed", "user", "DataError", "why"))
    assert read_heartbeat(run, SLOT, claim) == "7 1.5"
    assert read_elapsed(run, SLOT, claim) == 1.5
    end = read_end(run, SLOT, claim)
    assert end is not None
    assert (end.outcome, end.blame, end.message) == ("failed", "user", "why")
    (attempt_dir(run, SLOT, claim) / "ended.json").write_bytes(b"torn")
    assert read_end(run, SLOT, claim) is None


# -- intents --------------------------------------------------------------------------------------


def test_a_number_is_submitted_by_one(run: RunDir) -> None:
    folder = run.stage_dir(0, "train", 0)
    assert publish_intent(run, folder, Intent(1, "aaa", 5.0, "me", (0, 2)))
    assert not publish_intent(run, folder, Intent(1, "bbb", 6.0))
    assert publish_intent(run, folder, Intent(2, "ccc", 7.0))
    write_job_id(run, folder, 1, "4711")
    found = read_intents(run, folder)
    assert [(i.number, i.token, i.shards) for i in found] == [(1, "aaa", (0, 2)), (2, "ccc", ())]


@pytest.mark.parametrize("data", [b"", b"[]", b'{"number": 1}', b'{"shards": [], "x": 1}'])
def test_a_damaged_intent_raises(run: RunDir, data: bytes) -> None:
    folder = run.stage_dir(0, "train", 0)
    publish_intent(run, folder, Intent(1, "aaa", 5.0))
    (folder / "submit.0001").write_bytes(data)
    with pytest.raises(CorruptError, match=r"submit\.0001"):
        read_intents(run, folder)


# -- control --------------------------------------------------------------------------------------


def test_nothing_decided_is_nothing(run: RunDir) -> None:
    assert read_control(run) == Control()


def test_the_first_halt_stays_and_resume_takes_both_away(run: RunDir) -> None:
    assert write_halt(run, Halt("first", "do this"))
    assert not write_halt(run, Halt("second"))
    write_pause(run, "a person")
    control = read_control(run)
    assert (control.halt, control.paused) == (Halt("first", "do this"), "a person")
    assert control.stopped
    clear_stops(run)
    clear_stops(run)
    assert read_control(run) == Control()


@pytest.mark.parametrize("text", ["", "lunch", '"text"'])
def test_a_pause_that_a_person_typed_is_a_pause(run: RunDir, text: str) -> None:
    (run.control_dir / "PAUSE").write_text(text)
    assert read_control(run).paused == (text or "by hand")


def test_a_halt_that_a_person_typed_is_a_halt(run: RunDir) -> None:
    (run.control_dir / "HALT").touch()
    assert read_control(run).halt == Halt("by hand")


@pytest.mark.parametrize("name", ["timeline-1", "budget-0001"])
def test_damage_to_history_raises(run: RunDir, name: str) -> None:
    (run.control_dir / name).write_text("{")
    with pytest.raises(CorruptError, match=name):
        read_control(run)


def test_budgets_add_up_and_the_last_word_counts(run: RunDir) -> None:
    write_budget(run, {"a": 1, "b": 1})
    write_budget(run, {"a": 3})
    assert read_control(run).forgiven == (("a", 3), ("b", 1))


def test_a_timeline_is_begun_by_one(run: RunDir) -> None:
    assert start_timeline(run, StageRef(1, "train"), after=0, reason="one")
    assert not start_timeline(run, StageRef(2, "train"), after=0, reason="other")
    assert start_timeline(run, StageRef(2, "train"), after=1, reason="next")
    control = read_control(run)
    assert [start.number for start in control.timelines] == [1, 2]
    refs = [StageRef(1, "rollout"), StageRef(1, "train"), StageRef(2, "rollout")]
    assert [control.timeline_of(ref) for ref in refs] == [0, 1, 1]


KINDS = ("init", "rollout", "train")
REFS = st.builds(StageRef, st.integers(0, 5), st.sampled_from(KINDS))


def position(ref: StageRef) -> tuple[int, int]:
    return ref.iteration, KINDS.index(ref.kind)


@given(st.lists(REFS, max_size=6), REFS, REFS)
def test_timelines_grow_along_the_chain_and_are_those_that_began_before(
    starts: list[StageRef], one: StageRef, other: StageRef
) -> None:
    control = Control(
        timelines=tuple(
            TimelineStart(number, ref.iteration, ref.kind) for number, ref in enumerate(starts, 1)
        )
    )
    earlier, later = sorted((one, other), key=position)
    assert control.timeline_of(earlier) <= control.timeline_of(later)
    expected = [0] + [n for n, s in enumerate(starts, 1) if position(s) <= position(one)]
    assert control.timeline_of(one) == max(expected)


@given(st.lists(REFS, max_size=5), REFS, REFS)
def test_a_new_timeline_renames_what_follows_and_nothing_before(
    starts: list[StageRef], new: StageRef, ref: StageRef
) -> None:
    before = tuple(TimelineStart(n, s.iteration, s.kind) for n, s in enumerate(starts, 1))
    number = len(starts) + 1
    after = (*before, TimelineStart(number, new.iteration, new.kind))
    was = Control(timelines=before).timeline_of(ref)
    expected = number if position(ref) >= position(new) else was
    assert Control(timelines=after).timeline_of(ref) == expected


# -- the run itself -------------------------------------------------------------------------------


def test_a_run_is_made_once_and_read_back(run: RunDir) -> None:
    other = dataclasses.replace(IDENTITY, run_id="other", config_text="b: 2\n")
    assert not create_run(run, other)
    assert read_identity(run) == IDENTITY
    assert (run.root / "config.yaml").read_text() == "a: 1\n"
    assert json.loads(run.settings_path.read_bytes()) == {"a": 1}


def test_lost_copies_are_made_again(run: RunDir) -> None:
    run.settings_path.unlink()
    write_copies(run, read_identity(run))
    assert json.loads(run.settings_path.read_bytes()) == {"a": 1}


def test_no_run_a_newer_run_and_a_damaged_one_are_told_apart(run: RunDir, tmp_path: Path) -> None:
    with pytest.raises(NoRunError, match="no run here"):
        read_identity(RunDir(tmp_path / "elsewhere"))
    path = run.root / "run.json"
    raw = json.loads(path.read_bytes())
    path.write_text(json.dumps({**raw, "format": 2, "news": True}))
    with pytest.raises(FormatError, match="format 2 is newer"):
        read_identity(run)
    for text in ("", "{}", "[]", json.dumps({**raw, "surprise": 1})):
        path.write_text(text)
        with pytest.raises(CorruptError, match=r"run\.json"):
            read_identity(run)
