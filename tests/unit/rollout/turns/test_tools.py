"""Tools: what they say of themselves, one call, and the loop around the model."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_rl.config.schema import Settings
from slurm_rl.errors import ConfigError, RewardError
from slurm_rl.rollout.samples import Sample
from slurm_rl.rollout.turns import make_generate, tool_schemas
from slurm_rl.rollout.turns.calls import BadCall, ToolCall
from slurm_rl.rollout.turns.tools import answer_calls, cut_text, find_tools, render_run

WEATHER = '''
import asyncio, time
from typing import Literal, Optional

async def weather(args, city: str, days: int = 1, unit: Literal["C", "F"] = "C",
                  names: Optional[list[str]] = None) -> str:
    """What the sky does.

    More that no model needs.
    """
    return f"{city} {days} {unit} {names} {args.n_samples_per_prompt}"

def slow(args, seconds: float) -> str:
    time.sleep(seconds)
    return f"slept in {__import__('threading').current_thread().name}"

def broken(args) -> str:
    return 1 / 0

def silent(args) -> str:
    return None

def forever(args) -> str:
    time.sleep(3600)

async def leaves(args) -> str:
    raise SystemExit(3)
'''


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@dataclass
class Run:
    """As the sandbox's result."""

    status: str
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.1


def answers(settings: Settings, calls: list[Any], **options: Any) -> list[str]:
    tools = find_tools(settings, run_python=options.pop("run_python", None))
    options = {"args": settings.rollout, "max_characters": 1000, "timeout_s": 5.0} | options
    messages = asyncio.run(answer_calls(calls, tools, **options))
    assert all(message["role"] == "tool" for message in messages)
    return [message["content"] for message in messages]


def test_schemas_for_the_template(turn_settings, code) -> None:  # type: ignore[no-untyped-def]
    name = code(WEATHER)
    settings = turn_settings(tools=["calculator", f"{name}.weather", "python"])
    calculator, weather, python = tool_schemas(settings)
    assert [s["function"]["name"] for s in (calculator, weather, python)] == [
        "calculator",
        "weather",
        "python",
    ]
    assert weather["function"]["description"] == "What the sky does."
    assert weather["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["C", "F"]},
            "names": {"type": ["array", "null"]},
        },
        "required": ["city"],
        "additionalProperties": False,
    }
    assert tool_schemas(turn_settings()) == []


def test_a_schema_of_the_users_own_wins(turn_settings, code) -> None:  # type: ignore[no-untyped-def]
    name = code(
        "def f(args, **arguments):\n    return str(arguments)\n"
        "f.schema = {'name': 'g', 'parameters': {'type': 'object', 'properties': {'n': {'type': 'number'}}}}\n"
    )
    settings = turn_settings(tools=[f"{name}.f"])
    assert tool_schemas(settings)[0]["function"]["name"] == "g"
    assert answers(settings, [ToolCall("g", {"n": 1.5, "m": 2})]) == ["{'n': 1.5, 'm': 2}"]


