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

import inspect
import math
import numbers
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from slurm_rl.config.schema import Settings
from slurm_rl.errors import RewardError
from slurm_rl.rollout.rewards import describe, import_function
from slurm_rl.rollout.samples import Sample
from slurm_rl.rollout.turns.conversation import Conversation
from slurm_rl.rollout.turns.protocol import Environment, Step
from slurm_rl.rollout.turns.reasoning import ReasoningGym
from slurm_rl.rollout.turns.user_code import call_user
from slurm_rl.rollout.turns.verifiers import VerifiersEnvironment, is_verifiers

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
            await call_user(close, field=_FIELD)


async def _converse(conversation: Conversation, environment: Environment) -> Sample:
    prompt = conversation.group.visit.prompt
    begun = await call_user(environment.reset, prompt, conversation.session.seed, field=_FIELD)
    own = None if begun is None else conversation.template.encode_prompt(begun)
    talk = conversation.open(own)
    status, reward = "truncated", None
    info: dict[str, Any] = {}
    max_turns = conversation.settings.rollout.max_turns
    for turn in range(max_turns):
        said = await talk.say()
        if not said.tokens or said.finish == "abort":
            break
        # An answer that was cut short is judged too, as it is where there is one turn.
        step = await _step(environment, said.text)
        reward = reward if step.reward is None else float(step.reward)
        info |= step.info
        if step.done or said.finish != "stop":
            status = "completed" if said.finish == "stop" else "truncated"
            break
        if turn + 1 == max_turns or not talk.add_messages(step.observation):
            break
    if hasattr(environment, "score") and not conversation.session.aborted:
        reward = await _score(environment)
    notes = {"environment": info} if info else {}
    fields = {} if begun is None else {"prompt": begun}
    return conversation.finish(talk, status=status, reward=reward, notes=notes, **fields)


async def _score(environment: Any) -> float | None:
    value = await call_user(environment.score, field=_FIELD)
    if value is None or _is_finite(value):
        return None if value is None else float(value)
    raise RewardError(
        f"{_FIELD}: {describe(environment.score)} gave the reward {value!r}",
        hint="return a finite number or None",
    )


async def _step(environment: Environment, response: str) -> Step:
    step = await call_user(environment.step, response, field=_FIELD)
    missing = [n for n in ("observation", "done", "reward", "info") if not hasattr(step, n)]
    if missing:
        problem = f"returned a {type(step).__name__}, not a Step"
    elif step.reward is not None and not _is_finite(step.reward):
        problem = f"gave the reward {step.reward!r}"
    else:
        return step  # type: ignore[no-any-return]
    raise RewardError(
        f"{_FIELD}: {describe(environment.step)} {problem}",
        hint="return Step(observation, done, reward, info); the reward is a finite number or None",
    )


def _is_finite(value: Any) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)


def _make(factory: Callable[..., Any], args: SimpleNamespace) -> Any:
    try:
        takes_args = "args" in inspect.signature(factory).parameters
        made = factory(args=args) if takes_args else factory()
    except Exception as error:  # the user's code
        raise RewardError(
            f"{_FIELD}: {describe(factory)} raised {type(error).__name__}: {error}"
        ) from error
    if not is_verifiers(made) and not (hasattr(made, "reset") and hasattr(made, "step")):
        raise RewardError(
            f"{_FIELD}: {describe(factory)} made a {type(made).__name__},"
            " which has no reset and step",
            hint="see docs/rollout.md, Several turns",
        )
    return made
