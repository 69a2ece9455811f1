"""Calls out of a model's text; the round trip with an independent writer."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_rl.rollout.turns.calls import BadCall, ToolCall, parse_calls

values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
arguments = st.dictionaries(st.text(min_size=1, max_size=8), values, max_size=4)
#: Text around calls: no tag of its own.
chatter = st.text(max_size=30).filter(lambda text: "<" not in text)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(chatter, st.text(min_size=1, max_size=10), arguments, st.booleans()), max_size=4
    ),
    chatter,
)
def test_what_was_written_is_found(calls: list[Any], tail: str) -> None:
    text = ""
    for before, name, given_arguments, in_text in calls:
        value = json.dumps(given_arguments) if in_text else given_arguments
        body = json.dumps({"name": name, "arguments": value})
        text += f"{before}<tool_call>\n{body}\n</tool_call>"
    assert parse_calls(text + tail) == [ToolCall(name, args) for _, name, args, _ in calls]


def test_an_argument_may_hold_the_tags_and_line_breaks() -> None:
    code = "print('</tool_call>')\nprint('<tool_call>')"
    body = '{"name": "python", "arguments": {"code": "' + code.replace("\n", "\n") + '"}}'
    text = f'<tool_call>{body}</tool_call><tool_call>{{"name": "b"}}</tool_call>'
    assert parse_calls(text) == [ToolCall("python", {"code": code}), ToolCall("b", {})]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>calculator(1)</tool_call>", "the call is not JSON"),
        ("<tool_call>", "the call is not JSON"),
        ('<tool_call>{"name": "a", "arguments": {}}', "there is no </tool_call>"),
        ('<tool_call>{"name": "a"} {"name": "b"}</tool_call>', "there is no </tool_call>"),
        ('<tool_call>{"arguments": {}}</tool_call>', 'an object with "name"'),
        ('<tool_call>{"name": 3}</tool_call>', 'an object with "name"'),
        ("<tool_call>[1]</tool_call>", 'an object with "name"'),
        ('<tool_call>{"name": "a", "arguments": [1]}</tool_call>', "must be an object"),
        ('<tool_call>{"name": "a", "arguments": "{"}</tool_call>', '"arguments" is not JSON'),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not JSON"),
        (
            '<tool_call>{"name": "a", "arguments": {"n": ' + "9" * 5000 + "}}</tool_call>",
            "not JSON",
        ),
    ],
)
def test_what_is_no_call_is_explained(text: str, problem: str) -> None:
    (found,) = parse_calls(text)
    assert isinstance(found, BadCall)
    assert problem in found.problem


def test_a_bad_call_does_not_hide_a_good_one() -> None:
    found = parse_calls('<tool_call>{bad}</tool_call> and <tool_call>{"name": "a"}</tool_call>')
    assert [type(call) for call in found] == [BadCall, ToolCall]


def test_thoughts_call_nothing() -> None:
    call = '<tool_call>{"name": "a"}</tool_call>'
    assert parse_calls(f"<think>maybe {call}") == []
    assert parse_calls(f"<think>maybe {call}</think>no") == []
    assert parse_calls(f"maybe {call}</think>{call}") == [ToolCall("a", {})]


@settings(deadline=None)
@given(st.text(alphabet='<tool_cal>/{}"name:,arguments[] think', max_size=120))
def test_any_text_is_parsed(text: str) -> None:
    parse_calls(text)
