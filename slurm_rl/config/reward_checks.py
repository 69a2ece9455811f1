"""Rules about rewards, and the services and servers that they ask. Pure, as `checks.py` is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from slurm_rl.config.data_names import parse_data_name
from slurm_rl.config.derive import data_sets
from slurm_rl.config.problems import Path, Problem, nearest
from slurm_rl.config.rollout_schema import DataSet, EvalSet, Overrides, Reward, Rollout
from slurm_rl.config.schema import Settings

Problems = Iterator[Problem]

#: Before a name: the reward looks at the content of the response's last `\boxed{…}` alone.
BOXED = "boxed_"
_BOXABLE = (
    *("exact_match", "prefix_match", "f1", "gsm8k", "math"),
    *("gpqa", "multiple_choice", "remote_rm"),
)
_OTHERS = (
    *("deepscaler", "dapo", "format", "random", "code"),
    *("reasoning_gym", "served_rm", "judge"),
)
#: What `options` of a term may hold; a reward of the user's takes any.
_OPTIONS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "format": {"pattern": str},
    "code": {"all_or_nothing": bool, "max_tests": int},
    "served_rm": {"index": int},
    "judge": {
        "template": str,
        "pattern": str,
        "scale": (int, float),
        "max_tokens": int,
        "unreadable": (int, float),
    },
}
#: Asked of the score stage's own server.
SERVED = ("served_rm", "judge")
#: Names that `rm_type` takes: those of slurm_rl/rollout/rewards (a test compares).
REWARD_NAMES = (*_BOXABLE, *_OTHERS, *(BOXED + name for name in _BOXABLE))


def name_of(rm_type: str | None, custom_rm_path: str | None) -> str:
    """What a reward is called where nobody named it."""
    return rm_type or str(custom_rm_path).rpartition(".")[2]


def check_rewards(settings: Settings) -> Problems:
    """Everything about rewards."""
    yield from _check_choice(settings)
    yield from _check_names(settings)
    yield from _check_terms(settings.rollout)
    yield from _check_key(settings)
    yield from _check_group_reward(settings)
    yield from _check_remote(settings)
    yield from _check_unasked(settings)
    yield from _check_served(settings)
    yield from _check_served_evaluations(settings)
    yield from _check_overlong(settings)
    yield from _check_services(settings)


def _check_choice(settings: Settings) -> Problems:
    """Exactly one of rm_type, custom_rm_path and rewards; none where something else gives one."""
    rollout = settings.rollout
    given = [name for name in ("rm_type", "custom_rm_path", "rewards") if getattr(rollout, name)]
    if not given and not _brings_rewards(settings):
        fix = "name a built-in reward, or your own as custom_rm_path, or list several as rewards"
        yield Problem(("rollout", "rm_type"), "is missing", fix)
    for name in given[1:]:
        rule, fix = f"is given beside {given[0]}", "keep one of the two"
        value = {} if name == "rewards" else {"value": rollout.custom_rm_path}
        yield Problem(("rollout", name), rule, fix, **value)


def _brings_rewards(settings: Settings) -> bool:
    """Whether samples come with a reward, or every data set names one or its own maker scores."""
    rollout = settings.rollout
    if rollout.environment is not None or rollout.custom_generate_function_path is not None:
        return True
    return all(
        part.rm_type or part.custom_rm_path or is_made_with_reward(settings, part)
        for part in data_sets(settings)
    )


def is_made_with_reward(settings: Settings, own: DataSet | EvalSet) -> bool:
    """Whether a data set's rows name its maker's own scoring, since nobody named a reward."""
    text = own.path if isinstance(own, DataSet) else own.prompt_data
    is_single = isinstance(own, DataSet) and isinstance(settings.rollout.prompt_data, str)
    sources = (own, settings.rollout) if is_single else (own,)
    is_named = any(
        source.rm_type or source.custom_rm_path or getattr(source, "rewards", ())
        for source in sources
    )
    return parse_data_name(text).kind == "procedural" and not is_named


def reward_sources(settings: Settings) -> Iterator[tuple[Path, Rollout | Overrides | Reward]]:
    """Everything that can name a reward, with its place."""
    rollout = settings.rollout
    yield ("rollout",), rollout
    for i, reward in enumerate(rollout.rewards):
        yield ("rollout", "rewards", i), reward
    if not isinstance(rollout.prompt_data, str):
        for i, data_set in enumerate(rollout.prompt_data):
            yield ("rollout", "prompt_data", i), data_set
    for name, evaluation in settings.eval.items():
        yield ("eval", name), evaluation


def _check_names(settings: Settings) -> Problems:
    for path, source in reward_sources(settings):
        name, dotted = source.rm_type, source.custom_rm_path
        if name is not None and name not in REWARD_NAMES:
            close = nearest(name, REWARD_NAMES)
            fix = f"did you mean {close}?" if close else "choose one, or set custom_rm_path"
            plain = ", ".join((*_BOXABLE, *_OTHERS))
            rule = f"must be one of {plain}, or {BOXED}NAME of {', '.join(_BOXABLE)}"
            yield Problem((*path, "rm_type"), rule, fix, name)
        if dotted is not None and "." not in dotted:
            fix = "write package.module.function"
            yield Problem((*path, "custom_rm_path"), "is not a dotted path", fix, dotted)
        if isinstance(source, Overrides) and name is not None and dotted is not None:
            rule = "is given beside rm_type"
            yield Problem((*path, "custom_rm_path"), rule, "keep one of the two", dotted)


def _check_terms(rollout: Rollout) -> Problems:
    """Each term names one reward, has a weight, and a name of its own."""
    seen: set[str] = set()
    for i, reward in enumerate(rollout.rewards):
        path: Path = ("rollout", "rewards", i)
        if (reward.rm_type is None) == (reward.custom_rm_path is None):
            fix = "give exactly one of the two"
            yield Problem(path, "needs rm_type or custom_rm_path", fix)
            continue
        yield from _check_options(reward, path)
        if reward.weight == 0:
            rule = "leaves the reward out"
            yield Problem((*path, "weight"), rule, "take the term out, or raise it", 0)
        name = reward.name or name_of(reward.rm_type, reward.custom_rm_path)
        if name in seen or name == "overlong":
            rule = f"is called {name!r} like another part of the reward"
            yield Problem(path, rule, "give it a name of its own: name: …")
        seen.add(name)


def _check_options(reward: Reward, path: Path) -> Problems:
    """Options that a built-in reward does not know have no effect."""
    known = _OPTIONS.get(reward.rm_type or "", {})
    for name, value in reward.options.items() if reward.rm_type is not None else ():
        at = (*path, "options", name)
        if name not in known:
            close = nearest(name, known)
            fix = f"did you mean {close}?" if close else f"it takes {', '.join(known) or 'none'}"
            yield Problem(at, f"is no option of {reward.rm_type}", fix, value)
        elif not isinstance(value, known[name]) or (
            isinstance(value, bool) and known[name] is not bool
        ):
            yield Problem(at, "has the wrong type", "see docs/rollout.md", value)
        elif name == "pattern":
            yield from _check_pattern(at, str(value), needs_group=reward.rm_type == "judge")


def _check_pattern(at: Path, pattern: str, *, needs_group: bool) -> Problems:
    try:
        num_groups = re.compile(pattern).groups
    except re.error as error:
        yield Problem(at, f"is no regular expression ({error})", "mend it", pattern)
        return
    if needs_group and num_groups == 0:
        yield Problem(at, "has no group", "put the number in parentheses", pattern)


def _check_key(settings: Settings) -> Problems:
    """Only a reward that can be an object has entries."""
    rollout = settings.rollout
    has_own = any(source.custom_rm_path for _, source in reward_sources(settings))
    has_remote = rollout.rm_url is not None or rollout.rm_service is not None
    if rollout.reward_key is not None and not has_own and not has_remote:
        rule = "has no effect: built-in rewards are numbers"
        yield Problem(("rollout", "reward_key"), rule, "take it out", rollout.reward_key)


def _check_group_reward(settings: Settings) -> Problems:
    rollout = settings.rollout
    if rollout.group_rm and rollout.custom_rm_path is None:
        rule = "has no effect without rollout.custom_rm_path"
        yield Problem(("rollout", "group_rm"), rule, "set it, or take group_rm out", True)


def _uses(settings: Settings, *names: str) -> Iterator[tuple[Path, str]]:
    """Where one of these rewards is named."""
    for path, source in reward_sources(settings):
        name = source.rm_type
        if name is not None and name.removeprefix(BOXED) in names:
            yield (*path, "rm_type"), name


def _check_remote(settings: Settings) -> Problems:
    rollout = settings.rollout
    service = rollout.rm_service
    for path, name in list(_uses(settings, "remote_rm"))[:1]:
        if rollout.rm_url is None and service is None:
            fix = "set rollout.rm_url, or rollout.rm_service to an entry of services"
            yield Problem(path, "needs an address", fix, name)
    if rollout.rm_url is not None and service is not None:
        path = ("rollout", "rm_url")
        yield Problem(path, "is given beside rm_service", "keep one of the two", rollout.rm_url)
    yield from _check_address(("rollout", "rm_url"), rollout.rm_url)
    if service is not None and service not in settings.services:
        close = nearest(service, settings.services)
        fix = f"did you mean {close}?" if close else "add it to services"
        yield Problem(("rollout", "rm_service"), "is no entry of services", fix, service)


def _check_unasked(settings: Settings) -> Problems:
    """Addresses and servers that no reward asks; a row, or the user's code, may."""
    if _has_own_code(settings) or _may_rows_name(settings):
        return
    rollout = settings.rollout
    if not any(_uses(settings, "remote_rm")):
        for name in ("rm_url", "rm_service"):
            value = getattr(rollout, name)
            if value is not None:
                rule = "has no effect: no reward is remote_rm"
                yield Problem(("rollout", name), rule, "take it out", value)
    if settings.score.server is not None and not any(_uses(settings, *SERVED)):
        rule = f"serves a model that no reward asks ({' and '.join(SERVED)} do)"
        yield Problem(("score", "server"), rule, "take it out, or name such a reward")


