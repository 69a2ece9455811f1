"""Dynamic filters: whether a graded group is worth training on.

A filter is `function(args, group) -> keep`, plain or a coroutine, where `group` is the list of its
samples and the answer is a bool, or `(bool, reason)`; `args` has every setting of `rollout` and of
the top level as an attribute. It gets copies: nothing that it changes is kept. The built-in one
drops groups whose rewards are all the same, since they teach nothing (DAPO, arXiv 2503.14476,
section 3.2).

The user's runs where rewards of the user's run, in a thread of its own with `reward_timeout_s` for
each group: one that hangs holds neither the engines nor the end of the process. A filter that fails
is not tried again, and no group is dropped for it: which groups are trained on must not hang on
accidents.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from slurm_rl.config.schema import Settings
from slurm_rl.errors import RewardError
from slurm_rl.rollout.rewards import describe
from slurm_rl.rollout.rewards.parts import hand_over
from slurm_rl.rollout.rewards.running import UserCode
from slurm_rl.rollout.samples import Sample
from slurm_rl.rollout.user_errors import say_error, show_value
from slurm_rl.rollout.user_imports import import_function

Filter = Callable[[Sequence[Sample]], Awaitable[tuple[bool, str]]]

NONZERO_STD = "nonzero_std"
_FIELD = "rollout.dynamic_sampling_filter_path"


@contextmanager
def open_filter(settings: Settings) -> Iterator[Filter | None]:
    """The filter that `dynamic_sampling_filter_path` names; None without one.

    It returns whether to keep the group, and why not. It raises RewardError for whatever the user's
    function raises, for one that takes too long, and for an answer that is none.
    """
    name = settings.rollout.dynamic_sampling_filter_path
    if name is None:
        yield None
    elif name == NONZERO_STD:
        yield keep_nonzero_std
    else:
        own = _Filter(import_function(name, field=_FIELD), settings)
        try:
            yield own
        finally:
            own.close()


async def keep_nonzero_std(group: Sequence[Sample]) -> tuple[bool, str]:
    """Keep a group whose rewards differ."""
    first = group[0].reward
    keep = any(sample.reward != first for sample in group)
    return keep, "" if keep else f"zero_std_{first:g}"


class _Filter:
    """The user's function, where it can be left behind."""

    def __init__(self, function: Callable[..., Any], settings: Settings) -> None:
        self._function = function
        self._args = SimpleNamespace(**{**dict(settings), **dict(settings.rollout)})
        self._timeout_s = settings.rollout.reward_timeout_s
        self._code = UserCode(what="filter")
        self.close = self._code.close

    async def __call__(self, group: Sequence[Sample]) -> tuple[bool, str]:
        copies = [hand_over(sample) for sample in group]
        answer = await self._code.call(
            self._function,
            self._args,
            copies,
            timeout_s=self._timeout_s,
            prompt=group[0].prompt,
        )
        try:
            return _read(answer)
        except _NoAnswer:
            raise RewardError(
                f"filter {describe(self._function)} returned {show_value(answer)}",
                hint="return True or False, or (False, reason)",
            ) from None
        except Exception as error:  # the answer's own attributes, or its text
            raise RewardError(
                f"filter {describe(self._function)} returned what raised {say_error(error)}"
            ) from error


class _NoAnswer(Exception):
    pass


def _read(answer: Any) -> tuple[bool, str]:
    # slime's filters answer with an object of `keep` and `reason`.
    if hasattr(answer, "keep"):
        answer = (answer.keep, getattr(answer, "reason", None))
    keep, reason = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, "")
    if not isinstance(keep, bool) and getattr(keep, "shape", None) == ():
        item = getattr(keep, "item", None)  # the bool of an array, or of a tensor
        keep = item() if callable(item) else keep
    if not isinstance(keep, bool):
        raise _NoAnswer
    return keep, "" if keep else " ".join(str(reason or "filtered").split())
