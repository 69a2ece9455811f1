"""The teacher's likeliest tokens, against the vocabularies that are there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_rl.config.schema import Settings
from slurm_rl.config.teacher_preflight import check_likeliest

Load = Callable[..., Settings]


@pytest.fixture
def lines(load: Load, tmp_path: Path) -> Callable[..., list[str]]:
    def of(num: int, *, teacher: Any, policy: Any, **more: Any) -> list[str]:
        for name, size in (("teacher", teacher), ("policy", policy)):
            (tmp_path / name).mkdir()
            if size is not None:
                (tmp_path / name / "config.json").write_text(json.dumps(size))
        section = {"hf_checkpoint": str(tmp_path / "teacher"), "top_logprobs_num": num}
        values = {"hf_checkpoint": str(tmp_path / "policy"), "teacher": section} | more
        found = check_likeliest(load(**values))
        return [problem.render({(): "f"}).removeprefix("f: ") for problem in found]

    return of


@pytest.mark.parametrize(
    ("teacher", "policy", "most", "whose"),
    [
        ({"vocab_size": 10}, {"vocab_size": 12}, 10, "teacher"),
        ({"vocab_size": 12}, {"vocab_size": 9}, 9, "policy"),
        ({"vocab_size": 12}, None, 12, "teacher"),
        (None, {"vocab_size": 9}, 9, "policy"),
        ([], {"vocab_size": 9}, 9, "policy"),
        ({"vocab_size": True}, {"vocab_size": 9}, 9, "policy"),
    ],
)
@pytest.mark.parametrize("above", [0, 1])
def test_there_must_be_as_many(
    lines: Callable[..., list[str]], teacher: Any, policy: Any, most: int, whose: str, above: int
) -> None:
    num = most + above
    line = (
        f"teacher.top_logprobs_num = {num} is more than the {most} tokens of the {whose}'s"
        " vocabulary; lower it: some tens are usual"
    )
    assert lines(num, teacher=teacher, policy=policy) == [line] * above


def test_what_is_not_known_is_not_judged(lines: Callable[..., list[str]]) -> None:
    assert lines(10**6, teacher=None, policy={}) == []


def test_a_model_that_is_made_has_its_characters(lines: Callable[..., list[str]]) -> None:
    made = {"hf_checkpoint": None, "init_model": {"characters": "abc", "config": {}}}
    (line,) = lines(7, teacher={"vocab_size": 50}, policy=None, **made)
    assert "= 7 is more than the 6 tokens of the policy's" in line
