"""The user's own parts of the algorithm: found by their dotted paths, and called.

What they raise or give back in a wrong form is one line that names the setting and the place.
Exceptions that are about the machine (memory, a GPU) are left as they are: another attempt may do.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from slurm_rl.config.code_preflight import HOOKS
from slurm_rl.config.schema import Settings
from slurm_rl.errors import ConfigError, RewardError, SlurmRlError
from slurm_rl.rollout.user_errors import name_function, say_error
from slurm_rl.rollout.user_imports import import_function

if TYPE_CHECKING:
    from slurm_rl.train.step import Hooks

_MACHINES = ("OutOfMemoryError", "AcceleratorError", "DistBackendError", "MemoryError")


def read_hooks(settings: Settings) -> Hooks:
    """The functions that `train.custom_*_path` name.

    Raises ConfigError and RewardError for what is not there, cannot be imported, or does not take
    what it is called with.
    """
    from slurm_rl.train.step import Hooks

    found: dict[str, Any] = {}
    for name, arguments in HOOKS.items():
        dotted = getattr(settings.train, name)
        if dotted is not None:
            field = f"train.{name}"
            function = import_function(dotted, field=field)
            check_arguments(function, arguments, field=field)
            part = name.removeprefix("custom_").removesuffix("_path")
            check = _check_loss if part == "loss" else None
            found[part] = guard(function, field=field, check=check)
    return Hooks(**found)


def check_arguments(
    function: Callable[..., Any], arguments: tuple[str, ...], *, field: str
) -> None:
    """ConfigError unless a function can be called with so many arguments by position."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a compiled one may not say
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"{field}: {name_function(function)} cannot be called with {len(arguments)} arguments "
            f"({', '.join(arguments)}): {error}",
            hint="docs/training.md says what it is called with",
        ) from error


def guard(
    function: Callable[..., Any],
    *,
    field: str,
    check: Callable[[Any, tuple[Any, ...]], str | None] | None = None,
) -> Callable[..., Any]:
    """The function, with what it raises as RewardError.

    check: what is wrong with a value that it gave for these arguments, if anything; ConfigError.
    """

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            value = function(*arguments)
        except SlurmRlError:
            raise
        except Exception as error:  # the user's code
            if type(error).__name__ in _MACHINES:
                raise
            told = f"{field}: {name_function(function)} raised {say_error(error)}"
            raise RewardError(told) from error
        wrong = check(value, arguments) if check is not None else None
        if wrong is not None:
            raise ConfigError(
                f"{field}: {name_function(function)} returned {wrong}",
                hint="docs/training.md says what it returns",
            )
        return value

    return call


def _check_loss(value: Any, arguments: tuple[Any, ...]) -> str | None:
    """A PolicyLoss of one number for each token, of which the loss carries a gradient."""
    import torch

    from slurm_rl.algorithms.losses import PolicyLoss

    if not isinstance(value, PolicyLoss):
        return f"{type(value).__name__}, not PolicyLoss(loss_N, ratio_N, clipped_N)"
    logprobs_N = arguments[0].logprobs_N
    for name, part in value._asdict().items():
        if not torch.is_tensor(part) or part.shape != logprobs_N.shape:
            shown = f"a tensor of {list(part.shape)}" if torch.is_tensor(part) else repr(part)
            return f"{name} = {shown}, not float[{len(logprobs_N)}]"
    is_trained = torch.is_grad_enabled() and logprobs_N.requires_grad
    if is_trained and not value.loss_N.requires_grad:
        return "a loss_N without a gradient: was it detached?"
    return None