@pytest.mark.parametrize(
    ("text", "kind", "problem"),
    [
        ("def f(args, *rest):\n    pass\n", RewardError, r"what \*rest takes is not known"),
        ("def f():\n    pass\n", RewardError, "first parameter is `args`"),
        ("def f(args, x: 'Missing'):\n    pass\n", RewardError, "signature cannot be read"),
        (
            "def f(args):\n    pass\nf.schema = {'parameters': {}}\n",
            RewardError,
            "schema has no name",
        ),
        (
            "def f(args):\n    pass\nf.schema = {'name': 'f'}\n",
            RewardError,
            "schema has no parameters",
        ),
        ("def f(args):\n    pass\nf.schema = 3\n", RewardError, "schema has no name"),
        ("1 / 0\n", RewardError, "ZeroDivisionError"),
        ("g = 3\n", RewardError, "f"),
    ],
)
def test_tools_that_cannot_be_one(turn_settings, code, text: str, kind: Any, problem: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises((kind, ConfigError), match=problem):
        find_tools(turn_settings(tools=[f"{code(text)}.f"]))


def test_two_tools_of_one_name(turn_settings, code) -> None:  # type: ignore[no-untyped-def]
    name = code("def calculator(args) -> str:\n    return ''\n")
    with pytest.raises(RewardError, match="two tools are called 'calculator'"):
        find_tools(turn_settings(tools=["calculator", f"{name}.calculator"]))


def test_calls_and_what_the_model_is_told(turn_settings, code) -> None:  # type: ignore[no-untyped-def]
    name = code(WEATHER)
    settings = turn_settings(tools=["calculator", f"{name}.weather"])
    cases = {
        "7": ToolCall("calculator", {"expression": "1 + 2 * 3"}),
        "Error: division by zero": ToolCall("calculator", {"expression": "1/0"}),
        "Error: the argument 'expression' is missing": ToolCall("calculator", {}),
        "Error: there is no argument 'x'; there are expression": ToolCall(
            "calculator", {"expression": "1", "x": 2}
        ),
        "Error: the argument 'expression' must be of the type string": ToolCall(
            "calculator", {"expression": 7}
        ),
        "Bonn 2 F ['a'] 4": ToolCall(
            "weather", {"city": "Bonn", "days": 2, "unit": "F", "names": ["a"]}
        ),
        "Error: the argument 'unit' must be one of 'C', 'F'": ToolCall(
            "weather", {"city": "Bonn", "unit": "K"}
        ),
        "Error: the argument 'days' must be of the type integer": ToolCall(
            "weather", {"city": "Bonn", "days": True}
        ),
        "Error: there is no tool 'google'; there are calculator, weather": ToolCall("google", {}),
        "Error: it is odd": BadCall("it is odd"),
    }
    assert answers(settings, list(cases.values())) == list(cases)


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        (
            "broken",
            {},
            r"rollout.tools: broken \(.*py:\d+\) raised ZeroDivisionError: division by zero at .*mycode.*py:18",
        ),
        ("silent", {}, "silent .* returned a NoneType; a tool returns a text"),
        ("leaves", {}, "raised SystemExit: 3 at .*mycode"),
        ("forever", {}, "forever .* gave no answer within rollout.reward_timeout_s = 0.2 s"),
    ],
)
def test_a_users_tool_that_fails_is_one_line(
    turn_settings, code, name: str, arguments: Any, problem: str
) -> None:  # type: ignore[no-untyped-def]
    settings = turn_settings(tools=[f"{code(WEATHER)}.{name}"])
    with pytest.raises(RewardError, match=problem) as caught:
        answers(settings, [ToolCall(name, arguments)], timeout_s=0.2)
    assert "\n" not in str(caught.value)


def test_calls_of_one_answer_run_at_the_same_time(turn_settings, code) -> None:  # type: ignore[no-untyped-def]
    settings = turn_settings(tools=[f"{code(WEATHER)}.slow", "calculator"])
    began = time.monotonic()
    calls = [ToolCall("slow", {"seconds": 0.4})] * 8
    found = answers(settings, [*calls, ToolCall("calculator", {"expression": "1"})])
    assert time.monotonic() - began < 3.0, "in turn they take 3.2 s"
    assert found == ["slept in tool"] * 8 + ["1"]


def test_too_many_calls_are_not_made(turn_settings) -> None:  # type: ignore[no-untyped-def]
    calls = [ToolCall("calculator", {"expression": str(i)}) for i in range(18)]
    found = answers(turn_settings(tools=["calculator"]), calls)
    assert found == [*map(str, range(16)), *["Error: an answer may call 16 tools"] * 2]


