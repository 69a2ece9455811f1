from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from slurm_rl.errors import ConfigError, RewardError
from slurm_rl.rollout.rewards import Graded
from slurm_rl.rollout.samples import Sample
from slurm_rl.rollout.sandbox.runner import find_isolation

Make = Callable[..., Sample]
Grade = Callable[..., Graded]
isolated = find_isolation()
pytestmark = pytest.mark.skipif(not isolated.isolated, reason=f"no namespaces: {isolated.why}")

TALK = {"inputs": ["1 2\n", "3 4\n", ["5", "6"]], "outputs": ["3", "7\n", "11"]}
ADD = "```python\nimport sys\nprint(sum(map(int, sys.stdin.read().split())))\n```"


def reward(
    grade: Grade, made: Sample, options: dict[str, Any] | None = None, **values: Any
) -> float:
    graded = grade([made], rewards=[{"rm_type": "code", "options": options or {}}], **values)
    assert graded.outcome == "graded"
    value = graded.samples[0].reward
    assert value is not None
    return value


@pytest.mark.slow
def test_the_share_of_tests_that_pass(grade: Grade, sample: Make) -> None:
    assert reward(grade, sample(ADD, metadata=TALK)) == 1
    assert reward(grade, sample(ADD, metadata={"tests": TALK})) == 1
    assert reward(grade, sample(ADD, json.dumps(TALK))) == 1
    some = "<think>```python\nexit(1)\n```</think>```python\na = input()\nprint(7 if a == '3 4' else 0)\n```"
    assert reward(grade, sample(some, metadata=TALK)) == pytest.approx(1 / 3)
    assert reward(grade, sample(some, metadata=TALK), {"all_or_nothing": True}) == 0
    assert reward(grade, sample(ADD, metadata=TALK), {"all_or_nothing": True}) == 1
    assert reward(grade, sample(some, metadata=TALK), {"max_tests": 1}) == 0


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("def f(a):\n    return a * 2", 1.0),
        ("```\ndef f(a):\n    return 4\n```", 0.5),
        ("def f(a):\n    raise KeyError", 0.0),
        ("syntax error", 0.0),
        ("", 0.0),
    ],
)
def test_asserts(grade: Grade, sample: Make, response: str, expected: float) -> None:
    tests = {"asserts": ["assert f(2) == 4", "assert f(3) == 6"]}
    assert reward(grade, sample(response, metadata=tests)) == expected


def test_a_check_of_an_entry_point(grade: Grade, sample: Make) -> None:
    test = "def check(candidate):\n    assert candidate(2) == TWO * 2\n"
    tests = {"test": test, "entry_point": "double", "setup": "TWO = 2"}
    assert reward(grade, sample("def double(x): return 2 * x", metadata=tests)) == 1
    assert reward(grade, sample("def double(x): return 3 * x", metadata=tests)) == 0


@pytest.mark.parametrize(
    "response",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "def f(x):\n    import os\n    os._exit(0)",
        "import builtins\nbuiltins.exec = lambda *a: None",
        "class Any:\n    def __eq__(self, other): return True\nraise SystemExit",
        "import os\nos.write = lambda *a: 0",
        "print(input())\nexit(0)",
        "print(open('test.py').read())\nexit(0)",
        "print('\\n' + 'passed')\nraise SystemExit(0)",
        "while True: pass",
        "import os\nwhile True: os.fork()",
        "x = 'a' * 10**10",
        "print('x' * 10**8)",
    ],
)
def test_leaving_early_is_not_passing(grade: Grade, sample: Make, response: str) -> None:
    """Nor is breaking a limit: each of them is 0, and never an error."""
    tests = {"asserts": ["assert f(2) == 4"]}
    assert reward(grade, sample(response, metadata=tests), sandbox={"timeout_s": 3.0}) == 0


@pytest.mark.slow
def test_all_tests_of_a_group_have_their_turn(grade: Grade, sample: Make) -> None:
    began = time.monotonic()
    group = [sample(ADD, metadata=TALK) for _ in range(4)]
    graded = grade(group, rm_type="code")
    assert [s.reward for s in graded.samples] == [1.0] * 4
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            {},
            "code: the sample has no tests: .* for the prompt 'q'; put them into the row's metadata",
        ),
        ({"inputs": ["1"], "outputs": []}, "code: 1 inputs, but 0 outputs"),
        ({"inputs": [], "outputs": []}, "the sample has no tests"),
        ({"asserts": []}, "the sample has no tests"),
    ],
)
def test_a_sample_without_tests_is_the_datas_fault(
    grade: Grade, sample: Make, metadata: dict[str, Any], message: str
) -> None:
    with pytest.raises(RewardError, match=message):
        grade([sample(ADD, metadata=metadata)], rm_type="code")


def test_without_isolation_it_says_so(
    grade: Grade, sample: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slurm_rl.rollout.sandbox import runner

    async def refuse(spec: dict[str, Any]) -> dict[str, Any]:
        return {"status": "unavailable", "why": "a user namespace: Operation not permitted"}

    monkeypatch.setattr(runner, "_enclose", refuse)
    with pytest.raises(ConfigError, match="a user namespace: Operation not permitted"):
        grade([sample(ADD, metadata=TALK)], rm_type="code")
