"""What Slurm's answers mean. The answers were captured from a real Slurm (tests/golden)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slurm_rl.errors import SchedulerError, SchedulerUnavailable, SubmitDeferred, SubmitRefused
from slurm_rl.launch.sbatch import classify_refusal, parse_submission, quote_answer

GOLDEN = Path(__file__).parents[2] / "golden"
_SECTION = re.compile(r"== (?P<argv>.*)\n(?P<said>(?:.*\n)*?)rc=(?P<rc>\d+)\n")


def answers(*names: str) -> dict[str, str]:
    """Command line -> what it said, of each failed sbatch."""
    text = "".join((GOLDEN / name).read_text() for name in names)
    return {
        match["argv"]: match["said"]
        for match in _SECTION.finditer(text)
        if "sbatch" in match["argv"] and match["rc"] != "0"
    }


ANSWERS = answers("sbatch-errors.txt", "sbatch-limits.txt")
DEFERRED = {
    "sbatch --parsable --qos=lim",
    "sbatch --parsable  # MaxSubmitJobs of the user",
    "sbatch --parsable --array=0-3",
    "sbatch --parsable  # GrpSubmitJobs of the account",
    "sbatch --parsable  # MaxJobCount, until sbatch gives up",
    "timeout 3 sbatch --parsable  # MaxJobCount",
}
UNAVAILABLE = {
    "sbatch --parsable  # no controller",
    "sbatch --parsable  # SLURM_CONF names no file",
    "timeout 30 sbatch --parsable  # no munged",
}


def kind(error: SchedulerError) -> type[SchedulerError]:
    return type(error)


@pytest.mark.parametrize("argv", sorted(ANSWERS))
def test_answers_of_a_real_sbatch(argv: str) -> None:
    expected: type[SchedulerError] = SubmitRefused
    if argv in DEFERRED:
        expected = SubmitDeferred
    elif argv in UNAVAILABLE:
        expected = SchedulerUnavailable
    error = classify_refusal(ANSWERS[argv], name="demo.i0001.train.x")
    assert kind(error) is expected
    assert "\n" not in str(error)
    assert str(error).startswith("demo.i0001.train.x: sbatch: ")


def test_every_expectation_has_its_answer() -> None:
    assert set(ANSWERS) >= DEFERRED | UNAVAILABLE
    assert len(ANSWERS) >= 20


def test_a_refusal_quotes_sbatch_once() -> None:
    error = classify_refusal(ANSWERS["sbatch --parsable -p nope"], name="j")
    assert error.message == (
        "j: sbatch: invalid partition specified: nope;"
        " Batch job submission failed: Invalid partition name specified"
    )


@pytest.mark.parametrize(
    "said",
    [
        "sbatch: error: Batch job submission failed: Access/permission denied",
        "sbatch: error: [TACC]: Job submission is not allowed from this host\n"
        "sbatch: error: Batch job submission failed: Unspecified error",
    ],
)
def test_a_host_that_may_not_submit(said: str) -> None:
    error = classify_refusal(said, name="j")
    assert kind(error) is SubmitRefused
    assert "submit_from: login" in error.hint


@pytest.mark.parametrize(
    "said",
    [
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
        "sbatch: error: slurm_receive_msg: Zero Bytes were transmitted or received",
        "sbatch: error: Batch job submission failed: Protocol authentication error",
        "",
    ],
)
def test_trouble_says_nothing_about_the_job(said: str) -> None:
    assert kind(classify_refusal(said, name="j")) is SchedulerUnavailable


def test_a_timeout_is_no_refusal() -> None:
    error = classify_refusal("", name="j", timed_out=True)
    assert kind(error) is SchedulerUnavailable
    assert error.message == "j: sbatch did not answer in time"


def test_a_job_too_large_for_its_qos_is_refused_although_the_message_is_that_of_a_limit() -> None:
    error = classify_refusal(ANSWERS["sbatch --parsable --qos=wall --time=60"], name="j")
    assert kind(error) is SubmitRefused
    assert "QOSMaxWallDurationPerJobLimit" in error.message


def test_the_policy_message_alone_is_taken_for_a_limit() -> None:
    said = "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job …)"
    assert kind(classify_refusal(said, name="j")) is SubmitDeferred


@pytest.mark.parametrize(
    ("printed", "job_id"),
    [
        ("4711\n", "4711"),
        ("4711;alpha\n", "4711"),
        ("Submitted batch job 4711\n", "4711"),
        ("Submitted batch job 4711 on cluster alpha\n", "4711"),
        ("-----\nWelcome to Frontera, 42 jobs\n-----\n4711\n", "4711"),
        ("", None),
        ("job 4711 was not submitted\n", None),
    ],
)
def test_the_id_in_what_sbatch_prints(printed: str, job_id: str | None) -> None:
    assert parse_submission(printed) == job_id


def test_an_answer_becomes_one_line() -> None:
    said = "sbatch: error: a\nsbatch: error: a\n\nscontrol: fatal: b\nc: d\n"
    assert quote_answer(said) == "a; b; c: d"
