from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from toy.services import FakeService

from slurm_rl.config.rollout_schema import EvalSet
from slurm_rl.config.schema import Settings
from slurm_rl.errors import ConfigError, DataError, RewardError, ServiceDown
from slurm_rl.rollout.rewards import Graded, Grader, find_reward
from slurm_rl.rollout.rewards.texts import exact_match, f1, last_number
from slurm_rl.rollout.samples import Sample

Make = Callable[..., Sample]
Grade = Callable[..., Graded]
Code = Callable[[str], str]
Build = Callable[..., Settings]


def rewards(graded: Graded) -> list[float | None]:
    assert graded.outcome == "graded", graded
    return [sample.reward for sample in graded.samples]


def test_the_users_reward_gets_settings_and_sample(grade: Grade, code: Code, sample: Make) -> None:
    name = code(
        "def score(args, sample):\n"
        "    assert sample.reward is None\n"
        "    return args.n_samples_per_prompt + args.seed + len(sample.response)\n"
    )
    graded = grade([sample("abc")], custom_rm_path=f"{name}.score")
    assert rewards(graded) == [4 + 1234 + 3]
    assert graded.samples[0].rewards == {}


def test_coroutines_of_all_samples_run_together(grade: Grade, code: Code, sample: Make) -> None:
    name = code(
        "import asyncio\nasync def score(args, sample):\n"
        "    await asyncio.sleep(0.5)\n    return int(sample.response)\n"
    )
    began = time.monotonic()
    graded = grade([sample(str(n)) for n in range(20)], custom_rm_path=f"{name}.score")
    assert rewards(graded) == list(range(20))
    assert time.monotonic() - began < 9.0, "in turn they take ten seconds"


def test_plain_functions_run_one_at_a_time(grade: Grade, code: Code, sample: Make) -> None:
    name = code(
        "import threading, time\nnow = 0\n"
        "def score(args, sample):\n"
        "    global now\n    now += 1\n    seen = now\n    time.sleep(0.01)\n    now -= 1\n"
        "    return seen\n"
    )
    graded = grade([sample() for _ in range(10)], custom_rm_path=f"{name}.score")
    assert rewards(graded) == [1.0] * 10


def test_a_plain_function_may_return_a_coroutine(grade: Grade, code: Code, sample: Make) -> None:
    name = code(
        "async def later(value):\n    return value\n"
        "score = lambda args, sample: later(0.25)\n"
        "class Model:\n    async def __call__(self, args, sample):\n        return 0.75\n"
        "model = Model()\n"
    )
    assert rewards(grade([sample()], custom_rm_path=f"{name}.score")) == [0.25]
    assert rewards(grade([sample()], custom_rm_path=f"{name}.model")) == [0.75]


def test_numpy_numbers_count(grade: Grade, code: Code, sample: Make) -> None:
    name = code("import numpy\ndef score(args, sample):\n    return numpy.float32(0.5)\n")
    (value,) = rewards(grade([sample()], custom_rm_path=f"{name}.score"))
    assert value == 0.5
    assert type(value) is float


FAILURES = [
    (
        "    raise KeyError('gold')",
        r"reward score \(.*\.py:1\) raised KeyError: 'gold' at .*\.py:2 for the prompt 'q'",
    ),
    ("    raise SystemExit(0)", "raised SystemExit: 0 at .*"),
    ("    raise KeyboardInterrupt", "raised KeyboardInterrupt"),
    ("    import asyncio; raise asyncio.CancelledError", "raised CancelledError"),
    ("    return float('nan')", r"returned nan for the prompt 'q'"),
    ("    return float('inf')", "returned inf"),
    ("    return 'high'", "returned a str, not a number"),
    ("    return None", "returned a NoneType, not a number"),
    ("    return {'score': 1.0}", "returned a dict, not a number .*rollout.reward_key"),
]


@pytest.mark.parametrize(("body", "message"), FAILURES)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_reward_that_fails_is_one_line(
    grade: Grade, code: Code, sample: Make, kind: str, body: str, message: str
) -> None:
    name = code(f"{kind} score(args, sample):\n{body}\n")
    with pytest.raises(RewardError, match=message) as caught:
        grade([sample()], custom_rm_path=f"{name}.score")
    assert "\n" not in str(caught.value)
    assert caught.value.blame == "user"
    group = [sample(), sample("x")]
    graded = grade(group, custom_rm_path=f"{name}.score", on_reward_error="drop")
    assert (graded.outcome, graded.samples) == ("dropped", tuple(group))
    assert "reward score" in graded.why


