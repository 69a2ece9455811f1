"""Dynamic filters of the user's: what they may do to a rollout, which is answer and nothing else."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toy.rollouts import Shard, Slow

from slurm_rl.config.schema import Settings
from slurm_rl.errors import RewardError
from slurm_rl.rollout.filters import open_filter
from slurm_rl.rollout.samples import Sample

Code = Callable[[str], str]
Build = Callable[..., Settings]


def make_group(num: int = 2) -> list[Sample]:
    return [
        Sample(
            4, k, (1,), (2,), (0.0,), (1,), prompt=["q"], label={"a": 1}, reward=1.0,
            metadata={"deep": [1]},
        )
        for k in range(num)
    ]  # fmt: skip


@pytest.fixture
def ask(code: Code, make_settings: Build) -> Callable[..., Any]:
    """What a module's `keep` says of a group; `ticks` is how often the loop took turns."""

    def go(text: str, *, group: list[Sample] | None = None, **rollout: Any) -> tuple[bool, str]:
        path = f"{code(text)}.keep"
        settings = make_settings(dynamic_sampling_filter_path=path, **rollout)
        go.ticks = 0  # type: ignore[attr-defined]

        async def tick() -> None:
            while True:
                await asyncio.sleep(0.01)
                go.ticks += 1  # type: ignore[attr-defined]

        async def run() -> tuple[bool, str]:
            ticking = asyncio.create_task(tick())
            try:
                with open_filter(settings) as keep:
                    assert keep is not None
                    return await keep(make_group() if group is None else group)
            finally:
                ticking.cancel()

        return asyncio.run(run())

    return go


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("True", (True, "")),
        ("False", (False, "filtered")),
        ("(False, 'too\\neasy')", (False, "too easy")),
        ("(True, 'ignored')", (True, "")),
        ("types.SimpleNamespace(keep=False, reason='same')", (False, "same")),
        ("numpy.bool_(False)", (False, "filtered")),
        ("(numpy.bool_(True), None)", (True, "")),
        ("group[0].reward > 0 and args.rollout_batch_size > 0", (True, "")),
    ],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_what_counts_as_an_answer(ask, kind: str, answer: str, said: tuple[bool, str]) -> None:  # type: ignore[no-untyped-def]
    assert ask(f"import numpy, types\n{kind} keep(args, group):\n    return {answer}\n") == said


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("return None", "returned None; return True or False"),
        ("return 1", "returned 1;"),
        ("return 'x' * 1000", "returned 'xxx"),
        ("return (True, 'a', 'b')", r"returned \(True"),
        ("return Odd()", "returned a Odd; return"),
        ("raise ValueError('one\\ntwo')", r"raised ValueError: one two at .*\.py:\d+"),
        ("raise SystemExit(3)", "raised SystemExit: 3 at"),
        ("raise KeyboardInterrupt", "raised KeyboardInterrupt at"),
        ("raise Mute()", r"raised Mute: \(its own text cannot be had: ZeroDivisionError\)"),
        ("return (False, Mute())", "returned what raised ZeroDivisionError"),
    ],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_whatever_is_wrong_is_one_line(ask, kind: str, line: str, problem: str) -> None:  # type: ignore[no-untyped-def]
    text = (
        "class Odd:\n    def __repr__(self): 1 / 0\n"
        "class Mute(Exception):\n    def __str__(self): return str(1 / 0)\n"
        f"{kind} keep(args, group):\n    {line}\n"
    )
    with pytest.raises(RewardError, match=problem) as caught:
        ask(text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert caught.value.message.startswith("filter keep (")


HANGS = {
    "sleeps": "import time\ndef keep(args, group):\n    time.sleep(3600)\n",
    "waits": "import asyncio\nasync def keep(args, group):\n    await asyncio.sleep(3600)\n",
    "blocks": "import time\nasync def keep(args, group):\n    time.sleep(3600)\n",
}


@pytest.mark.parametrize("kind", sorted(HANGS))
def test_one_that_hangs_does_not_hold_the_loop(ask, kind: str) -> None:  # type: ignore[no-untyped-def]
    began = time.monotonic()
    with pytest.raises(RewardError, match=r"filter keep \(.*\) took longer than 0.5 s .*'q'"):
        ask(HANGS[kind], reward_timeout_s=0.5)
    assert time.monotonic() - began < 60
    assert ask.ticks > 5, "the loop stood still meanwhile"


def test_a_rollout_ends_by_it(code: Code, make_settings: Build, tmp_path: Path) -> None:
    """In the pipeline: the engine goes on meanwhile, and the whole ends with the one line."""
    path = f"{code(HANGS['sleeps'])}.keep"
    settings = make_settings(dynamic_sampling_filter_path=path, reward_timeout_s=0.5)
    engine = Slow(seed=1)
    with open_filter(settings) as keep:
        shard = Shard(tmp_path, settings, keep=keep, engine=engine)
        with pytest.raises(RewardError, match=r"filter keep .* took longer than 0\.5 s"):
            asyncio.run(asyncio.wait_for(shard.run(), 30))
    assert len(engine.made) > 1


def test_it_gets_copies(ask) -> None:  # type: ignore[no-untyped-def]
    group = make_group()
    before = copy.deepcopy(group)
    text = (
        "def keep(args, group):\n"
        "    group[0].metadata['deep'].append(2); group[1].metadata['x'] = {1}\n"
        "    group[0].prompt.clear(); group[0].label['a'] = 9; group.clear()\n"
        "    return True\n"
    )
    assert ask(text, group=group) == (True, "")
    assert group == before


def test_settings_without_one(make_settings: Build) -> None:
    with open_filter(make_settings()) as keep:
        assert keep is None
    with open_filter(make_settings(dynamic_sampling_filter_path="nonzero_std")) as keep:
        assert keep is not None
        assert asyncio.run(keep(make_group())) == (False, "zero_std_1")