def test_python_gets_its_limits_and_says_how_it_ended(turn_settings) -> None:  # type: ignore[no-untyped-def]
    settings = turn_settings(tools=["python"], sandbox={"timeout_s": 3.5})
    seen = []

    async def run_python(source: str, *, limits: Any) -> Run:
        seen.append((source, limits))
        return Run("ok", "42\n")

    found = answers(settings, [ToolCall("python", {"code": "print(42)"})], run_python=run_python)
    assert found == ["42"]
    assert seen == [("print(42)", settings.rollout.sandbox)]
    assert render_run(Run("error", "a\n", "Traceback\n")) == "a\nTraceback\nError: error"
    assert render_run(Run("timeout")) == "Error: timeout"
    assert render_run(Run("ok")) == "(nothing was printed)"


@settings(deadline=None)
@given(st.text(max_size=300), st.integers(1, 120))
def test_a_long_answer_keeps_both_ends(text: str, limit: int) -> None:
    cut = cut_text(text, max_characters=limit)
    assert len(cut) <= limit
    assert text == cut or len(text) > limit
    assert cut[:1] == text[:1]
    if limit > 60 and len(text) > limit:
        assert cut[-1] == text[-1]
        assert "characters left out" in cut


# -- the loop -------------------------------------------------------------------------------------


def run_group(
    settings: Settings, engine: Any, group: Any, *, served: Any, chat: Any
) -> list[Sample]:
    generate = make_generate(settings, engine=engine, tokenizer=chat, weights=served)
    assert generate is not None
    return asyncio.run(generate(group))  # type: ignore[arg-type]


def spans(sample: Sample) -> list[tuple[int, list[int]]]:
    """Runs of equal mask, and their tokens."""
    runs: list[tuple[int, list[int]]] = []
    for token, mask in zip(sample.response_tokens, sample.loss_mask, strict=True):
        if not runs or runs[-1][0] != mask:
            runs.append((mask, []))
        runs[-1][1].append(token)
    return runs