HANGS = {
    "plain": "import time\ndef score(args, sample):\n    time.sleep(3600)\n",
    "spins": "def score(args, sample):\n    while True: pass\n",
    "coroutine": "import asyncio\nasync def score(args, sample):\n    await asyncio.sleep(3600)\n",
    "blocks": "import time\nasync def score(args, sample):\n    time.sleep(3600)\n",
    "never cancels": "import asyncio\nasync def score(args, sample):\n    while True:\n"
    "        try:\n            await asyncio.sleep(3600)\n        except BaseException: pass\n",
    "returns what never comes": "import asyncio\nasync def later():\n    await asyncio.sleep(3600)\n"
    "def score(args, sample):\n    return later()\n",
    "group": "import time\ndef score(args, samples):\n    time.sleep(3600)\n",
}
_PROGRAM = """
import asyncio, sys
sys.path.insert(0, {folder!r})
from slurm_rl.config.schema import Settings
from slurm_rl.rollout.rewards import Grader
from slurm_rl.rollout.samples import Sample

async def main():
    settings = Settings.model_validate_json({settings!r})
    group = [Sample(0, k, (1,), (2,), (0.0,), (1,), prompt="q") for k in range(2)]
    async with Grader(settings) as grader:
        for _ in range(2):
            graded = await grader.grade(group)
            print(graded.outcome, graded.why)
        quick = [Sample(0, 0, (1,), (2,), (0.0,), (1,), metadata={{"rm_type": "random"}})]
        print((await grader.grade(quick)).outcome)
asyncio.run(main())
print("ended", flush=True)
"""


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind == "plain" else pytest.mark.slow)
        for kind in sorted(HANGS)
    ],
)
def test_a_hang_of_any_kind_is_a_failure_and_the_process_ends(
    make: Build, code: Code, tmp_path: Path, kind: str
) -> None:
    name = code(HANGS[kind])
    settings = make(
        custom_rm_path=f"{name}.score", reward_timeout_s=0.5, on_reward_error="drop",
        group_rm=kind == "group",
    )  # fmt: skip
    text = _PROGRAM.format(folder=str(tmp_path), settings=settings.model_dump_json())
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=90, check=False
    )
    lines = done.stdout.splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["dropped"] * 2 + ["graded", "ended"], done
    assert "took longer than 0.5 s for the prompt 'q'" in lines[0]
    assert done.returncode == 0


@pytest.mark.slow
def test_the_next_one_is_heard_after_a_hang(
    grade: Grade, code: Code, make: Build, sample: Make
) -> None:
    """A hung plain function, and a coroutine that blocks, keep their thread; others get a new one."""
    for kind in ("def", "async def"):
        name = code(
            f"import time\n{kind} score(args, sample):\n"
            "    if sample.response == 'hang': time.sleep(3600)\n    return 1\n"
        )
        settings = make(
            custom_rm_path=f"{name}.score", reward_timeout_s=2.0, on_reward_error="drop"
        )

        async def run(settings: Settings = settings) -> list[str]:
            async with Grader(settings) as grader:
                groups = [[sample("hang")], [sample("a")], [sample("b")]]
                return [(await grader.grade(group)).outcome for group in groups]

        assert asyncio.run(run()) == ["dropped", "graded", "graded"]


def test_tries_again_before_it_counts(grade: Grade, code: Code, sample: Make) -> None:
    text = (
        "num = 0\ndef score(args, sample):\n    global num\n    num += 1\n"
        "    if num <= 2: raise OSError('flaky')\n    return num\n"
    )
    assert rewards(grade([sample()], custom_rm_path=f"{code(text)}.score", reward_retries=2)) == [3]
    with pytest.raises(RewardError, match="flaky"):
        grade([sample()], custom_rm_path=f"{code(text)}.score", reward_retries=1)


def test_paths_that_lead_nowhere(code: Code) -> None:
    name = code("import missing_library\n")
    other = code("1 / 0\n")
    third = code("score = 3\n")
    cases: list[tuple[str, type[Exception], str]] = [
        (f"{name}.score", RewardError, "no module named 'missing_library'"),
        (f"{other}.score", RewardError, r"importing .* raised ZeroDivisionError: .* at .*:1"),
        (f"{third}.score", RewardError, "has no function 'score'"),
        ("nowhere.score", RewardError, "no module named 'nowhere'"),
        ("score", ConfigError, "has no module"),
    ]
    for path, kind, message in cases:
        with pytest.raises(kind, match=message):
            find_reward(rm_type=None, custom_rm_path=path)


def test_metadata_may_name_another_reward(grade: Grade, code: Code, sample: Make) -> None:
    samples = [
        sample("a 7", "7"),
        sample("a 7", "7", metadata={"rm_type": "gsm8k"}),
        sample("\\boxed{7} 8", "7", metadata={"rm_type": "boxed_exact_match"}),
        sample("7", "7", metadata={"rm_type": "boxed_exact_match"}),
        sample("x", "7", metadata={"rm_type": "boxed_math"}),
        sample("\\boxed{\\frac{14}{2}}", "7", metadata={"rm_type": "boxed_math"}),
    ]
    assert rewards(grade(samples, rm_type="exact_match")) == [0.0, 1.0, 1.0, 0.0, 0.0, 1.0]
    name = code("def score(args, sample):\n    return 5\n")
    assert rewards(grade(samples[:2], custom_rm_path=f"{name}.score")) == [5.0, 1.0]
    with pytest.raises(DataError, match="'nice' is no built-in reward; there are exact_match"):
        grade([sample(metadata={"rm_type": "nice"})])


