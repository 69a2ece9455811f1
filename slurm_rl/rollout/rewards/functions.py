"""Which function a name or a dotted path means, and whether what it gave is a reward."""

from __future__ import annotations

import numbers
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from slurm_rl.config.reward_checks import BOXED, REWARD_NAMES
from slurm_rl.errors import ConfigError, RewardError
from slurm_rl.rollout.rewards import asking, mathematics, programs, texts
from slurm_rl.rollout.rewards.means import Means
from slurm_rl.rollout.samples import Sample
from slurm_rl.rollout.user_errors import name_function, say_error, show_value
from slurm_rl.rollout.user_imports import import_function

#: The largest float32.
_LARGEST = 3.4028234e38

#: The user's: `(args, sample)`, or with group_rm `(args, samples)`; may be a coroutine function.
RewardFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A reward that comes with slurm-rl.

    quick:    `(args, sample) -> float`, pure, in microseconds.
    slow:     `async (means, args, sample) -> float | dict`: it asks a process or a server. With a
              quick one beside it, it is for terms that have options.
    is_boxed: it is given the content of the response's last `\\boxed{…}` alone; keeps_box: with
              the box around it.
    """

    name: str
    quick: Callable[[Any, Sample], float] | None = None
    slow: Callable[[Means, Any, Sample], Awaitable[Any]] | None = None
    is_boxed: bool = False
    keeps_box: bool = False


#: Names for `rollout.rm_type`, and for `rm_type` in a prompt's metadata.
BUILT_IN: dict[str, BuiltIn] = {
    entry.name: entry
    for entry in (
        BuiltIn("exact_match", texts.exact_match),
        BuiltIn("prefix_match", texts.prefix_match),
        BuiltIn("f1", texts.f1),
        BuiltIn("gsm8k", texts.last_number),
        BuiltIn("math", slow=mathematics.math_reward, keeps_box=True),
        BuiltIn("deepscaler", slow=mathematics.deepscaler),
        BuiltIn("dapo", texts.dapo),
        BuiltIn("gpqa", texts.multiple_choice),
        BuiltIn("multiple_choice", texts.multiple_choice),
        BuiltIn("format", texts.think_answer, mathematics.format_reward),
        BuiltIn("random", texts.seeded_random),
        BuiltIn("code", slow=programs.code_reward),
        BuiltIn("reasoning_gym", slow=mathematics.reasoning_gym),
        BuiltIn("remote_rm", slow=asking.remote_rm),
        BuiltIn("served_rm", slow=asking.served_rm),
        BuiltIn("judge", slow=asking.judge),
    )
}


def find_reward(*, rm_type: str | None, custom_rm_path: str | None) -> BuiltIn | RewardFunction:
    """The function that a name or a dotted path means; ConfigError if it is not exactly one."""
    if (rm_type is None) == (custom_rm_path is None):
        raise ConfigError(
            "rollout: set one of rm_type and custom_rm_path",
            hint=f"rm_type is one of {', '.join(BUILT_IN)}",
        )
    if custom_rm_path is not None:
        return import_function(custom_rm_path, field="rollout.custom_rm_path")
    return find_built_in(rm_type)


def find_built_in(name: Any) -> BuiltIn:
    """The built-in of that name, with or without `boxed_` before it. Raises ConfigError."""
    text = str(name)
    entry = BUILT_IN.get(text.removeprefix(BOXED))
    if entry is None or text not in REWARD_NAMES:
        raise ConfigError(
            f"rollout.rm_type = {name!r} is no built-in reward",
            hint=f"there are {', '.join(BUILT_IN)}; for your own set custom_rm_path",
        )
    if text.startswith(BOXED):
        return replace(entry, name=text, is_boxed=True)
    return entry


def check_reward(value: Any, *, function: BuiltIn | RewardFunction, prompt: Any) -> float:
    """`value` as a finite float; RewardError saying who returned what for which prompt."""
    hint = "return a finite float"
    try:
        number = _read_number(value)
    except Exception as error:  # the value's own attributes
        raise RewardError(
            f"reward {describe(function)} returned what raised {say_error(error)}"
            f" for the prompt {shorten(prompt)}",
            hint=hint,
        ) from error
    if number is None:
        problem = f"a {type(value).__name__}, not a number"
        if isinstance(value, Mapping):
            hint = "name the entry to train on as rollout.reward_key"
    elif not is_storable(number):
        problem = _show_number(number)
        hint = "return a finite float of single precision"
    else:
        return float(number)
    raise RewardError(
        f"reward {describe(function)} returned {problem} for the prompt {shorten(prompt)}",
        hint=hint,
    )


def as_number(value: Any) -> numbers.Real | None:
    """The value if it is a real number; what an array or a tensor without axes holds, too.

    NumPy's bool is such a one, and no number to Python. What cannot be read is none.
    """
    try:
        return _read_number(value)
    except Exception:  # the value's own attributes
        return None


def as_finite(value: Any) -> float | None:
    """What `as_number` gives as a float that samples can hold; None for all else."""
    number = as_number(value)
    return float(number) if number is not None and is_storable(number) else None


def _read_number(value: Any) -> numbers.Real | None:
    if not isinstance(value, numbers.Real) and getattr(value, "shape", None) == ():
        item = getattr(value, "item", None)
        value = item() if callable(item) else value
    return value if isinstance(value, numbers.Real) else None


def is_storable(value: Any) -> bool:
    """Whether a number is finite as a float32, in which samples hold their rewards."""
    try:
        return abs(float(value)) <= _LARGEST
    except Exception:  # a whole number of more than three hundred digits; its own `__float__`
        return False


def describe(function: Callable[..., Any] | BuiltIn) -> str:
    """`name (file:line)`, for a person to click on; of a built-in its name."""
    return function.name if isinstance(function, BuiltIn) else name_function(function)


def _show_number(number: numbers.Real) -> str:
    try:
        return str(number)[:40]
    except Exception:  # Python writes no number of more than 4,300 digits
        return "a number that cannot be shown"


def shorten(prompt: Any) -> str:
    """The prompt's beginning."""
    return show_value(prompt)
