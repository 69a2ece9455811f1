"""Dynamic filters: whether a graded group is worth training on.

A filter is `function(args, group) -> keep`, where `group` is the list of its samples and the answer
is a bool, or `(bool, reason)`; `args` has every setting of `rollout` and of the top level as an
attribute. The built-in one drops groups whose rewards are all the same, since they teach nothing
(DAPO, arXiv 2503.14476, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from slurm_rl.config.schema import Settings
from slurm_rl.errors import RewardError
from slurm_rl.rollout.rewards import describe, import_function
from slurm_rl.rollout.samples import Sample

Filter = Callable[[Sequence[Sample]], tuple[bool, str]]

NONZERO_STD = "nonzero_std"


def make_filter(settings: Settings) -> Filter | None:
    """The filter that `dynamic_sampling_filter_path` names; None without one.

    It returns whether to keep the group, and why not. It raises RewardError for whatever the user's
    function raises, and for an answer that is none.
    """
    name = settings.rollout.dynamic_sampling_filter_path
    if name is None:
        return None
    if name == NONZERO_STD:
        return keep_nonzero_std
    function = import_function(name, field="rollout.dynamic_sampling_filter_path")
    args = SimpleNamespace(**{**dict(settings), **dict(settings.rollout)})
    return lambda group: _ask(function, args, list(group))


def keep_nonzero_std(group: Sequence[Sample]) -> tuple[bool, str]:
    """Keep a group whose rewards differ."""
    first = group[0].reward
    keep = any(sample.reward != first for sample in group)
    return keep, "" if keep else f"zero_std_{first:g}"


def _ask(function: Callable[..., Any], args: Any, group: list[Sample]) -> tuple[bool, str]:
    try:
        answer = function(args, group)
    except (Exception, SystemExit) as error:  # the user's code
        raise RewardError(
            f"filter {describe(function)} raised {type(error).__name__}: {error}"
        ) from error
    # slime's filters answer with an object of `keep` and `reason`.
    if hasattr(answer, "keep"):
        answer = (answer.keep, getattr(answer, "reason", None))
    keep, reason = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, "")
    if not isinstance(keep, bool):
        raise RewardError(
            f"filter {describe(function)} returned {answer!r}",
            hint="return True or False, or (False, reason)",
        )
    return keep, "" if keep else str(reason or "filtered")
