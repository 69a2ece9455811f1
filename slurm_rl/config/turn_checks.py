"""Rules between the settings of rollouts in several turns. Pure, as those of `checks.py`."""

from __future__ import annotations

from collections.abc import Iterator

from slurm_rl.config.derive import data_sets
from slurm_rl.config.problems import Path, Problem, nearest
from slurm_rl.config.rollout_schema import Overrides, Rollout
from slurm_rl.config.schema import Settings

Problems = Iterator[Problem]

#: Names that `rollout.tools` takes besides dotted paths.
BUILT_IN_TOOLS = ("calculator", "python")
#: Names that `rollout.environment` takes besides a dotted path.
BUILT_IN_ENVIRONMENTS = ("reasoning_gym",)

_OWN = "custom_generate_function_path"
#: The three ways to have several turns.
_WAYS = (_OWN, "tools", "environment")
#: Setting -> the ways that use it.
_USERS: dict[str, tuple[str, ...]] = {
    "generate_timeout_s": (_OWN,),
    "max_turns": ("tools", "environment"),
    "max_tool_output_len": ("tools",),
}


def check_turns(settings: Settings) -> Problems:
    rollout = settings.rollout
    ways = [name for name in _WAYS if getattr(rollout, name)]
    yield from _check_effect(rollout, ways)
    for name in ways[1:]:
        rule = f"is given beside {ways[0]}"
        yield Problem(("rollout", name), rule, "keep one of them", getattr(rollout, name))
    if ways and rollout.partial_rollout:
        rule = f"cannot be with {ways[0]}: a conversation that was cut off starts again"
        fix = "set partial_rollout: false"
        yield Problem(("rollout", "partial_rollout"), rule, fix, True)
    yield from _check_names(rollout)
    yield from _check_template(settings)


def _check_effect(rollout: Rollout, ways: list[str]) -> Problems:
    """A setting of turns where there are none; a user's own function may look at each."""
    for name, users in _USERS.items():
        value = getattr(rollout, name)
        if value != type(rollout).model_fields[name].default and not {*ways} & {*users, _OWN}:
            rule = f"has no effect without {' or '.join(users)}"
            yield Problem(("rollout", name), rule, "take it out", value)


def _check_names(rollout: Rollout) -> Problems:
    function = rollout.custom_generate_function_path
    if function is not None and "." not in function:
        path: Path = ("rollout", "custom_generate_function_path")
        yield Problem(path, "is not a dotted path", "write package.module.function", function)
    for i, name in enumerate(rollout.tools):
        yield from _check_name(("rollout", "tools", i), name, BUILT_IN_TOOLS, "tool")
        if name in rollout.tools[:i]:
            yield Problem(("rollout", "tools", i), "is there twice", "take one out", name)
    if rollout.environment is not None:
        path = ("rollout", "environment")
        yield from _check_name(path, rollout.environment, BUILT_IN_ENVIRONMENTS, "environment")


def _check_name(path: Path, name: str, known: tuple[str, ...], kind: str) -> Problems:
    if name in known or "." in name:
        return
    close = nearest(name, known)
    rule = f"is no built-in {kind}; there is {', '.join(known)}, or your own by dotted path"
    yield Problem(path, rule, f"did you mean {close}?" if close else "choose one", name)


def _check_template(settings: Settings) -> Problems:
    """The model hears of tools, and of what they answered, through its template alone."""
    rollout = settings.rollout
    if not rollout.tools:
        return
    rule = "must be true with tools: the model hears of them through its chat template"
    if not rollout.apply_chat_template:
        path: Path = ("rollout", "apply_chat_template")
        yield Problem(path, rule, "set apply_chat_template: true", False)
    places: list[tuple[Path, Overrides]] = [
        *((("rollout", "prompt_data", i), own) for i, own in enumerate(data_sets(settings))),
        *((("eval", name), own) for name, own in settings.eval.items()),
    ]
    for place, own in places:
        if own.apply_chat_template is False:
            yield Problem((*place, "apply_chat_template"), rule, "take it out", False)
