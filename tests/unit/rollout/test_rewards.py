import math
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from slurm_rl.errors import ConfigError, RewardError
from slurm_rl.rollout.rewards import BUILT_IN, Rewarder, find_reward
from slurm_rl.rollout.samples import Sample


def sample(response: str = "", label: object = "", **changes: object) -> Sample:
    values = {
        "prompt_tokens": (1,),
        "response_tokens": (2,),
        "rollout_logprobs": (0.0,),
        "loss_mask": (1,),
    }
    return Sample(0, 0, response=response, label=label, **(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "response", "label", "expected"),
    [
        ("exact_match", " 12\n", 12, 1.0),
        ("exact_match", "12 13", "12", 0.0),
        ("prefix_match", "ab", "ab", 1.0),
        ("prefix_match", "ac", "ab", 0.5),
        ("prefix_match", "cb", "ab", 0.0),
        ("prefix_match", "abab", "ab", 0.5),
        ("prefix_match", "", "ab", 0.0),
        ("f1", "the cat sat", "a cat sat down", 4 / 7),
        ("f1", "cat cat", "cat", 2 / 3),
        ("f1", "", "", 0.0),
        ("gsm8k", "so 3 + 4 = 7.0", "#### 7", 1.0),
        ("gsm8k", "1,234 apples", "1234", 1.0),
        ("gsm8k", "-5", "5", 0.0),
        ("gsm8k", "none", "5", 0.0),
    ],
)
def test_built_in_rewards(name: str, response: str, label: object, expected: float) -> None:
    assert BUILT_IN[name](None, sample(response, label)) == pytest.approx(expected)


def test_random_depends_on_the_seed_alone() -> None:
    values = [BUILT_IN["random"](None, sample(seed=seed)) for seed in (1, 2, 1)]
    assert values[0] == values[2] != values[1]


@pytest.fixture
def code(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Writes a module of the user's and puts it on the path, as the stage's entry does."""
    written = []

    def write(text: str) -> str:
        name = f"mycode_{tmp_path.name}_{len(written)}".replace("-", "_")
        (tmp_path / f"{name}.py").write_text(text)
        written.append(name)
        return name

    sys.path.insert(0, str(tmp_path))
    yield write
    sys.path.remove(str(tmp_path))
    for name in written:
        sys.modules.pop(name, None)


def reward(make_settings, samples: list[Sample], **rollout: object) -> list[float]:  # type: ignore[no-untyped-def]
    with Rewarder(make_settings(**rollout)) as rewarder:
        return rewarder.submit(samples).result(timeout=10)


def test_the_users_reward_gets_settings_and_sample(make_settings, code) -> None:  # type: ignore[no-untyped-def]
    name = code(
        "def score(args, sample):\n    return args.n_samples_per_prompt + args.seed + len(sample.response)\n"
    )
    assert reward(make_settings, [sample("abc")], rm_type=None, custom_rm_path=f"{name}.score") == [
        4 + 1234 + 3
    ]


def test_coroutines_of_all_groups_run_together(make_settings, code) -> None:  # type: ignore[no-untyped-def]
    name = code(
        "import asyncio\nasync def score(args, sample):\n    await asyncio.sleep(0.3)\n    return int(sample.response)\n"
    )
    settings = make_settings(rm_type=None, custom_rm_path=f"{name}.score")
    began = time.monotonic()
    with Rewarder(settings) as rewarder:
        futures = [rewarder.submit([sample(str(2 * g)), sample(str(2 * g + 1))]) for g in range(10)]
        values = [future.result(timeout=10) for future in futures]
    assert values == [[2 * g, 2 * g + 1] for g in range(10)]
    assert time.monotonic() - began < 2.0


def test_numpy_numbers_count(make_settings, code) -> None:  # type: ignore[no-untyped-def]
    name = code("import numpy\ndef score(args, sample):\n    return numpy.float32(0.5)\n")
    (value,) = reward(make_settings, [sample()], rm_type=None, custom_rm_path=f"{name}.score")
    assert value == 0.5
    assert type(value) is float


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "    raise KeyError('gold')",
            r"reward score \(.*\.py:1\) raised KeyError: 'gold' at .*\.py:2 for the prompt 'q'",
        ),
        ("    raise SystemExit(0)", "raised SystemExit: 0 at .*"),
        ("    raise KeyboardInterrupt", "raised KeyboardInterrupt"),
        ("    return float('nan')", r"returned nan for the prompt 'q'"),
        ("    return float('inf')", "returned inf"),
        ("    return 'high'", "returned a str, not a number"),
        ("    return None", "returned a NoneType, not a number"),
        ("    return {'score': 1.0}", "returned a dict, not a number"),
    ],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_reward_that_fails_is_one_line(
    make_settings, code, kind: str, body: str, message: str
) -> None:  # type: ignore[no-untyped-def]
    name = code(f"{kind} score(args, sample):\n{body}\n")
    with pytest.raises(RewardError, match=message) as caught:
        reward(make_settings, [sample(prompt="q")], rm_type=None, custom_rm_path=f"{name}.score")
    assert "\n" not in str(caught.value)
    assert caught.value.blame == "user"


def test_paths_that_lead_nowhere(code) -> None:  # type: ignore[no-untyped-def]
    name = code("import missing_library\n")
    other = code("1 / 0\n")
    third = code("score = 3\n")
    cases = [
        (f"{name}.score", RewardError, "no module named 'missing_library'"),
        (
            f"{other}.score",
            RewardError,
            r"importing .* raised ZeroDivisionError: division by zero at .*:1",
        ),
        (f"{third}.score", RewardError, "has no function 'score'"),
        ("nowhere.score", RewardError, "no module named 'nowhere'"),
        ("score", ConfigError, "has no module"),
    ]
    for path, kind, message in cases:
        with pytest.raises(kind, match=message):
            find_reward(rm_type=None, custom_rm_path=path)


def test_one_reward_must_be_named() -> None:
    for rm_type, path in ((None, None), ("f1", "a.b")):
        with pytest.raises(ConfigError, match="one of rm_type and custom_rm_path"):
            find_reward(rm_type=rm_type, custom_rm_path=path)
    with pytest.raises(ConfigError, match="'f2' is no built-in reward; there are exact_match"):
        find_reward(rm_type="f2", custom_rm_path=None)


def test_metadata_may_name_another_reward(make_settings) -> None:  # type: ignore[no-untyped-def]
    samples = [sample("a 7", "7"), sample("a 7", "7", metadata={"rm_type": "gsm8k"})]
    assert reward(make_settings, samples, rm_type="exact_match") == [0.0, 1.0]


def test_a_blocked_reward_does_not_hold_the_process(make_settings, code) -> None:  # type: ignore[no-untyped-def]
    name = code("import asyncio\nasync def score(args, sample):\n    await asyncio.sleep(3600)\n")
    with Rewarder(make_settings(rm_type=None, custom_rm_path=f"{name}.score")) as rewarder:
        future = rewarder.submit([sample()])
        time.sleep(0.1)
    assert future.cancelled() or future.done()


def test_rewards_are_finite_numbers() -> None:
    for function in BUILT_IN.values():
        assert math.isfinite(function(None, sample("x", np.int64(3))))