def test_a_conversation_with_tools_is_one_sample(
    turn_settings, scripted, make_group, served, chat
) -> None:  # type: ignore[no-untyped-def]
    said = [
        call("calculator", expression="6 * 7") + call("calculator", expression="1 +"),
        "the answer is 42",
    ]
    engine = scripted(lambda session, turn, request: said[turn])
    group = make_group(num=1, metadata={"source": "x"})
    (sample,) = run_group(
        turn_settings(tools=["calculator"]), engine, group, served=served, chat=chat
    )
    runs = spans(sample)
    assert [mask for mask, _ in runs] == [1, 0, 1]
    completions = engine.said["5/0"]
    assert [tuple(tokens) for mask, tokens in runs if mask] == [c.tokens for c in completions]
    expected = [lp for c in completions for lp in c.logprobs]
    found = zip(sample.rollout_logprobs, sample.loss_mask, strict=True)
    assert [lp for lp, mask in found if mask] == expected
    assert all(
        lp == 0.0 for lp, m in zip(sample.rollout_logprobs, sample.loss_mask, strict=True) if not m
    )
    assert chat.decode(runs[1][1]) == (
        "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>tool\n"
        "Error: not an expression: invalid syntax<|im_end|>\n<|im_start|>assistant\n"
    )
    assert engine.asked[1][0].prompt_tokens == (*sample.prompt_tokens, *runs[0][1], *runs[1][1])
    assert (sample.status, sample.response, sample.reward) == (
        "completed",
        "the answer is 42",
        None,
    )
    assert (sample.rollout_index, sample.sample_index, sample.group_index) == (0, 0, 5)
    assert (sample.weights_version, sample.seed, sample.label) == (3, 100, "7")
    assert sample.metadata["source"] == "x"
    assert sample.metadata["num_tool_calls"] == 2
    assert [m["role"] for m in sample.metadata["messages"]] == [
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    assert group.visit.prompt.metadata == {"source": "x"}


def test_turns_end_where_the_setting_says(
    turn_settings, scripted, make_group, served, chat
) -> None:  # type: ignore[no-untyped-def]
    engine = scripted(lambda *_: call("calculator", expression="1"))
    settings = turn_settings(tools=["calculator"], max_turns=3)
    (sample,) = run_group(settings, engine, make_group(num=1), served=served, chat=chat)
    assert len(engine.asked) == 3
    assert sample.status == "truncated"
    assert sample.loss_mask[-1] == 1  # the last call is not answered: nobody would read it
    assert sample.metadata["num_tool_calls"] == 2


@settings(deadline=None)
@given(limit=st.integers(1, 220), turns=st.integers(1, 5))
def test_tokens_of_tools_count_and_are_never_the_end(
    turn_maker: Callable[..., Settings], scripted, make_group, served, chat, limit: int, turns: int
) -> None:  # type: ignore[no-untyped-def]
    engine = scripted(lambda *_: call("calculator", expression="12 * 12"))
    settings = turn_maker(tools=["calculator"], max_turns=turns)
    (sample,) = run_group(
        settings, engine, make_group(num=1, limit=limit), served=served, chat=chat
    )
    assert 1 <= sample.response_length <= limit
    assert sample.loss_mask[-1] == 1
    assert sample.status == "truncated"
    spoken = [t for c in engine.said["5/0"] for t in c.tokens]
    assert [t for t, m in zip(sample.response_tokens, sample.loss_mask, strict=True) if m] == spoken


def test_no_limit_leaves_a_tail_that_nobody_read(
    turn_maker, scripted, make_group, served, chat
) -> None:  # type: ignore[no-untyped-def]
    """Every limit around the place where the first call's answer just fits."""
    settings = turn_maker(tools=["calculator"], max_turns=2)
    engine = scripted(lambda *_: call("calculator", expression="12"))
    group = make_group(num=1, limit=4000)
    (whole,) = run_group(settings, engine, group, served=served, chat=chat)
    first = len(engine.said["5/0"][0].tokens)
    fits = first + whole.loss_mask.count(0)
    for limit in range(first, fits + 3):
        engine = scripted(lambda *_: call("calculator", expression="12"))
        group = make_group(num=1, limit=limit)
        (sample,) = run_group(settings, engine, group, served=served, chat=chat)
        assert sample.response_length == (limit if limit > fits else first)
        assert sample.loss_mask[-1] == 1


words = st.lists(
    st.lists(
        st.sampled_from(["a", "b", "1", "2", "t", "h", "the", "e", " ", "ab", "12"]),
        min_size=1,
        max_size=8,
    ),
    min_size=1,
    max_size=4,
)


@settings(deadline=None)
@given(words)
def test_what_the_model_said_is_never_encoded_again(
    turn_maker, scripted, make_group, served, chat, turns: list[list[str]]
) -> None:  # type: ignore[no-untyped-def]
    """The model chooses token forms that no encoder would: they must stand as they were drawn."""
    ask = chat.encode(call("calculator", expression="1"), add_special_tokens=False)
    said = [[chat.convert_tokens_to_ids(piece) for piece in pieces] for pieces in turns]
    said = [
        [*tokens, *(ask if i + 1 < len(said) else []), chat.eos_token_id]
        for i, tokens in enumerate(said)
    ]
    engine = scripted(lambda session, turn, request: said[turn])
    settings = turn_maker(tools=["calculator"], max_turns=8)
    (sample,) = run_group(settings, engine, make_group(num=1, limit=4000), served=served, chat=chat)
    assert [tokens for mask, tokens in spans(sample) if mask] == said
    for (request, _), completion in zip(engine.asked, engine.said["5/0"], strict=True):
        whole = (*request.prompt_tokens, *completion.tokens)
        assert (*sample.prompt_tokens, *sample.response_tokens)[: len(whole)] == whole


def test_threads_of_tools_do_not_hold_the_process() -> None:
    from slurm_rl.rollout.turns.user_code import in_thread

    async def leave() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await in_thread(lambda: time.sleep(0.5))

    asyncio.run(leave())
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "tool")
    time.sleep(0.6)  # it ends after its loop, and must not raise there
