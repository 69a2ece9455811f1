"""Environments: where they come from, and the loop that talks to one.

An environment is a new object for each conversation. `rollout.environment` names a class or a
function that makes one, by dotted path; it is called with `args` if it has a parameter of that
name. One that makes an environment of the library `verifiers` is called once, and each
conversation gets an adapter on the same object. `reasoning_gym` is built in.

Ends with `completed` where the environment says so; with `truncated` where turns or tokens ran
out, or an observation would leave the model no room. The reward is the last that the
environment gave; one that gave none leaves it to `rm_type` and its like.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import numbers
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from slurm_rl.config.schema import Settings
from slurm_rl.errors import RewardError, SlurmRlError, Stopped
from slurm_rl.rollout.plain_json import NotPlain, copy_object, copy_plain
from slurm_rl.rollout.rewards import describe, import_function
from slurm_rl.rollout.samples import Sample
from slurm_rl.rollout.turns.conversation import Conversation
from slurm_rl.rollout.turns.protocol import Environment, Said, Step
from slurm_rl.rollout.turns.reasoning import ReasoningGym
from slurm_rl.rollout.turns.user_code import as_coroutine, call_user
from slurm_rl.rollout.turns.verifiers import VerifiersEnvironment, is_verifiers
from slurm_rl.rollout.user_errors import say_error, show_value

_FIELD = "rollout.environment"


def find_environment(settings: Settings, args: SimpleNamespace) -> Callable[[], Environment]:
    """What makes the environment of a conversation. RewardError for a path that leads nowhere."""
    name = settings.rollout.environment
    assert name is not None
    if name == "reasoning_gym":
        return ReasoningGym
    factory = import_function(name, field=_FIELD)
    first = _make(factory, args)
    if is_verifiers(first):
        return lambda: VerifiersEnvironment(first)
    spare = [first]
    return lambda: spare.pop() if spare else _make(factory, args)


async def run_environment(
    conversation: Conversation, make: Callable[[], Environment]
) -> list[Sample]:
    """One conversation; raises what the engine raises, and RewardError for the user's code."""
    environment = make()
    try:
        return [await _converse(conversation, environment)]
    finally:
        close = getattr(environment, "close", None)
        if close is not None:
            await _ask(conversation, close)


async def _converse(conversation: Conversation, environment: Environment) -> Sample:
    # A copy: samples of a group share what they have from their row.
    prompt = copy.deepcopy(conversation.group.visit.prompt)
    begun = await _ask(conversation, environment.reset, prompt, conversation.session.seed)
    begun = None if begun is None else _check_said(begun, environment.reset, "prompt")
    own = None if begun is None else conversation.template.encode_prompt(begun)
    talk = conversation.open(own)
    if own is not None and conversation.session.room(own) < 1:
        raise RewardError(
            f"{_FIELD}: {describe(environment.reset)} gave a prompt of {len(own)} tokens, which"
            f" leaves no room in a context of {conversation.session.limits.context}",
            hint="shorten it, or raise rollout.rollout_max_context_len",
        )
    status, reward = "truncated", None
    info: dict[str, Any] = {}
    max_turns = conversation.settings.rollout.max_turns
    for turn in range(max_turns):
        said = await talk.say()
        if not said.tokens or said.finish == "abort":
            break
        # An answer that was cut short is judged too, as it is where there is one turn.
        step = await _step(conversation, environment, said.text)
        reward = reward if step.reward is None else float(step.reward)
        info |= step.info
        if step.done or said.finish != "stop":
            status = "completed" if said.finish == "stop" else "truncated"
            break
        if turn + 1 == max_turns or not talk.add_messages(step.observation):
            break
    if hasattr(environment, "score") and not conversation.session.aborted:
        reward = await _score(conversation, environment)
    notes = {"environment": info} if info else {}
    fields = {} if begun is None else {"prompt": begun}
    return conversation.finish(talk, status=status, reward=reward, notes=notes, **fields)


async def _ask(conversation: Conversation, function: Callable[..., Any], *args: Any) -> Any:
    """What a method of the user's gives; a plain one runs in a thread, beside others."""
    timeout_s = conversation.settings.rollout.reward_timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            return await call_user(as_coroutine(function), *args, field=_FIELD)
    except TimeoutError as error:
        raise RewardError(
            f"{_FIELD}: {describe(function)} gave no answer within"
            f" rollout.reward_timeout_s = {timeout_s:g} s"
        ) from error


async def _score(conversation: Conversation, environment: Any) -> float | None:
    value = await _ask(conversation, environment.score)
    if value is None or _is_finite(value):
        return None if value is None else float(value)
    raise RewardError(
        f"{_FIELD}: {describe(environment.score)} gave the reward {show_value(value)}",
        hint="return a finite number or None",
    )


async def _step(conversation: Conversation, environment: Environment, response: str) -> Step:
    step = await _ask(conversation, environment.step, response)
    missing = [n for n in ("observation", "done", "reward", "info") if not hasattr(step, n)]
    if missing:
        problem = f"returned a {type(step).__name__}, not a Step"
    elif step.reward is not None and not _is_finite(step.reward):
        problem = f"gave the reward {show_value(step.reward)}"
    else:
        said = _check_said(step.observation, environment.step, "observation")
        info = _check_plain(step.info or {}, environment.step, "info", copies=copy_object)
        return Step(said, bool(step.done), step.reward, info)
    raise RewardError(
        f"{_FIELD}: {describe(environment.step)} {problem}",
        hint="return Step(observation, done, reward, info); the reward is a finite number or None",
    )


def _check_said(value: Any, function: Callable[..., Any], name: str) -> Said:
    """What an environment says: a text, or messages that are plain JSON."""
    said = _check_plain("" if value is None else value, function, name)
    is_list = isinstance(said, list) and all(isinstance(message, dict) for message in said)
    if isinstance(said, str) or is_list:
        return said  # type: ignore[no-any-return]
    raise RewardError(
        f"{_FIELD}: {describe(function)} gave as {name} a {type(value).__name__}",
        hint="give a text, or a list of messages",
    )


def _check_plain(
    value: Any,
    function: Callable[..., Any],
    name: str,
    *,
    copies: Callable[..., Any] = copy_plain,
) -> Any:
    try:
        return copies(value, name=name)
    except NotPlain as problem:
        raise RewardError(
            f"{_FIELD}: {describe(function)} gave what cannot be kept: {problem}",
            hint="give texts, finite numbers, lists and objects",
        ) from None


def _is_finite(value: Any) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)


def _make(factory: Callable[..., Any], args: SimpleNamespace) -> Any:
    try:
        takes_args = "args" in inspect.signature(factory).parameters
        made = factory(args=args) if takes_args else factory()
    except (SlurmRlError, Stopped):
        raise
    except BaseException as error:  # the user's code, `sys.exit` too
        raise RewardError(f"{_FIELD}: {describe(factory)} raised {say_error(error)}") from error
    if not is_verifiers(made) and not (hasattr(made, "reset") and hasattr(made, "step")):
        raise RewardError(
            f"{_FIELD}: {describe(factory)} made a {type(made).__name__},"
            " which has no reset and step",
            hint="see docs/rollout.md, Several turns",
        )
    return made