def _has_own_code(settings: Settings) -> bool:
    """Whether code of the user's is given the settings, or may name a sample's reward."""
    rollout = settings.rollout
    named = [source.custom_rm_path for _, source in reward_sources(settings)]
    named += [rollout.custom_generate_function_path, rollout.environment, *rollout.tools]
    named += [rollout.dynamic_sampling_filter_path]
    return any(name is not None and "." in name for name in named)  # a built-in has no dot


def _may_rows_name(settings: Settings) -> bool:
    """Whether rows have metadata, in which they may name a reward for themselves."""
    keys = [settings.rollout.metadata_key]
    keys += [own.metadata_key for own in (*data_sets(settings), *settings.eval.values())]
    return any(key is not None for key in keys)


def _check_served(settings: Settings) -> Problems:
    server = settings.score.server
    for path, name in _uses(settings, *SERVED):
        if server is None:
            fix = "set score.server.hf_checkpoint"
            yield Problem(path, "asks the score stage's server, and there is none", fix, name)
        elif path[0] == "eval":
            fix = "choose another reward for this evaluation"
            yield Problem(path, "is given in the score stage, which evaluations lack", fix, name)


def _check_served_evaluations(settings: Settings) -> Problems:
    """An evaluation without a reward of its own takes the rollout's."""
    served = [name for path, name in _uses(settings, *SERVED) if path[0] == "rollout"]
    for name, evaluation in settings.eval.items():
        if served and evaluation.rm_type is None and evaluation.custom_rm_path is None:
            rule = f"is missing, and rollout's {served[0]} is given in the score stage"
            yield Problem(("eval", name, "rm_type"), rule, "give it a reward of its own")


