"""Environments: where they come from, and the loop that talks to one.

An environment is a new object for each conversation. `rollout.environment` names a class or a
function that makes one, by dotted path; it is called with `args` if it has a parameter of that
name. One that makes an environment of the library `verifiers` is called once, and each
conversation gets an adapter on the same object. `reasoning_gym` is built in.

An object is made, and its plain methods are called, in one thread of its conversation's own. One
whose plain method never comes back is closed in that thread if it ever does, and `close` is not
called beside it. One that is made when nobody waits for it any more is closed as it comes.

Ends with `completed` where the environment says so; with `truncated` where turns or tokens ran
out, or an observation would leave the model no room. The reward is the last that the
environment gave; one that gave none leaves it to `rm_type` and its like.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from slurm_rl.config.schema import Settings
from slurm_rl.errors import RewardError, SlurmRlError, Stopped
from slurm_rl.rollout.plain_json import NotPlain, copy_object, copy_plain
from slurm_rl.rollout.rewards import describe
from slurm_rl.rollout.rewards.functions import as_finite
from slurm_rl.rollout.samples import Sample
from slurm_rl.rollout.turns.conversation import Conversation
from slurm_rl.rollout.turns.protocol import Environment, Said, Step
from slurm_rl.rollout.turns.reasoning import ReasoningGym
from slurm_rl.rollout.turns.threads import OwnThread, unpack
from slurm_rl.rollout.turns.user_code import as_coroutine, call_user
from slurm_rl.rollout.turns.verifiers import VerifiersEnvironment, is_verifiers
from slurm_rl.rollout.user_errors import say_error, show_value
from slurm_rl.rollout.user_imports import TooLong, deadline, import_function

log = logging.getLogger(__name__)

_FIELD = "rollout.environment"
_STEP = "return Step(observation, done, reward, info); the reward is a finite number or None"


@dataclass(frozen=True, slots=True)
class Seat:
    """A conversation's environment, and the thread that it belongs to."""

    environment: Environment
    thread: OwnThread = field(default_factory=OwnThread)


Make = Callable[[], Awaitable[Seat]]


def find_environment(settings: Settings, args: SimpleNamespace) -> Make:
    """What makes the environment of a conversation. RewardError for a path that leads nowhere.

    One is made at once, so that what cannot be made is known before anything is generated.
    """
    name = settings.rollout.environment
    assert name is not None
    if name == "reasoning_gym":
        return _as_make(lambda: Seat(ReasoningGym()))
    factory = import_function(name, field=_FIELD)
    timeout_s = settings.rollout.reward_timeout_s
    build = partial(_build, factory, args)
    spare = []
    if _is_plain_class(factory):
        spare.append(_make_first(factory, build, timeout_s))
    else:
        shared = _try_out(factory, build, timeout_s)
        if shared is not None:
            return _as_make(lambda: Seat(VerifiersEnvironment(shared)))

    async def make() -> Seat:
        if spare:
            return spare.pop()
        thread = OwnThread()
        building = thread.post(build)
        try:
            async with asyncio.timeout(timeout_s):
                return Seat(unpack(await asyncio.wrap_future(building)), thread)
        except BaseException as error:
            _leave(thread, building)
            if isinstance(error, TimeoutError):
                raise _too_slow(factory, timeout_s) from error
            raise

    return make


def _make_first(factory: Callable[..., Any], build: Callable[[], Any], timeout_s: float) -> Seat:
    """The first conversation's, while no loop runs yet."""
    thread = OwnThread()
    building = thread.post(build)
    try:
        return Seat(unpack(building.result(timeout_s)), thread)
    except BaseException as error:
        _leave(thread, building)
        if isinstance(error, TimeoutError):
            raise _too_slow(factory, timeout_s) from error
        raise


async def run_environment(conversation: Conversation, make: Make) -> list[Sample]:
    """One conversation; raises what the engine raises, and RewardError for the user's code."""
    seat = await make()
    try:
        return [await _converse(conversation, seat)]
    finally:
        await _close(conversation, seat)


async def _close(conversation: Conversation, seat: Seat) -> None:
    close = getattr(seat.environment, "close", None)
    try:
        if close is None:
            return
        if not seat.thread.is_busy:
            await _ask(conversation, seat, close)
        elif not inspect.iscoroutinefunction(inspect.unwrap(close)):
            seat.thread.post(close)
    finally:
        seat.thread.end()


async def _converse(conversation: Conversation, seat: Seat) -> Sample:
    environment = seat.environment
    # A copy: samples of a group share what they have from their row.
    prompt = copy.deepcopy(conversation.group.visit.prompt)
    begun = await _ask(conversation, seat, environment.reset, prompt, conversation.session.seed)
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
        step = await _step(conversation, seat, said.text)
        reward = reward if step.reward is None else step.reward
        info |= step.info
        if step.done or said.finish != "stop":
            status = "completed" if said.finish == "stop" else "truncated"
            break
        if turn + 1 == max_turns or not talk.add_messages(step.observation):
            break
    score = getattr(environment, "score", None)
    if score is not None and not conversation.session.aborted:
        reward = await _score(conversation, seat, score)
    notes = {"environment": info} if info else {}
    fields = {} if begun is None else {"prompt": begun}
    return conversation.finish(talk, status=status, reward=reward, notes=notes, **fields)


