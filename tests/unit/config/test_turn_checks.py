from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slurm_rl.config.schema import Settings

CHAT = {"rollout__apply_chat_template": True}


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {"rollout__tools": ["calculator"], "rollout__environment": "a.B", **CHAT},
            'rollout.environment = "a.B" is given beside tools; keep one of them',
        ),
        (
            {"rollout__custom_generate_function_path": "a.b", "rollout__tools": ["python"], **CHAT},
            'rollout.tools = ["python"] is given beside custom_generate_function_path; keep one of them',
        ),
        (
            {"rollout__tools": ["calculator"]},
            "rollout.apply_chat_template = false must be true with tools: the model hears of them"
            " through its chat template; set apply_chat_template: true",
        ),
        (
            {
                "rollout__tools": ["calculator"],
                "rollout__prompt_data": [
                    {"name": "a", "path": "/a.jsonl"},
                    {"name": "b", "path": "/b.jsonl", "apply_chat_template": False},
                ],
                **CHAT,
            },
            "rollout.prompt_data[1].apply_chat_template = false must be true with tools: the model"
            " hears of them through its chat template; take it out",
        ),
        (
            {
                "rollout__tools": ["calculator"],
                "eval": {"e": {"prompt_data": "/e.jsonl", "apply_chat_template": False}},
                **CHAT,
            },
            "eval.e.apply_chat_template = false must be true with tools: the model hears of them"
            " through its chat template; take it out",
        ),
        (
            {"rollout__tools": ["calculater"], **CHAT},
            'rollout.tools[0] = "calculater" is no built-in tool; there is calculator, python, or'
            " your own by dotted path; did you mean calculator?",
        ),
        (
            {"rollout__tools": ["python", "a.b", "python"], **CHAT},
            'rollout.tools[2] = "python" is there twice; take one out',
        ),
        (
            {"rollout__environment": "reasoning-gym"},
            'rollout.environment = "reasoning-gym" is no built-in environment; there is'
            " reasoning_gym, or your own by dotted path; did you mean reasoning_gym?",
        ),
        (
            {"rollout__custom_generate_function_path": "generate"},
            'rollout.custom_generate_function_path = "generate" is not a dotted path; write'
            " package.module.function",
        ),
        (
            {"rollout__max_turns": 3},
            "rollout.max_turns = 3 has no effect without tools or environment; take it out",
        ),
        (
            {"rollout__environment": "a.B", "rollout__generate_timeout_s": 9.0},
            "rollout.generate_timeout_s = 9.0 has no effect without custom_generate_function_path;"
            " take it out",
        ),
        (
            {"rollout__environment": "a.B", "rollout__max_tool_output_len": 3},
            "rollout.max_tool_output_len = 3 has no effect without tools; take it out",
        ),
        *(
            (
                {way: value, "rollout__partial_rollout": True, "rollout__close_at": 0.9, **CHAT},
                f"rollout.partial_rollout = true cannot be with {way[9:]}: a conversation that was"
                " cut off starts again; set partial_rollout: false",
            )
            for way, value in (
                ("rollout__tools", ["calculator"]),
                ("rollout__environment", "a.B"),
                ("rollout__custom_generate_function_path", "a.b"),
            )
        ),
    ],
)
def test_settings_that_cannot_be(
    complaints: Callable[..., list[str]], values: dict[str, Any], line: str
) -> None:
    assert line in complaints(**values)


@pytest.mark.parametrize(
    "values",
    [
        {
            "rollout__tools": ["calculator", "python", "my.tools.search"],
            "rollout__max_turns": 3,
            **CHAT,
        },
        {"rollout__environment": "reasoning_gym", "rollout__max_turns": 2},
        {"rollout__environment": "my.games.Chess"},
        {
            "rollout__custom_generate_function_path": "a.b",
            "rollout__max_turns": 2,
            "rollout__max_tool_output_len": 9,
            "rollout__generate_timeout_s": 9.0,
        },
    ],
)
def test_settings_that_can(load: Callable[..., Settings], values: dict[str, Any]) -> None:
    load(**values)
