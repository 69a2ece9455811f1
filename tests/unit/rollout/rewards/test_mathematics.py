from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from slurm_rl.config.schema import Settings
from slurm_rl.errors import ConfigError, RewardError
from slurm_rl.rollout import reward_worker
from slurm_rl.rollout.rewards import Graded, Grader, mathematics
from slurm_rl.rollout.rewards.workers import WorkerDied, WorkerHung, Workers, _unpack
from slurm_rl.rollout.samples import Sample

Make = Callable[..., Sample]
pytest.importorskip("math_verify")

#: answer, label, whether they are the same.
TABLE = [
    ("1/2", r"\frac{1}{2}", 1),
    (r"\frac12", "0.5", 1),
    (r"\dfrac{3}{4}", "0.75", 1),
    (r"\tfrac{6}{8}", r"\frac{3}{4}", 1),
    (r"-\frac{1}{3}", r"\frac{-1}{3}", 1),
    (r"3\frac{1}{2}", r"\frac{7}{2}", 1),
    ("1,234", "1234", 1),
    ("1,234", "1235", 0),
    (r"50\%", "50", 1),
    ("50%", "0.5", 1),
    (r"5\text{ cm}", "5", 1),
    ("5 cm", "5", 1),
    (r"\$18", "18", 1),
    (r"90^\circ", "90", 1),
    (r"\{1,2,3\}", r"\{3,2,1\}", 1),
    (r"\{1,2\}", r"\{1,2,3\}", 0),
    ("2,3", "3,2", 1),
    ("(1,2)", "(1,2)", 1),
    ("(1,2)", "(2,1)", 0),
    ("[0,1)", "[0,1)", 1),
    ("[0,1)", "[0,1]", 0),
    (r"(-\infty,3]", r"(-\infty, 3]", 1),
    (r"[0,1)\cup(2,3]", r"(2,3]\cup[0,1)", 1),
    ("x^2+2x+1", "(x+1)^2", 1),
    ("x^2+2x", "(x+1)^2", 0),
    ("x=5", "5", 1),
    (r"\sqrt{8}", r"2\sqrt{2}", 1),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}", 1),
    (r"\pi", "3", 0),
    (r"2^{10}", "1024", 1),
    (r"\log_2 8", "3", 1),
    ("3+2i", "2i+3", 1),
    (r"1\pm\sqrt{2}", r"1-\sqrt{2},1+\sqrt{2}", 1),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", 1),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}", 0),
    (r"\text{Evelyn}", "Evelyn", 1),
    ("Dynamo", "Monday", 0),
    (r"\text{B}", "B", 1),
    ("7", "$7$", 1),
    ("7", r"\(7\)", 1),
    ("7", r"the answer is \boxed{7}", 1),
    ("-3", "3", 0),
    ("", "3", 0),
]


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """One loop, so that the processes live through all cases."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def workers(loop: asyncio.AbstractEventLoop) -> Iterator[Workers]:
    async def make() -> Workers:
        return Workers(1)

    workers = loop.run_until_complete(make())
    yield workers
    loop.run_until_complete(workers.close())


@pytest.fixture
def score(
    loop: asyncio.AbstractEventLoop, workers: Workers, make: Callable[..., Settings]
) -> Callable[..., float]:
    from slurm_rl.rollout.rewards.means import Means
    from slurm_rl.rollout.services import Clients

    means = Means(settings=make(), workers=workers, clients=Clients())

    def run(function: Any, sample: Sample) -> float:
        return float(loop.run_until_complete(function(means, None, sample)))

    return run


@pytest.mark.parametrize(("answer", "label", "expected"), TABLE)
def test_table(
    score: Callable[..., float], sample: Make, answer: str, label: str, expected: float
) -> None:
    response = f"<think>perhaps \\boxed{{99}}</think> So it is $\\boxed{{{answer}}}$."
    assert score(mathematics.math_reward, sample(response, label)) == expected
    assert score(mathematics.deepscaler, sample(response, label)) == expected


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("The result is $\\frac{1}{2}$.", "0.5", 1),
        ("So we get 42.", "42", 1),
        ("So we get 41.", "42", 0),
        ("The answer is Evelyn.", "Evelyn", 1),
        ("no idea", "42", 0),
        ("\\boxed{1} or rather \\boxed{2}", "2", 1),
        ("\\boxed{1} or rather \\boxed{2}", "1", 0),
        ("\\boxed{2}", ["1", "2"], 1),
        ("\\boxed{3}", ["1", "2"], 0),
        ("\\boxed{\\boxed{2}}", "2", 1),
        ("\\boxed{2}", 2, 1),
        ("\\boxed{0.5}", 0.5, 1),
    ],
)
def test_where_the_answer_is(
    score: Callable[..., float], sample: Make, response: str, label: Any, expected: float
) -> None:
    assert score(mathematics.math_reward, sample(response, label)) == expected


def test_deepscaler_wants_thinking_and_a_box(score: Callable[..., float], sample: Make) -> None:
    for response in ("\\boxed{2}", "<think>\\boxed{2}</think> 2", "<think>a \\boxed{2}"):
        assert score(mathematics.deepscaler, sample(response, "2")) == 0


def test_no_label_is_an_error(score: Callable[..., float], sample: Make) -> None:
    for label in (None, "", []):
        with pytest.raises(RewardError, match=r"no label to compare with; set rollout.label_key"):
            score(mathematics.math_reward, sample("\\boxed{1}", label))
        with pytest.raises(RewardError, match="reward deepscaler: the sample has no label"):
            score(mathematics.deepscaler, sample("no box", label))


def test_reasoning_gym_scores_by_its_own_rule(score: Callable[..., float], sample: Make) -> None:
    import reasoning_gym

    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=3)[0]
    for response, expected in ((entry["answer"], 1.0), ("nothing", None)):
        made = sample(
            f"<think>…</think><answer>{response}</answer>",
            entry["answer"],
            prompt=entry["question"],
            metadata=entry["metadata"],
        )
        value = score(mathematics.reasoning_gym, made)
        assert value == expected if expected is not None else value < 1
    with pytest.raises(RewardError, match="metadata has no source_dataset"):
        score(mathematics.reasoning_gym, sample("1", "1"))


@asynccontextmanager
async def pool() -> AsyncIterator[Workers]:
    workers = Workers(1)
    try:
        yield workers
    finally:
        await workers.close()


EXPLODES = {"kind": "pattern", "pattern": "(a+)+b", "text": "a" * 60}


def test_a_hung_process_is_killed_and_replaced() -> None:
    async def run() -> None:
        async with pool() as workers:
            began = time.monotonic()
            with pytest.raises(WorkerHung):
                await workers.run(EXPLODES, timeout_s=1.0)
            assert time.monotonic() - began < 30
            fine = {"kind": "pattern", "pattern": "a+", "text": "aa"}
            assert await workers.run(fine, timeout_s=60.0) == 1.0

    asyncio.run(run())


@pytest.mark.slow
def test_processor_time_is_what_counts() -> None:
    async def run() -> None:
        async with pool() as workers:
            with pytest.raises(WorkerHung):
                await workers.run(EXPLODES, timeout_s=100.0, cpu_s=1.0)
            fine = {"kind": "pattern", "pattern": "a+", "text": "aa"}
            for _ in range(3):
                assert await workers.run(fine, timeout_s=60.0, cpu_s=1.0) == 1.0

    asyncio.run(run())


@pytest.mark.slow
def test_an_answer_that_cannot_be_compared_is_wrong(
    sample: Make, make: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """A term that takes for ever costs its sample the reward, and nothing else."""
    monkeypatch.setattr(mathematics, "ANSWER_CPU_S", 1.0)
    samples = [
        sample(f"\\boxed{{{answer}}}", "2")
        for answer in (
            "10^{10^{10^{10}}}",
            "2",
            "\\frac{4}{2}",
            "9" * 3000 + "^{" + "9" * 3000 + "}",
        )
    ]

    async def run() -> Graded:
        async with Grader(make(rm_type="math")) as grader:
            return await grader.grade(samples)

    began = time.monotonic()
    graded = asyncio.run(run())
    assert graded.outcome == "graded"
    assert [s.reward for s in graded.samples] == [0, 1, 1, 0]
    assert time.monotonic() - began < 100


def test_a_process_that_dies_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with pool() as workers:
            assert (
                await workers.run({"kind": "pattern", "pattern": "", "text": ""}, timeout_s=60) == 1
            )
            (worker,) = workers._all
            worker._process.kill()
            with pytest.raises(WorkerDied):
                await workers.run({"kind": "pattern", "pattern": "", "text": ""}, timeout_s=60)
            assert (
                await workers.run({"kind": "pattern", "pattern": "", "text": ""}, timeout_s=60) == 1
            )

    asyncio.run(run())


def test_processes_see_no_secret_and_end_with_their_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret-of-ours")

    async def run() -> int:
        async with pool() as workers:
            await workers.run({"kind": "pattern", "pattern": "", "text": ""}, timeout_s=60)
            (worker,) = workers._all
            pid = worker._process.pid
            with open(f"/proc/{pid}/environ", "rb") as file:
                assert b"secret-of-ours" not in file.read()
            return pid

    pid = asyncio.run(run())
    assert not os.path.exists(f"/proc/{pid}")


def test_what_a_process_answers_is_a_value_or_an_error() -> None:
    assert _unpack({"value": 0.5}) == 0.5
    with pytest.raises(RewardError, match="KeyError: 'a'"):
        _unpack({"error": "KeyError: 'a'"})
    with pytest.raises(ConfigError, match=r"needs math-verify.*pip install 'slurm-rl\[rewards\]'"):
        _unpack({"missing": "math-verify", "why": "No module named 'math_verify'"})
    libraries = {library for _, _, library in reward_worker._KINDS.values()}
    for library in libraries - {"re"}:  # which is always there
        with pytest.raises(ConfigError):
            _unpack({"missing": library, "why": ""})


def test_a_pattern_that_is_none_is_an_error_of_its_owner() -> None:
    answer = reward_worker.run_task({"kind": "pattern", "pattern": "(", "text": ""})
    assert "unterminated subpattern" in answer["error"]