async def _ask(
    conversation: Conversation, seat: Seat, function: Callable[..., Any], *args: Any
) -> Any:
    """What a method of the user's gives; a plain one runs in the conversation's thread."""
    timeout_s = conversation.settings.rollout.reward_timeout_s
    method = as_coroutine(function, run=seat.thread.call)
    try:
        async with asyncio.timeout(timeout_s):
            return await call_user(method, *args, field=_FIELD)
    except TimeoutError as error:
        raise _too_slow(function, timeout_s) from error


async def _score(conversation: Conversation, seat: Seat, function: Callable[..., Any]) -> Any:
    value = await _ask(conversation, seat, function)
    return None if value is None else _check_reward(value, function)


async def _step(conversation: Conversation, seat: Seat, response: str) -> Step:
    function = seat.environment.step
    step = await _ask(conversation, seat, function, response)
    try:
        return _read_step(step, function)
    except SlurmRlError:
        raise
    except Exception as error:  # what the attributes are, or are asked for
        raise RewardError(
            f"{_FIELD}: {describe(function)} returned a Step that cannot be read:"
            f" {say_error(error)}",
            hint=_STEP,
        ) from error


def _read_step(step: Any, function: Callable[..., Any]) -> Step:
    if not all(hasattr(step, n) for n in ("observation", "done", "reward", "info")):
        raise RewardError(
            f"{_FIELD}: {describe(function)} returned a {type(step).__name__}, not a Step",
            hint=_STEP,
        )
    reward = None if step.reward is None else _check_reward(step.reward, function)
    said = _check_said(step.observation, function, "observation")
    info = {} if step.info is None else step.info
    return Step(
        said, bool(step.done), reward, _check_plain(info, function, "info", copies=copy_object)
    )


def _check_reward(value: Any, function: Callable[..., Any]) -> float:
    reward = as_finite(value)
    if reward is None:
        raise RewardError(
            f"{_FIELD}: {describe(function)} gave the reward {show_value(value)}",
            hint="a reward is a finite number of single precision, or None",
        )
    return reward


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


def _leave(thread: OwnThread, building: Future[Any]) -> None:
    """End the thread; what is still made there is closed, as nobody else will."""

    def close_late() -> None:
        made, error = (None, None) if building.cancelled() else building.result()
        close = getattr(made, "close", None)
        if error is not None or close is None:
            return
        try:
            left = close()
            if inspect.isawaitable(left):
                asyncio.run(_finish(left))
        except BaseException as problem:  # the user's code; nobody waits for it
            log.warning("%s: %s raised %s", _FIELD, describe(close), say_error(problem))

    thread.post(close_late)
    thread.end()


def _is_plain_class(factory: Callable[..., Any]) -> bool:
    """Whether it is known without a call that what it makes is no object of `verifiers`."""
    return inspect.isclass(factory) and not is_verifiers(factory)


def _try_out(factory: Callable[..., Any], build: Callable[[], Any], timeout_s: float) -> Any:
    """What a function makes, if it is an object of `verifiers`, which all conversations share.

    It is called in this thread, as that library needs it: it sets handlers of signals. Another
    object would have to belong to its conversation's thread, and is closed again: None.
    """
    try:
        with deadline(timeout_s):
            made = build()
            if is_verifiers(made):
                return made
            close = getattr(made, "close", None)
            left = None if close is None else close()
        if inspect.isawaitable(left):
            thread = OwnThread()  # a loop may run in this one
            closing = thread.post(lambda: asyncio.run(_finish(left)))
            thread.end()
            unpack(closing.result(timeout_s))
    except (TooLong, TimeoutError) as error:
        raise _too_slow(factory, timeout_s) from error
    except (SlurmRlError, Stopped):
        raise
    except BaseException as error:  # the user's `close`
        raise RewardError(
            f"{_FIELD}: closing what {describe(factory)} made raised {say_error(error)}"
        ) from error
    return None


async def _finish(left: Awaitable[Any]) -> None:
    await left


def _build(factory: Callable[..., Any], args: SimpleNamespace) -> Any:
    try:
        takes_args = "args" in inspect.signature(factory).parameters
        made = factory(args=args) if takes_args else factory()
    except (SlurmRlError, Stopped, TooLong):
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


def _as_make(build: Callable[[], Seat]) -> Make:
    async def make() -> Seat:
        return build()

    return make


def _too_slow(function: Callable[..., Any], timeout_s: float) -> RewardError:
    return RewardError(
        f"{_FIELD}: {describe(function)} gave no answer within"
        f" rollout.reward_timeout_s = {timeout_s:g} s"
    )
