"""How attempts fared, by what they and their jobs left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from toy.world import FastFs, make_settings

from slurm_rl.chain.graph import build_graph
from slurm_rl.chain.scheduler import JobState, QueuedJob
from slurm_rl.chain.slots import slots_of, view_slot
from slurm_rl.chain.view import SlotView, Spec
from slurm_rl.storage.claims import AttemptEnd, try_claim, write_end, write_heartbeat
from slurm_rl.storage.control import Control, TimelineStart
from slurm_rl.storage.rundir import RunDir
from slurm_rl.types import Claim, Slot, StageRef

SLOT = Slot(1, "train", 0)
SPEC = Spec("toy", "id", exclude_s=600.0)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "toy", FastFs())
    run.control_dir.mkdir(parents=True)
    return run


def claim(
    run: RunDir, epoch: int, job: str = "id1", end: AttemptEnd | None = None, host: str = "n1"
) -> Claim:
    made = Claim(epoch, job, f"{epoch:012x}", host=host, claimed=100.0 * epoch)
    assert try_claim(run, SLOT, made)
    if end is not None:
        write_end(run, SLOT, made, end)
    return made


def failed(error: str = "EngineError", **facts: Any) -> AttemptEnd:
    facts.setdefault("ended", 500.0)
    return AttemptEnd("failed", facts.pop("blame", "system"), error, f"said {error}", **facts)


def queue(*jobs: tuple[str, JobState]) -> tuple[QueuedJob, ...]:
    return tuple(QueuedJob("1", f"toy.i0001.train.{token}", state) for token, state in jobs)


def look(run: RunDir, jobs: Any = (), **facts: Any) -> SlotView:
    control = Control(forgiven=facts.pop("forgiven", ()))
    return view_slot(run, control, SLOT, jobs, facts.pop("now", 1000.0), SPEC)


def test_nobody_was_here(run: RunDir) -> None:
    assert look(run) == SlotView(str(SLOT))


@pytest.mark.parametrize(
    ("outcome", "failures", "stops"),
    [("failed", 1, 0), ("timed_out", 1, 0), ("stopped", 0, 1), ("superseded", 0, 0), ("committed", 0, 0)],
)  # fmt: skip
def test_the_last_word_says_what_counts(
    run: RunDir, outcome: str, failures: int, stops: int
) -> None:
    claim(run, 1, end=AttemptEnd(outcome, ended=500.0))
    seen = look(run)
    assert (seen.failures, seen.num_stops) == (failures, stops)


@pytest.mark.parametrize(
    ("now", "jobs", "failures"),
    [
        (150.0, (), 0),  # its job may be younger than the reading, or another person's
        (161.0, (), 1),  # silent for a lease
        (150.0, queue(("id1", JobState.ENDED)), 1),  # the queue knows better
    ],
)
def test_a_sign_of_life_counts_where_the_queue_knows_no_job(
    run: RunDir, now: float, jobs: tuple[QueuedJob, ...], failures: int
) -> None:
    claim(run, 1)  # at 100
    assert look(run, jobs, now=now).failures == failures
    if not jobs:
        write_heartbeat(run, SLOT, Claim(1, "id1", f"{1:012x}"), 9, elapsed_s=60.0)
        assert look(run, jobs, now=210.0).failures == 0


@pytest.mark.parametrize(
    ("jobs", "failures", "stops"),
    [
        ((), 1, 0),
        (queue(("id1", JobState.RUNNING)), 0, 0),
        (queue(("id1", JobState.UNKNOWN)), 0, 0),
        (queue(("id1", JobState.PENDING)), 0, 1),  # its very job is back: the scheduler did it
        (queue(("id1", JobState.HELD)), 0, 1),
        (queue(("id1", JobState.ENDED)), 1, 0),
        (queue(("id2", JobState.RUNNING)), 1, 0),
        (None, 0, 0),  # not answered: nothing is known
    ],
)
def test_who_was_killed_without_a_word(run: RunDir, jobs: Any, failures: int, stops: int) -> None:
    claim(run, 1)
    seen = look(run, jobs)
    assert (seen.failures, seen.num_stops) == (failures, stops)
    if failures:
        assert seen.last_error == "killed without a word"


def test_a_requeued_job_that_claims_again_was_stopped_not_failed(run: RunDir) -> None:
    claim(run, 1, "id1")
    claim(run, 2, "id1")
    seen = look(run, queue(("id1", JobState.RUNNING)))
    assert (seen.failures, seen.num_stops) == (0, 1)


def test_what_was_forgiven_does_not_count(run: RunDir) -> None:
    for epoch in (1, 2, 3):
        claim(run, epoch, end=failed())
    assert look(run).failures == 3
    assert look(run, forgiven=((str(SLOT), 2),)).failures == 1


def test_the_time_since_is_the_last_failures(run: RunDir) -> None:
    claim(run, 1, end=failed(ended=500.0))
    claim(run, 2, end=failed("Other", ended=800.0))
    seen = look(run, now=1000.0)
    assert (seen.since_failure_s, seen.last_error) == (200.0, "said Other")
    assert "a0002-" in seen.log
    assert look(run, now=700.0).since_failure_s == 0.0  # another clock


def test_one_that_was_killed_died_at_its_last_heartbeat(run: RunDir) -> None:
    made = claim(run, 1)
    write_heartbeat(run, SLOT, made, 7, elapsed_s=50.0)
    assert look(run, now=1000.0).since_failure_s == 1000.0 - (100.0 + 50.0)


@pytest.mark.parametrize(
    ("first", "second", "repeats"),
    [
        (failed("OOM", blame="repeat", place="f"), failed("OOM", blame="repeat", place="f"), True),
        (failed("OOM", blame="repeat", place="f"), failed("OOM", blame="repeat", place="g"), False),
        (failed("OOM", blame="repeat", place="f"), failed("Eio", blame="repeat", place="f"), False),
        (failed("OOM", blame="system", place="f"), failed("OOM", blame="system", place="f"), False),
        (failed("OOM", blame="repeat"), failed("OOM", blame="repeat"), False),
        (None, failed("OOM", blame="repeat", place="f"), False),
    ],
)
def test_the_same_at_the_same_place(
    run: RunDir, first: AttemptEnd | None, second: AttemptEnd, repeats: bool
) -> None:
    claim(run, 1, end=first)
    assert not look(run).is_repeating
    claim(run, 2, end=second)
    assert look(run).is_repeating == repeats


def test_nodes_are_bad_for_a_while_and_not_for_a_users_mistake(run: RunDir) -> None:
    claim(run, 1, end=failed(node="n1", ended=350.0))
    claim(run, 2, end=failed(node="n2", ended=450.0))
    claim(run, 3, end=failed(node="n3", ended=500.0, blame="user"))
    claim(run, 4, end=AttemptEnd("stopped", node="n4", ended=500.0))
    claim(run, 5, host="n5")
    assert look(run, now=1000.0).bad_nodes == ("n2", "n5")


def test_slots_lie_on_the_timeline_of_their_stage(tmp_path: Path) -> None:
    graph = build_graph(make_settings(tmp_path, shards=2, num_rollout=4))
    control = Control(timelines=(TimelineStart(2, 1, "train"),))
    assert slots_of(graph, control, StageRef(1, "rollout")) == [
        Slot(1, "rollout", 0, 0),
        Slot(1, "rollout", 0, 1),
    ]
    assert slots_of(graph, control, StageRef(1, "train")) == [Slot(1, "train", 2)]
    assert slots_of(graph, control, StageRef(2, "rollout"))[0].timeline == 2
