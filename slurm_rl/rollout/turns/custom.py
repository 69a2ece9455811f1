"""The user's own `async function(args, sample, sampling_params)`, in slime's form.

`sample` is a mutable `CustomSample` that begins with the prompt's tokens; the function returns
it, or a list of such samples (copies with tokens of their own). `args.session` is the handle on
the engine, `args.begin()` a transcript that lays a sample out.

It has `generate_timeout_s` of its own time: what the engine takes for its answers does not count.

Owns the check of what comes back. What it refuses, it names with the function and the rule.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from slurm_rl.errors import RewardError
from slurm_rl.rollout.plain_json import NotPlain, copy_object, copy_plain
from slurm_rl.rollout.rewards import describe
from slurm_rl.rollout.rewards.functions import as_finite
from slurm_rl.rollout.samples import STATUSES, Sample
from slurm_rl.rollout.turns.conversation import Conversation
from slurm_rl.rollout.turns.session import ConversationCut
from slurm_rl.rollout.turns.transcript import Transcript
from slurm_rl.rollout.turns.user_code import as_coroutine, call_user
from slurm_rl.rollout.user_errors import say_error, show_value
from slurm_rl.rollout.user_imports import import_function

_FIELD = "rollout.custom_generate_function_path"

Function = Callable[..., Any]


class Status(StrEnum):
    """`sample.status`; its value as a plain text will do."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class CustomSample:
    """What a custom function gets and gives back. It may carry more attributes of the user's.

    tokens:            prompt and response; the prompt's when it is handed over.
    response_length:   how many of `tokens`, at the end, are the response.
    loss_mask:         of the response, 0 or 1; None: all 1.
    rollout_log_probs: of the response, as the engine gave them; anything where the mask is 0.
    remove_sample:     keep it out of the loss, as a mask of zeros would.
    reward:            None: the rollout's reward is computed; else it stands. An object of
                       numbers needs `rollout.reward_key`.
    """

    Status: ClassVar[type[Status]] = Status

    group_index: int
    index: int
    prompt: Any
    tokens: list[int]
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    session_id: str = ""
    response: str = ""
    response_length: int = 0
    reward: Any = None
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    status: Any = Status.PENDING
    weight_versions: list[str] = field(default_factory=list)
    remove_sample: bool = False

    def take(self, talk: Transcript) -> CustomSample:
        """Fill in what a transcript holds: tokens, mask, log-probs, status. Returns itself."""
        self.tokens = list(talk.tokens)
        self.response_length = len(talk.response_tokens)
        self.loss_mask = list(talk.loss_mask)
        self.rollout_log_probs = list(talk.logprobs)
        ends = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
        self.status = ends.get(talk.finish, Status.FAILED)
        return self


def find_function(dotted: str) -> Function:
    """The user's function. RewardError or ConfigError for a path that leads nowhere."""
    return import_function(dotted, field=_FIELD)


async def run_custom(conversation: Conversation, function: Function) -> list[Sample]:
    """One conversation by the user's function; RewardError for what it raises or returns."""
    given = _hand_over(conversation)
    args = conversation.args
    args.begin = conversation.open
    params = _sampling_params(conversation)
    try:
        found = await _call(conversation, function, args, given, params)
    except ConversationCut:
        return []
    if conversation.session.aborted:
        return []  # whatever came back is half of something
    several = list(found) if isinstance(found, list | tuple) else [found]
    if not several:
        raise _refuse(function, "no samples", "return one with remove_sample = True")
    return [_take_back(sample, conversation, function) for sample in several]


async def _call(conversation: Conversation, function: Function, *arguments: Any) -> Any:
    """What the function returns; a plain one runs in a thread of its own."""
    timeout_s = conversation.settings.rollout.generate_timeout_s
    call = call_user(as_coroutine(function), *arguments, field=_FIELD)
    try:
        return await conversation.session.own_time.within(call, timeout_s=timeout_s)
    except TimeoutError as error:
        raise RewardError(
            f"{_FIELD}: {describe(function)} took longer than rollout.generate_timeout_s ="
            f" {timeout_s:g} s, the engine's answers not counted",
            hint="mend it, or raise rollout.generate_timeout_s",
        ) from error


def _hand_over(conversation: Conversation) -> CustomSample:
    prompt = conversation.group.visit.prompt
    return CustomSample(
        group_index=conversation.group.group_index,
        index=conversation.index,
        prompt=copy.deepcopy(prompt.prompt),
        tokens=list(conversation.prompt_tokens),
        label=copy.deepcopy(prompt.label),
        metadata=copy.deepcopy(prompt.metadata),
        session_id=conversation.session.name,
    )


def _sampling_params(conversation: Conversation) -> dict[str, Any]:
    """The rollout's sampling under SGLang's names; for reading."""
    sampling = conversation.session.sampling
    return {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
    }


def _take_back(value: Any, conversation: Conversation, function: Function) -> Sample:
    """One sample as ours, after every check."""
    if not hasattr(value, "tokens") or not hasattr(value, "response_length"):
        problem = f"a {type(value).__name__}, which is no sample"
        raise _refuse(function, problem, "return the sample that was given, or a list of such")
    try:
        fields = _read(value, conversation)
    except _Refused as refused:
        raise _refuse(function, f"a sample {refused.problem}", refused.rule) from None
    except NotPlain as problem:
        rule = "put texts, finite numbers, lists and objects there"
        raise _refuse(function, f"a sample whose {problem.where} {problem.why}", rule) from None
    except Exception as error:  # attributes of other types than they should have
        rule = "give lists of numbers, as CustomSample says"
        raise _refuse(
            function, f"a sample that cannot be read: {say_error(error)}", rule
        ) from error
    return conversation.sample(**fields)


