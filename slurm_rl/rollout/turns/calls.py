"""Tool calls in an answer: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number.

The form that Hermes and Qwen models are taught. Pure. What looks like a call and is none is
a `BadCall`, which is answered to the model: it learns from that, a crash teaches nobody.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THINK, _THOUGHT = "<think>", "</think>"
_DECODER = json.JSONDecoder(strict=False)  # models write line breaks inside texts


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call. Example: `ToolCall("calculator", {"expression": "1 + 1"})`."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BadCall:
    """Something that was meant as a call; `problem` is written for the model."""

    problem: str


def parse_calls(text: str) -> list[ToolCall | BadCall]:
    """The calls of an answer in their order. What the model only thinks calls nothing."""
    _, thought, after = text.rpartition(_THOUGHT)
    if not thought and _THINK in text:
        return []
    calls: list[ToolCall | BadCall] = []
    at = after.find(_OPEN)
    while at >= 0:
        call, at = _parse_call(after, at + len(_OPEN))
        calls.append(call)
        at = after.find(_OPEN, at)
    return calls


def _parse_call(text: str, start: int) -> tuple[ToolCall | BadCall, int]:
    """The call that begins at `start`, and where to go on."""
    while start < len(text) and text[start].isspace():
        start += 1
    try:
        # Read as JSON, not cut at the closing tag: an argument may hold that very text.
        value, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        return BadCall(f"the call is not JSON ({_reason(error)})"), start
    rest = text[end:].lstrip()
    if not rest.startswith(_CLOSE):
        return BadCall(f"there is no {_CLOSE} behind the call"), end
    return _read_call(value), end


def _read_call(value: Any) -> ToolCall | BadCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return BadCall('a call is an object with "name" and "arguments"')
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):  # the form of a well-known interface: JSON in a text
        try:
            arguments = _DECODER.decode(arguments)
        except (ValueError, RecursionError) as error:
            return BadCall(f'"arguments" is not JSON ({_reason(error)})')
    if not isinstance(arguments, dict):
        return BadCall('"arguments" must be an object')
    return ToolCall(value["name"], arguments)


def _reason(error: Exception) -> str:
    return error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