def _check_overlong(settings: Settings) -> Problems:
    overlong, rollout = settings.rollout.overlong, settings.rollout
    if overlong is None:
        return
    limits = {"rollout.rollout_max_response_len": rollout.rollout_max_response_len}
    if not isinstance(rollout.prompt_data, str):
        for i, data_set in enumerate(rollout.prompt_data):
            if data_set.rollout_max_response_len is not None:
                name = f"rollout.prompt_data[{i}].rollout_max_response_len"
                limits[name] = data_set.rollout_max_response_len
    for name, limit in limits.items():
        if overlong.buffer_len >= limit:
            rule = f"is not below {name} = {limit}: every answer would be punished"
            path = ("rollout", "overlong", "buffer_len")
            yield Problem(path, rule, "lower it", overlong.buffer_len)
    if overlong.penalty_factor == 0:
        path = ("rollout", "overlong", "penalty_factor")
        yield Problem(path, "makes overlong have no effect", "raise it, or take overlong out", 0)


#: What slurm_rl/rollout/rewards/means.py calls servers that are no entry of `services`.
_TAKEN = ("score", "rm_url")


def _check_address(at: Path, text: str | None) -> Problems:
    """An address has a scheme that is spoken, a host, and a port that can be one."""
    fix = "write it as http://host:port/path"
    if text is None:
        return
    try:
        parts = urlsplit(text)
        port = parts.port  # raises where it is no number or too large
    except ValueError as error:
        yield Problem(at, f"is no address ({error})", fix, text)
        return
    if not text.startswith(("http://", "https://")):
        yield Problem(at, "is no address", fix, text)
    elif not parts.hostname:
        yield Problem(at, "is an address without a host", fix, text)
    elif any(c.isspace() for c in text) or port == 0:
        yield Problem(at, "is no address", fix, text)
    elif at[0] == "services" and (parts.query or parts.fragment):
        rule = "is an address with a query, and paths are put behind it"
        yield Problem(at, rule, "leave out what follows ? or #", text)


def _check_services(settings: Settings) -> Problems:
    filtered = settings.rollout.dynamic_sampling_filter_path
    for name, service in settings.services.items():
        path: Path = ("services", name)
        if (service.url is None) == (service.url_file is None):
            rule = "needs exactly one of url and url_file"
            yield Problem(path, rule, "give its address, or the file that holds it")
        if name in _TAKEN:
            yield Problem(path, "is the name of another server of ours", "rename it")
        yield from _check_address((*path, "url"), service.url)
        if not service.health.startswith("/"):
            rule = "is no path"
            yield Problem((*path, "health"), rule, f"write /{service.health}", service.health)
        if service.on_down == "defer" and filtered is not None:
            rule = "cannot go with rollout.dynamic_sampling_filter_path"
            fix = "a group without rewards cannot be filtered: use on_down: halt, or no filter"
            yield Problem((*path, "on_down"), rule, fix, "defer")
        # Code of the user's may ask it: `args.ask`, `args.services`.
        if settings.rollout.rm_service != name and not _has_own_code(settings):
            rule = "is asked by no reward"
            yield Problem(path, rule, "name it as rollout.rm_service, or take it out")
