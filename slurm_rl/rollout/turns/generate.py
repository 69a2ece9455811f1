"""From a planned group to its samples in several turns, whichever way the settings name.

Conversations of a group run at the same time; nothing of one depends on another. The first that
fails ends the others: it is the user's code that fails, and `on_reward_error` says what becomes of
the group. It is not tried again: the same seeds would say the same.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from slurm_rl.config.derive import data_sets
from slurm_rl.config.rollout_schema import Overrides
from slurm_rl.config.schema import Settings
from slurm_rl.errors import RewardError
from slurm_rl.rollout.engine import Engine, Weights
from slurm_rl.rollout.grading import GivenUp
from slurm_rl.rollout.samples import Sample
from slurm_rl.rollout.turns.conversation import Conversation
from slurm_rl.rollout.turns.custom import find_function, run_custom
from slurm_rl.rollout.turns.environments import find_environment, run_environment
from slurm_rl.rollout.turns.session import Limits, Session
from slurm_rl.rollout.turns.template import ChatTemplate
from slurm_rl.rollout.turns.together import run_together
from slurm_rl.rollout.turns.tool_loop import run_tools
from slurm_rl.rollout.turns.tools import RunPython, Tool, find_tools

if TYPE_CHECKING:
    from slurm_rl.rollout.groups import PlannedGroup

log = logging.getLogger(__name__)

Converse = Callable[[Conversation], Awaitable[list[Sample]]]
Generate = Callable[["PlannedGroup"], Awaitable[list[Sample] | GivenUp]]


def make_generate(
    settings: Settings,
    *,
    engine: Engine,
    tokenizer: Any,
    weights: Weights,
    overrides: Mapping[str, Overrides] | None = None,
    context_len: int | None = None,
    run_python: RunPython | None = None,
) -> Generate | None:
    """What generates a group in several turns; None where the settings name no way to.

    overrides:   of each data set, as the planner has them; by default the rollout's.
    context_len: most tokens of a sample; by default `rollout_max_context_len`.
    run_python:  what runs the Python tool's code; by default the sandbox.

    A reward that the environment or the user's function gave is to be kept. Conversation k of the
    group has `rollout_index` k and may have several samples; `sample_index` counts them all. One
    that was cut off is one sample without response, `aborted`, which cannot be carried over.
    Raises RewardError and ConfigError where the user's code cannot be found.
    """
    args = SimpleNamespace(**{**dict(settings), **dict(settings.rollout)}, tokenizer=tokenizer)
    tools = find_tools(settings, run_python=run_python)
    converse = _find_way(settings, args, tools)
    if converse is None:
        return None
    if overrides is None:
        overrides = {data_set.name: data_set for data_set in data_sets(settings)}
    return _Generator(
        settings,
        engine=engine,
        tokenizer=tokenizer,
        weights=weights,
        overrides=overrides,
        context_len=context_len,
        args=args,
        schemas=[tool.schema for tool in tools.values()],
        converse=converse,
    )


def _find_way(
    settings: Settings, args: SimpleNamespace, tools: Mapping[str, Tool]
) -> Converse | None:
    rollout = settings.rollout
    if rollout.custom_generate_function_path is not None:
        function = find_function(rollout.custom_generate_function_path)
        return lambda conversation: run_custom(conversation, function)
    if rollout.environment is not None:
        make = find_environment(settings, args)
        return lambda conversation: run_environment(conversation, make)
    if tools:
        return lambda conversation: run_tools(conversation, tools)
    return None


class _Generator:
    def __init__(
        self,
        settings: Settings,
        *,
        engine: Engine,
        tokenizer: Any,
        weights: Weights,
        overrides: Mapping[str, Overrides],
        context_len: int | None,
        args: SimpleNamespace,
        schemas: Sequence[Mapping[str, Any]],
        converse: Converse,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._tokenizer = tokenizer
        self._weights = weights
        self._overrides = overrides
        self._context_len = context_len or settings.rollout.rollout_max_context_len
        self._args = args
        self._schemas = list(schemas)
        self._converse = converse
        self._vocabulary = read_vocabulary(weights.path, tokenizer)

    async def __call__(self, group: PlannedGroup) -> list[Sample] | GivenUp:
        numbers = range(len(group.request.seeds))
        try:
            conversations = await run_together(self._run_one(group, k) for k in numbers)
        except RewardError as error:
            if self._settings.rollout.on_reward_error == "halt":
                raise
            log.warning("a group is dropped: %s", error.message)
            left = (replace(self._open(group, k).given_up(), sample_index=k) for k in numbers)
            return GivenUp(tuple(left), error.message)
        samples = [sample for samples in conversations for sample in samples]
        return [replace(sample, sample_index=i) for i, sample in enumerate(samples)]

    async def _run_one(self, group: PlannedGroup, index: int) -> list[Sample]:
        conversation = self._open(group, index)
        session = conversation.session
        try:
            samples = await self._converse(conversation)
        except Exception as error:
            # What the user's code makes of an engine's failure, or of an answer that was cut off,
            # says nothing about the code.
            if session.failure is not None:
                raise session.failure from error
            if not session.aborted:
                raise
            samples = []
        if session.failure is not None:
            raise session.failure  # the user's code may have swallowed it
        return [conversation.cut_off()] if session.aborted else samples

    def _open(self, group: PlannedGroup, index: int) -> Conversation:
        prompt = group.visit.prompt
        session = Session(
            self._engine,
            tokenizer=self._tokenizer,
            weights=self._weights,
            sampling=group.sampling,
            limits=Limits(group.sampling.max_new_tokens, self._context_len, self._vocabulary),
            group_index=group.group_index,
            index=index,
            seed=group.request.seeds[index],
            prompt=group.request.prompt_tokens,
        )
        rollout = self._settings.rollout
        own = self._overrides.get(prompt.data_set, Overrides()).apply_chat_template
        template = ChatTemplate(
            self._tokenizer,
            enabled=rollout.apply_chat_template if own is None else own,
            options=rollout.apply_chat_template_kwargs,
            # As for the prompt itself: a row's own tools stand for the run's.
            tools=self._schemas if prompt.tools is None else prompt.tools,
        )
        return Conversation(
            settings=self._settings,
            group=group,
            index=index,
            session=session,
            template=template,
            tokenizer=self._tokenizer,
            version=self._weights.version,
            args=SimpleNamespace(**vars(self._args), session=session),
        )


def read_vocabulary(folder: Path, tokenizer: Any) -> int:
    """Ids are below it: the model may have more than its tokenizer has names for."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        sizes = [c.get("vocab_size", 0) for c in (config, config.get("text_config") or {})]
    except (OSError, ValueError, AttributeError):
        sizes = []  # the engine has said already what it thinks of these weights
    return max([len(tokenizer), *(size for size in sizes if isinstance(size, int))])