class _Refused(Exception):
    def __init__(self, problem: str, rule: str) -> None:
        super().__init__(problem)
        self.problem, self.rule = problem, rule


def _read(value: Any, conversation: Conversation) -> dict[str, Any]:
    status = getattr(value.status, "value", value.status)
    if status not in STATUSES:
        rule = f"set sample.status to one of {', '.join(STATUSES)}"
        raise _Refused(f"whose status is {show_value(status)}", rule)
    tokens, length = _read_tokens(value, conversation, may_be_empty=status in _UNFINISHED)
    mask = _read_mask(value, length)
    logprobs = _read_logprobs(value, mask)
    prompt_tokens, response_tokens = tokens[: len(tokens) - length], tokens[len(tokens) - length :]
    kept = _fit(len(prompt_tokens), mask, conversation)
    reward, rewards = _read_reward(value.reward, conversation.settings.rollout.reward_key)
    text = copy_plain(value.response, name="response") if kept == length else ""
    if text is not None and not isinstance(text, str):
        problem = f"whose response is of type {type(value.response).__name__}"
        raise _Refused(problem, "it is a text; leave it empty to have it decoded")
    return {
        "prompt_tokens": tuple(prompt_tokens),
        "response_tokens": tuple(response_tokens[:kept]),
        "rollout_logprobs": tuple(logprobs[:kept]),
        "loss_mask": tuple(mask[:kept]),
        "response": text
        or conversation.tokenizer.decode(response_tokens[:kept], skip_special_tokens=True),
        "prompt": copy_plain(value.prompt, name="prompt"),
        "label": copy_plain(value.label, name="label"),
        "metadata": copy_object(value.metadata or {}, name="metadata"),
        "status": status if kept == length else "truncated",
        "reward": reward,
        "rewards": rewards,
    }


#: Statuses of samples that nothing is computed from.
_UNFINISHED = ("aborted", "failed")


def _read_tokens(
    value: Any, conversation: Conversation, *, may_be_empty: bool
) -> tuple[list[int], int]:
    tokens, length = list(value.tokens), value.response_length
    top = conversation.session.limits.vocabulary
    wrong = [t for t in tokens if not isinstance(t, int) or not 0 <= t < top]
    if wrong:
        raise _Refused(f"with the token {show_value(wrong[0])}", f"tokens are ids below {top}")
    if not isinstance(length, int) or not 0 <= length < len(tokens):
        rule = "sample.tokens holds the prompt, then response_length tokens of the response"
        raise _Refused(f"of {len(tokens)} tokens and response_length {length!r}", rule)
    if length == 0 and not may_be_empty:
        raise _Refused("without response tokens", "set status to failed if there is no answer")
    return tokens, length


def _read_mask(value: Any, length: int) -> list[int]:
    mask = [1] * length if value.loss_mask is None else list(value.loss_mask)
    if len(mask) != length:
        raise _Refused(
            f"with {len(mask)} values of loss_mask for {length} response tokens",
            "give one for each response token, none for the prompt's",
        )
    if any(m not in (0, 1) for m in mask):
        raise _Refused("with a loss_mask of other values than 0 and 1", "weights are not supported")
    return [0] * length if getattr(value, "remove_sample", False) else [int(m) for m in mask]


def _read_logprobs(value: Any, mask: Sequence[int]) -> list[float]:
    given = value.rollout_log_probs
    if given is None:
        if any(mask):
            raise _Refused(
                "without rollout_log_probs for tokens that are trained on",
                "give those that session.generate returned, or mask the tokens with 0",
            )
        return [0.0] * len(mask)
    if len(given) != len(mask):
        raise _Refused(
            f"with {len(given)} rollout_log_probs for {len(mask)} response tokens",
            "give one for each response token, 0.0 where the mask is 0",
        )
    for logprob, is_trained in zip(given, mask, strict=True):
        number = as_finite(logprob) if is_trained else 0.0
        if number is None or number > 1e-6:
            rule = "give those that session.generate returned"
            raise _Refused(f"with the log-prob {show_value(logprob)} of a trained token", rule)
    return [float(x) if m else 0.0 for x, m in zip(given, mask, strict=True)]


def _fit(num_prompt: int, mask: Sequence[int], conversation: Conversation) -> int:
    """How many response tokens stay: what no loss is computed on may be cut off at the end."""
    limits = conversation.session.limits
    room = limits.response
    if limits.context is not None:
        room = min(room, limits.context - num_prompt)
    if len(mask) <= room:
        return len(mask)
    if any(mask[max(room, 0) :]) or room < 1:
        rule = "the response, tools' tokens included, ends at rollout_max_response_len"
        raise _Refused(f"of {len(mask)} response tokens, where {room} are allowed", rule)
    return room


def _read_reward(value: Any, key: str | None) -> tuple[float | None, dict[str, float]]:
    if value is None:
        return None, {}
    parts = value if isinstance(value, dict) else {}
    if isinstance(value, dict) and key is None:
        raise _Refused("whose reward is an object", "name its entry as rollout.reward_key")
    number = as_finite(parts.get(key) if isinstance(value, dict) else value)
    found = {str(name): as_finite(part) for name, part in parts.items()}
    named = {name: part for name, part in found.items() if part is not None}
    if number is None or len(named) < len(found):
        rule = "a reward is a finite number of single precision, or None"
        raise _Refused(f"with the reward {show_value(value)}", rule)
    return number, named


def _refuse(function: Function, problem: str, rule: str) -> RewardError:
    return RewardError(f"{_FIELD}: {describe(function)} returned {problem}", hint=rule)