weights = st.floats(-5, 5).filter(bool)


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(weights, weights, weights, st.integers(0, 12), st.integers(1, 5), st.floats(0.1, 3))
def test_the_weighted_sum_is_what_a_hand_computes(
    grade: Grade,
    sample: Make,
    a: float,
    b: float,
    c: float,
    length: int,
    buffer: int,
    factor: float,
) -> None:
    made = sample("so 7 apples", "7 apples", response_tokens=(2,) * length)
    graded = grade(
        [made],
        rewards=[
            {"rm_type": "f1", "weight": a},
            {"rm_type": "gsm8k", "weight": b, "name": "number"},
            {"rm_type": "exact_match", "weight": c},
        ],
        overlong={"buffer_len": buffer, "penalty_factor": factor},
    )
    over = max(0, min(length, 6) - (6 - buffer)) / buffer * factor  # the limit is 6
    (got,) = graded.samples
    assert got.rewards == pytest.approx(
        {"f1": 0.8, "number": 1.0, "exact_match": 0.0, "overlong": -over}
    )
    assert got.reward == pytest.approx(a * 0.8 + b * 1.0 + c * 0.0 - over)
    assert replace(got, reward=None, rewards={}) == made


def test_the_parts_are_those_of_the_functions(grade: Grade, sample: Make) -> None:
    made = [sample("a 7", "b 7"), sample("", "7")]
    functions = {"f1": f1, "gsm8k": last_number, "exact_match": exact_match}
    graded = grade(made, rewards=[{"rm_type": name} for name in functions])
    for got in graded.samples:
        assert got.rewards == {name: function(None, got) for name, function in functions.items()}


def test_an_evaluation_is_not_shaped(grade: Grade, sample: Make) -> None:
    made = sample("7", "7", response_tokens=(2,) * 6)
    shape = {"rm_type": "exact_match", "overlong": {"buffer_len": 3}}
    assert rewards(grade([made], **shape)) == [0.0]
    own = {"overrides": EvalSet(prompt_data="/a")}
    assert rewards(grade([made], options=own, **shape)) == [1.0]


def test_one_entry_of_an_object_counts_and_the_others_are_kept(
    grade: Grade, code: Code, sample: Make
) -> None:
    name = code(
        "def score(args, sample):\n"
        "    return {'total': 0.5, 'style': 2, 'why': 'nice', 'nan': float('nan')}\n"
        "def plain(args, sample):\n    return 3\n"
    )
    (one,) = grade([sample()], custom_rm_path=f"{name}.score", reward_key="total").samples
    assert (one.reward, one.rewards) == (0.5, {"style": 2.0})
    (two,) = grade(
        [sample()],
        reward_key="total",
        rewards=[
            {"custom_rm_path": f"{name}.score", "name": "a", "weight": 2.0},
            {"custom_rm_path": f"{name}.plain"},
        ],
    ).samples
    assert (two.reward, two.rewards) == (4.0, {"a": 0.5, "a/style": 2.0, "plain": 3.0})
    missing = r"an object without 'missing' \(it has total, style, why, nan\) for the prompt"
    with pytest.raises(RewardError, match=missing):
        grade([sample()], custom_rm_path=f"{name}.score", reward_key="missing")


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_reward_of_the_whole_group(grade: Grade, code: Code, sample: Make, kind: str) -> None:
    name = code(
        f"{kind} score(args, samples):\n    return [len(samples) + int(s.response) for s in samples]\n"
    )
    samples = [sample(str(n)) for n in range(3)]
    assert rewards(grade(samples, custom_rm_path=f"{name}.score", group_rm=True)) == [3, 4, 5]


def test_samples_that_name_their_reward_are_no_members_of_the_group(
    grade: Grade, code: Code, sample: Make
) -> None:
    name = code("def score(args, samples):\n    return [len(samples)] * len(samples)\n")
    samples = [sample(), sample("x", "x", metadata={"rm_type": "exact_match"}), sample()]
    assert rewards(grade(samples, custom_rm_path=f"{name}.score", group_rm=True)) == [2, 1, 2]


