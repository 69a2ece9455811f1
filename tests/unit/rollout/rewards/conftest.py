from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from slurm_rl.config.schema import Settings
from slurm_rl.rollout.rewards import Graded, Grader
from slurm_rl.rollout.samples import Sample

Make = Callable[..., Sample]


def make_sample(response: str = "", label: object = "", **changes: Any) -> Sample:
    values: dict[str, Any] = {
        "prompt_tokens": (1,),
        "response_tokens": (2,),
        "rollout_logprobs": (0.0,),
        "loss_mask": (1,),
        "prompt": "q",
    }
    return Sample(0, 0, response=response, label=label, **(values | changes))


@pytest.fixture(name="sample")
def sample_maker() -> Make:
    return make_sample


@pytest.fixture
def make(make_settings: Callable[..., Settings]) -> Callable[..., Settings]:
    """Settings; `top__NAME` replaces a whole section beside `rollout`."""

    def build(**values: Any) -> Settings:
        top = {k.removeprefix("top__"): v for k, v in values.items() if k.startswith("top__")}
        own = {k: v for k, v in values.items() if not k.startswith("top__")}
        if own.get("custom_rm_path") or own.get("rewards"):
            own.setdefault("rm_type", None)
        return Settings.model_validate(make_settings(**own).model_dump() | top)

    return build


@pytest.fixture
def grade(make: Callable[..., Settings]) -> Callable[..., Graded]:
    """One group, graded on a loop of its own."""

    def run(samples: Sequence[Sample], *, options: Any = None, **values: Any) -> Graded:
        async def one() -> Graded:
            async with Grader(make(**values), **(options or {})) as grader:
                return await grader.grade(samples)

        return asyncio.run(one())

    return run
