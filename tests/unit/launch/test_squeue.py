"""Parsing what a real squeue printed (tests/golden), and what it might print."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_rl.chain.scheduler import JobState, QueuedJob
from slurm_rl.errors import SchedulerUnavailable
from slurm_rl.launch.squeue import (
    FORMAT,
    SEPARATOR,
    STATES,
    expand_job_id,
    parse_dependency,
    parse_elapsed,
    parse_queue,
    parse_state,
    parse_time,
)

GOLDEN = Path(__file__).parents[2] / "golden"
NOW = 1796005423.0  # when the golden queue was read


def by_id(text: str, prefix: str = "q.") -> dict[str, QueuedJob]:
    return {job.job_id: job for job in parse_queue(text, prefix=prefix, now=NOW)}


@pytest.fixture(scope="module")
def queue() -> dict[str, QueuedJob]:
    return by_id((GOLDEN / "squeue-all.txt").read_text())


def test_states_of_a_real_queue(queue: dict[str, QueuedJob]) -> None:
    found = {
        job_id: job.state for job_id, job in queue.items() if job.state is not JobState.PENDING
    }
    assert found == {
        "11": JobState.ENDED,  # CANCELLED
        "10": JobState.ENDED,  # FAILED
        "9": JobState.HELD,  # held by an administrator
        "15": JobState.HELD,  # scontrol requeuehold
        "16": JobState.HELD,  # SPECIAL_EXIT
        "3": JobState.RUNNING,
        "12_3": JobState.RUNNING,
        "12_7": JobState.RUNNING,
        "14": JobState.RUNNING,
    }


def test_a_job_that_a_person_holds_is_pending(queue: dict[str, QueuedJob]) -> None:
    assert queue["8"].state is JobState.PENDING
    assert queue["8"].reason == "JobHeldUser"


def test_every_field_of_a_running_array_task(queue: dict[str, QueuedJob]) -> None:
    assert queue["12_7"] == QueuedJob(
        job_id="12_7",
        name="q.i0004.rollout.ab12cd3d",
        state=JobState.RUNNING,
        age_s=27.0,
        elapsed_s=26.0,
        nodes="node1",
        task=7,
        raw="RUNNING",
    )
    assert queue["12_7"].base_id == "12"


def test_dependencies_of_a_real_queue(queue: dict[str, QueuedJob]) -> None:
    found = {job_id: job.after for job_id, job in queue.items() if job.after}
    assert found == {
        "11": ("3",),
        "4": ("3",),
        **{f"5_{task}": ("4",) for task in (0, 1, 2, 5)},
        "6": ("5",),  # afterany:5_*(unfulfilled)
        "18": ("10",),  # afterok:10(failed)
        "19": ("3",),  # after:3+1(unfulfilled)
    }


def test_arrays_that_squeue_does_not_spell_out_are_the_same_jobs(
    queue: dict[str, QueuedJob],
) -> None:
    packed = by_id((GOLDEN / "squeue-arrays.txt").read_text())
    assert packed == queue
    assert [job_id for job_id in packed if job_id.startswith("22_")] == [
        f"22_{task}" for task in range(10)
    ]


def test_only_names_of_the_run_are_taken() -> None:
    text = (GOLDEN / "squeue-all.txt").read_text()
    assert set(by_id(text, "q.i0000.")) == {"3", "4"}
    assert by_id(text, "other.") == {}


def line(**changed: str) -> str:
    values = {
        "id": "7",
        "state": "RUNNING",
        "reason": "None",
        "dependency": "(null)",
        "submitted": "1796005400",
        "elapsed": "0:05",
        "nodes": "n1",
        "name": "q.tick.a",
    }
    return SEPARATOR.join((values | changed).values())


def test_a_foreign_name_with_a_line_break_is_passed_over() -> None:
    text = f"{line(name='weird')}\nname | x\n{line(id='8')}\n"
    assert list(by_id(text)) == ["8"]


def test_a_broken_line_that_may_be_ours_says_nothing_about_the_queue() -> None:
    cut = line(id="9").partition(SEPARATOR)[2]
    with pytest.raises(SchedulerUnavailable, match="not a job"):
        parse_queue(f"{line(id='8')}\n{cut}\n", prefix="q.", now=NOW)


@pytest.mark.parametrize(
    ("raw", "reason", "state"),
    [
        ("COMPLETING", "", JobState.RUNNING),
        ("CONFIGURING", "", JobState.RUNNING),
        ("SUSPENDED", "", JobState.RUNNING),
        ("REQUEUED", "", JobState.PENDING),
        ("PENDING", "BeginTime", JobState.PENDING),
        ("PENDING", "launch failed requeued held", JobState.HELD),
        ("PENDING", "(launch_failed_requeued_held)", JobState.HELD),
        ("PENDING", "JobHoldMaxRequeue", JobState.HELD),
        ("PENDING", "DependencyNeverSatisfied", JobState.PENDING),  # repoint revives it
        ("REQUEUE_HOLD", "", JobState.HELD),
        ("CANCELLED by 1000", "", JobState.ENDED),
        ("timeout", "", JobState.ENDED),
        ("REVOKED", "", JobState.UNKNOWN),
        ("EXPEDITING", "", JobState.UNKNOWN),
        ("", "", JobState.UNKNOWN),
    ],
)
def test_state(raw: str, reason: str, state: JobState) -> None:
    assert parse_state(raw, reason) is state


def test_short_codes_follow_their_long_names() -> None:
    names = list(STATES)
    assert len(names) % 2 == 0
    for long, short in zip(names[::2], names[1::2], strict=True):
        assert STATES[long] is STATES[short]
        assert len(short) <= 3 < len(long)


@pytest.mark.parametrize(
    ("job_id", "tasks"),
    [
        ("7", [("7", None)]),
        ("290+1", [("290+1", None)]),
        ("7_12", [("7_12", 12)]),
        ("7_[0-7%2]", [(f"7_{i}", i) for i in range(8)]),
        ("7_[1,4-5]", [("7_1", 1), ("7_4", 4), ("7_5", 5)]),
        ("7_[0-6:3]", [("7_0", 0), ("7_3", 3), ("7_6", 6)]),
        ("7_[0-2,...]", [("7_[0-2,...]", None)]),
        ("7_[0-99999999999]", [("7_[0-99999999999]", None)]),
        ("7_*", [("7_*", None)]),
    ],
)
def test_job_ids(job_id: str, tasks: list[tuple[str, int | None]]) -> None:
    assert expand_job_id(job_id) == tasks


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("(null)", ()),
        ("", ()),
        ("singleton(unfulfilled)", ()),
        ("afterany:3(unfulfilled)", ("3",)),
        ("afterany:5_*(unfulfilled),afterok:9_2(failed)", ("5", "9")),
        ("after:3+1(unfulfilled)?afternotok:4", ("3", "4")),
        ("afterok:1:2:3", ("1", "2", "3")),
    ],
)
def test_dependencies(text: str, ids: tuple[str, ...]) -> None:
    assert parse_dependency(text) == ids


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0:07", 7), ("59:59", 3599), ("1:00:00", 3600), ("2-03:04:05", 183845), ("INVALID", 0)],
)
def test_elapsed(text: str, seconds: float) -> None:
    assert parse_elapsed(text) == seconds


def test_times_in_either_form() -> None:
    assert parse_time("1796005396") == 1796005396.0
    local = parse_time("2026-11-30T02:23:16")
    later = parse_time("2026-11-30T02:23:20")
    assert local is not None and later is not None
    assert later - local == 4.0
    assert parse_time("N/A") is None


def test_a_clock_that_is_behind_gives_no_negative_age() -> None:
    (job,) = parse_queue(line(submitted="1796005500"), prefix="q.", now=NOW)
    assert job.age_s == 0.0


@given(st.lists(st.text(), min_size=7, max_size=7), st.text())
def test_any_field_is_read_without_an_error_and_no_job_is_lost(
    fields: list[str], name: str
) -> None:
    clean = [field.replace("\n", "").replace(SEPARATOR, "") for field in fields]
    text = SEPARATOR.join([*clean, "q." + name.replace("\n", "")])
    jobs = parse_queue(text, prefix="q.", now=NOW)
    assert jobs
    assert all(job.name == "q." + name.replace("\n", "") for job in jobs)


def test_the_format_asks_for_what_is_read() -> None:
    assert FORMAT.split(SEPARATOR) == ["%i", "%T", "%r", "%E", "%V", "%M", "%N", "%j"]