def test_those_behind_a_hang_get_all_their_tries(grade: Grade, code: Code, sample: Make) -> None:
    """The second sample hangs once; the third was never tried then, and may fail once."""
    name = code(
        "import time\nseen = []\ndef score(args, sample):\n"
        "    seen.append(sample.response)\n    num = seen.count(sample.response)\n"
        "    if sample.response == 'b' and num == 1: time.sleep(3600)\n"
        "    if sample.response == 'c' and num == 1: raise OSError\n"
        "    return num\n"
    )
    group = [sample(text) for text in "abc"]
    graded = grade(group, custom_rm_path=f"{name}.score", reward_timeout_s=1.0, reward_retries=1)
    assert rewards(graded) == [1, 2, 2]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "[1.0]",
            "returned 1 rewards for 2 samples of the prompt 'q'; with group_rm return a list",
        ),
        ("1.0", "returned a float for 2 samples"),
        ("[1.0, None]", "returned a NoneType, not a number"),
        ("1 / 0", "raised ZeroDivisionError"),
    ],
)
def test_a_group_reward_that_fails(
    grade: Grade, code: Code, sample: Make, body: str, message: str
) -> None:
    name = code(f"def score(args, samples):\n    return {body}\n")
    with pytest.raises(RewardError, match=message):
        grade([sample(), sample()], custom_rm_path=f"{name}.score", group_rm=True)


def test_an_outage_defers_or_halts(sample: Make, make: Build) -> None:
    service = {"url": "http://127.0.0.1:9", "down_after_s": 0.3, "retries": 0}
    group = [sample("a"), sample("b")]

    async def run(on_down: str) -> Graded:
        settings = make(
            rm_type="remote_rm",
            rm_service="rm",
            top__services={"rm": service | {"on_down": on_down}},
        )
        async with Grader(settings) as grader:
            return await grader.grade(group)

    graded = asyncio.run(run("defer"))
    assert (graded.outcome, graded.samples) == ("ungraded", tuple(group))
    assert "service rm at http://127.0.0.1:9 is down since" in graded.why
    with pytest.raises(ServiceDown, match=r"services.rm: http://127.0.0.1:9 is down") as caught:
        asyncio.run(run("halt"))
    assert caught.value.blame == "user"
    assert "slurm-rl resume" in caught.value.hint


def test_generation_meets_an_outage_and_its_end(sample: Make, make: Build, tmp_path: Path) -> None:
    """Groups before it are graded, those during it deferred, those after it graded again."""
    file = tmp_path / "url"
    service = {"url_file": str(file), "down_after_s": 0.4, "on_down": "defer", "retries": 0}
    settings = make(rm_type="remote_rm", rm_service="rm", top__services={"rm": service})

    async def run() -> list[str]:
        first, second = FakeService(lambda p: 1.0), FakeService(lambda p: {"reward": 0.5})
        file.write_text(await first.start())
        outcomes = []
        async with Grader(settings) as grader:
            outcomes.append((await grader.grade([sample("a")])).outcome)
            await first.stop()
            outcomes.append((await grader.grade([sample("b")])).outcome)
            outcomes.append((await grader.grade([sample("c")])).outcome)
            file.write_text(await second.start())
            await asyncio.sleep(0.6)
            last = await grader.grade([sample("d")])
            outcomes.append(last.outcome)
            assert rewards(last) == [0.5]
        await second.stop()
        return outcomes

    assert asyncio.run(run()) == ["graded", "ungraded", "ungraded", "graded"]


@pytest.mark.parametrize("kind", ["async def", "def"])
def test_the_users_reward_may_ask_a_service(
    sample: Make, make: Build, code: Code, kind: str
) -> None:
    wait = "await " if kind == "async def" else ""
    name = code(
        f"{kind} score(args, sample):\n    return {wait}args.ask('rm', {{'n': sample.response}})\n"
    )

    async def run(url: str, on_down: str) -> Graded:
        service = {"url": url, "down_after_s": 0.3, "on_down": on_down}
        settings = make(custom_rm_path=f"{name}.score", top__services={"rm": service})
        async with Grader(settings) as grader:
            return await grader.grade([sample("4"), sample("5")])

    async def both() -> None:
        async with FakeService(lambda payload: int(payload["n"])) as server:
            assert rewards(await run(server.url, "halt")) == [4.0, 5.0]
        assert (await run("http://127.0.0.1:9", "defer")).outcome == "ungraded"
        with pytest.raises(ServiceDown):
            await run("http://127.0.0.1:9", "halt")

    asyncio.run(both())


def test_quick_rewards_cost_microseconds(sample: Make, make: Build) -> None:
    group = [sample("the answer is 7", "7") for _ in range(8)]

    async def run() -> float:
        async with Grader(make(rm_type="gsm8k")) as grader:
            await grader.grade(group)
            began = time.process_time()
            for _ in range(500):
                await grader.grade(group)
            return (time.process_time() - began) / (500 * len(group))

    assert asyncio.run(run()) < 100e-6  # 9 µs on an idle machine
