"""The tools that a model may call: `calculator`, `python`, and the user's own by dotted path.

Owns finding them, and one call from checked arguments to the text that the model gets. What the
model did wrong is answered to it, as a text that begins with "Error"; what a user's tool did
wrong (anything but ToolError or ValueError) is a RewardError.

A user's tool is `function(args, **arguments) -> text`, plain or a coroutine; a plain one runs in a
thread, beside others. `function.schema` says what it takes, or its signature and docstring do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slurm_rl.config.schema import Settings
from slurm_rl.config.turn_checks import BUILT_IN_TOOLS
from slurm_rl.errors import RewardError
from slurm_rl.rollout.rewards import describe
from slurm_rl.rollout.turns.calculator import FUNCTIONS, calculate
from slurm_rl.rollout.turns.calls import BadCall, ToolCall
from slurm_rl.rollout.turns.schemas import check_arguments, make_schema, read_schema
from slurm_rl.rollout.turns.together import run_together
from slurm_rl.rollout.turns.user_code import as_coroutine, call_user
from slurm_rl.rollout.user_imports import import_function

_FIELD = "rollout.tools"
#: Calls of one answer that are made; further ones are answered with an error.
MAX_CALLS = 16

RunPython = Callable[..., Awaitable[Any]]


class ToolError(Exception):
    """What a tool raises to tell the model that it asked for something impossible."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool by its name in the schema. `run` takes `args` and the arguments of a call."""

    name: str
    schema: Mapping[str, Any]
    run: Callable[..., Any]


def tool_schemas(settings: Settings) -> list[dict[str, Any]]:
    """What the chat template is to be given as `tools` for every prompt; [] without tools."""
    return [dict(tool.schema) for tool in find_tools(settings).values()]


def find_tools(settings: Settings, *, run_python: RunPython | None = None) -> dict[str, Tool]:
    """The tools that `rollout.tools` names. RewardError for a user's that cannot be one.

    run_python: what runs the Python tool's code; by default the rollout's sandbox.
    """
    tools: dict[str, Tool] = {}
    for named in settings.rollout.tools:
        tool = _built_in(named, settings, run_python) or _users(named)
        if tool.name in tools:
            raise RewardError(
                f"{_FIELD}: two tools are called {tool.name!r}", hint="rename one in its schema"
            )
        tools[tool.name] = tool
    return tools


async def answer_calls(
    calls: list[ToolCall | BadCall],
    tools: Mapping[str, Tool],
    *,
    args: Any,
    max_characters: int,
    timeout_s: float,
) -> list[dict[str, Any]]:
    """A message of the role `tool` for each call, in their order; they run at the same time."""

    async def answer(number: int, call: ToolCall | BadCall) -> dict[str, Any]:
        if number >= MAX_CALLS:
            call = BadCall(f"an answer may call {MAX_CALLS} tools")
        name = call.name if isinstance(call, ToolCall) else "error"
        text = await _answer_call(call, tools, args=args, timeout_s=timeout_s)
        content = cut_text(text, max_characters=max_characters)
        return {"role": "tool", "name": name, "tool_call_id": f"call_{number}", "content": content}

    return await run_together(answer(i, call) for i, call in enumerate(calls))


def cut_text(text: str, *, max_characters: int) -> str:
    """`text` with its middle left out where it is too long: both ends are worth reading."""
    if len(text) <= max_characters:
        return text
    mark = f"\n… {len(text) - max_characters} characters left out …\n"
    kept = max_characters - len(mark)
    if kept < 2:
        return text[:max_characters]
    return text[: kept - kept // 2] + mark + text[len(text) - kept // 2 :]


async def _answer_call(
    call: ToolCall | BadCall, tools: Mapping[str, Tool], *, args: Any, timeout_s: float
) -> str:
    if isinstance(call, BadCall):
        return f"Error: {call.problem}"
    tool = tools.get(call.name)
    if tool is None:
        return f"Error: there is no tool {call.name!r}; there are {', '.join(tools)}"
    problem = check_arguments(tool.schema, call.arguments)
    if problem:
        return f"Error: {problem}"
    passes = (ToolError, ValueError)
    try:
        async with asyncio.timeout(timeout_s):
            value = await call_user(tool.run, args, field=_FIELD, passes=passes, **call.arguments)
    except passes as error:
        return f"Error: {error}"
    except TimeoutError as error:
        raise RewardError(
            f"{_FIELD}: {describe(tool.run)} gave no answer within"
            f" rollout.reward_timeout_s = {timeout_s:g} s"
        ) from error
    if not isinstance(value, str):
        raise RewardError(
            f"{_FIELD}: {describe(tool.run)} returned a {type(value).__name__}",
            hint="a tool returns a text",
        )
    return value


def _users(dotted: str) -> Tool:
    function = import_function(dotted, field=_FIELD)
    schema = read_schema(function, field=f"{_FIELD} = {dotted!r}")
    return Tool(schema["function"]["name"], schema, as_coroutine(function))


def _built_in(name: str, settings: Settings, run_python: RunPython | None) -> Tool | None:
    if name not in BUILT_IN_TOOLS:
        return None
    if name == "calculator":
        return Tool(name, _CALCULATOR, _run_calculator)

    async def run(args: Any, code: str) -> str:
        function = run_python or _sandbox()
        result = await function(code, limits=settings.rollout.sandbox)
        return render_run(result)

    return Tool(name, _PYTHON, run)


async def _run_calculator(args: Any, expression: str) -> str:
    return calculate(expression)


def _sandbox() -> RunPython:
    # Imported when it is first needed: most rollouts run no code.
    from slurm_rl.rollout.sandbox.runner import run_python

    return run_python


def render_run(result: Any) -> str:
    """What a run of code printed, and how it ended if not well. The time is left out: it varies."""
    parts = [result.stdout.rstrip("\n"), result.stderr.rstrip("\n")]
    if result.status != "ok":
        parts.append(f"Error: {result.status}")
    return "\n".join(part for part in parts if part) or "(nothing was printed)"


_CALCULATOR = make_schema(
    "calculator",
    f"Compute an arithmetic expression. Operators: + - * / // % ** and parentheses. Functions:"
    f" {', '.join(FUNCTIONS)}.",
    {"expression": {"type": "string", "description": "For example (3 + 4) * 2 ** 10."}},
    ["expression"],
)
_PYTHON = make_schema(
    "python",
    "Run a Python program and return what it prints. Every call starts afresh.",
    {"code": {"type": "string", "description": "The program; print what you want to see."}},
    ["code"],
)
