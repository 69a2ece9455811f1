"""Rules of a row of data: its prompt, its label, its tools, the reward that it names. Pure.

The same ones hold for the first rows, on the login node, and for every row when the first rollout
reads them; who reads says where the row is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slurm_rl.config.problems import nearest
from slurm_rl.config.reward_checks import BOXED, REWARD_NAMES, SERVED
from slurm_rl.config.rollout_schema import KEY_FIELDS, Overrides
from slurm_rl.config.schema import Settings
from slurm_rl.types import canonical_json

#: Built-in rewards that compare with the label.
COMPARING = (
    *("exact_match", "prefix_match", "f1", "gsm8k", "math"),
    *("deepscaler", "dapo", "gpqa", "multiple_choice"),
)
_CHOICES = ("gpqa", "multiple_choice")
#: Those that look for an answer in the label, of which there is none in an empty text.
READING = ("gsm8k", "math", "deepscaler", "dapo", *_CHOICES)
#: What `judge` puts the label in for.
LABEL_PLACE = "{label}"


class RowFault(ValueError):
    """What is wrong with a row, and what to do."""

    def __init__(self, rule: str, fix: str = "") -> None:
        super().__init__(rule)
        self.rule, self.fix = rule, fix


@dataclass(frozen=True, slots=True)
class Grading:
    """Which built-in rewards the rows of one data set meet.

    comparing: those that compare with the label of a row that names no reward for itself.
    missing:   names that no row may name here -> what they lack.
    """

    comparing: tuple[str, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Keys:
    """Under which keys a row of one data set holds its parts.

    places:  field -> where the user set it, if not in `rollout`: `eval.aime.input_key`.
    grading: None where the rows' rewards come from elsewhere.
    """

    data_set: str
    input_key: str = "prompt"
    label_key: str | None = None
    metadata_key: str | None = None
    tool_key: str | None = None
    places: Mapping[str, str] = field(default_factory=dict)
    grading: Grading | None = None

    def place(self, name: str) -> str:
        return self.places.get(name, f"rollout.{name}")

    @property
    def used(self) -> list[str]:
        """The keys that a row is asked for."""
        keys = (self.input_key, self.label_key, self.metadata_key, self.tool_key)
        return list(dict.fromkeys(key for key in keys if key is not None))


@dataclass(frozen=True, slots=True)
class Parts:
    """What a row holds."""

    prompt: Any
    label: Any
    metadata: dict[str, Any]
    tools: list[dict[str, Any]] | None


def plan_keys(settings: Settings, own: Overrides, *, name: str, place: str) -> Keys:
    """The keys of a data set. place: where the settings have what it sets for itself."""
    keys = {}
    places = {}
    for key in KEY_FIELDS:
        value = getattr(own, key)
        keys[key] = getattr(settings.rollout, key) if value is None else value
        places[key] = f"{'rollout' if value is None else place}.{key}"
    return Keys(name, **keys, places=places, grading=plan_grading(settings, own))


def plan_grading(settings: Settings, own: Overrides) -> Grading | None:
    """How the rows of a data set are graded; None where what leads the conversation may do it."""
    rollout = settings.rollout
    if rollout.environment is not None or rollout.custom_generate_function_path is not None:
        return None
    missing = {}
    if rollout.rm_url is None and rollout.rm_service is None:
        missing["remote_rm"] = "rollout.rm_url or rollout.rm_service"
    if settings.score.server is None:
        missing |= dict.fromkeys(SERVED, "score.server")
    return Grading(tuple(_comparing(settings, own)), missing)


def _comparing(settings: Settings, own: Overrides) -> list[str]:
    rollout = settings.rollout
    if own.rm_type is not None or own.custom_rm_path is not None:
        given: list[tuple[str | None, Mapping[str, Any]]] = [(own.rm_type, {})]
    elif rollout.rewards:
        given = [(term.rm_type, term.options) for term in rollout.rewards]
    else:
        given = [(rollout.rm_type, {})]
    return [name for name, options in given if name is not None and _is_comparing(name, options)]


def _is_comparing(name: str, options: Mapping[str, Any]) -> bool:
    if name == "judge":  # its own template, the default, has the label in it
        return LABEL_PLACE in options.get("template", LABEL_PLACE)
    return name.removeprefix(BOXED) in COMPARING


def read_parts(values: Mapping[str, Any], keys: Keys) -> Parts:
    """A row's parts. Raises RowFault.

    A row may lack metadata and tools, but not the prompt, and not the label if one is asked for.
    """
    prompt = take_value(values, "input_key", keys)
    _check_prompt(prompt, key=keys.input_key)
    label = None if keys.label_key is None else take_value(values, "label_key", keys)
    metadata = values.get(keys.metadata_key) if keys.metadata_key is not None else None
    if metadata is not None and not isinstance(metadata, dict):
        raise RowFault(f"{keys.metadata_key!r} is not an object", 'write {"name": value}')
    tools = None
    if keys.tool_key is not None:
        tools = _read_tools(values.get(keys.tool_key), key=keys.tool_key)
    parts = Parts(prompt, label, metadata or {}, tools)
    if keys.grading is not None:
        check_grading(parts, keys, keys.grading)
    return parts


def take_value(values: Mapping[str, Any], name: str, keys: Keys) -> Any:
    """The value under the key that the field `name` of `keys` says. Raises RowFault."""
    key, setting = getattr(keys, name), keys.place(name)
    if key not in values:
        rule = f"no key {key!r} ({setting}); there are {sorted(values)}"
        raise RowFault(rule, f"set {setting} to one of them")
    return values[key]


def check_grading(parts: Parts, keys: Keys, grading: Grading) -> None:
    """Raises RowFault for a reward that is none, or one that has nothing to compare with."""
    named = parts.metadata.get("rm_type")
    if named is not None:
        check_reward_name(named, grading)
    names = grading.comparing if named is None else (str(named),)
    for name in names:
        if lacks_label(name, parts.label, parts.metadata):
            setting = keys.place("label_key")
            if keys.label_key is None:
                rule, fix = "has no label", f"set {setting} to the key that holds it"
            else:
                rule = f"{keys.label_key!r} ({setting}) is {_say(parts.label)}"
                fix = "give the row a label, or take it out"
            raise RowFault(f"{rule}, which the reward {name} compares with", fix)


def check_reward_name(name: Any, grading: Grading | None = None) -> None:
    """Raises RowFault for a row's `rm_type` that names no reward, or one that cannot work here."""
    if not isinstance(name, str) or name not in REWARD_NAMES:
        close = nearest(str(name), REWARD_NAMES)
        known = ", ".join(known for known in REWARD_NAMES if not known.startswith(BOXED))
        rule = f"metadata.rm_type = {name!r} is no built-in reward"
        guess = f"did you mean {close}? " if close else ""
        raise RowFault(rule, f"{guess}there are {known}, some with {BOXED} before")
    lacking = None if grading is None else grading.missing.get(name.removeprefix(BOXED))
    if lacking is not None:
        raise RowFault(f"metadata.rm_type = {name!r} needs {lacking}", "set it, or change the row")


def lacks_label(name: str, label: Any, metadata: Mapping[str, Any]) -> bool:
    """Whether the built-in reward `name` would compare with nothing."""
    if not _is_comparing(name, {}):
        return False
    plain = name.removeprefix(BOXED)
    if plain in _CHOICES and metadata.get("correct_letter") is not None:
        return False
    if plain not in READING:
        return label is None
    labels = label if isinstance(label, list) else [label]
    return all(item is None or not str(item).strip() for item in labels)


def check_plain(values: Any) -> None:
    """Raises RowFault for values that JSON cannot hold: dates, bytes, NaN, half a character."""
    try:
        canonical_json(values)
    except (TypeError, ValueError) as error:
        rule = f"holds a value that JSON cannot ({error})"
        raise RowFault(rule, "convert it to text or numbers") from error


def decode_line(line: bytes) -> dict[str, Any]:
    """A line's object. Raises RowFault."""
    fix = "one JSON object a line"
    try:
        values = _DECODER.decode(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise RowFault(f"not JSON ({error})", fix) from error
    if not isinstance(values, dict):
        raise RowFault(f"a {type(values).__name__}", fix)
    return values


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a number of JSON")


def _read_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large a number")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_read_float)


def _say(value: Any) -> str:
    return "null" if value is None else repr(value)


def _check_prompt(prompt: Any, *, key: str) -> None:
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, list):
        shown = _say(prompt)[:40]
        raise RowFault(f"{key!r} is {shown}", "a prompt is a text or a list of messages")
    if not prompt:
        raise RowFault(f"{key!r} has no messages", "write one, or take the row out")
    form = 'a message is {"role": "user", "content": "…"}'
    for number, message in enumerate(prompt):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowFault(f"message {number} of {key!r} has no role", form)
        # An assistant's message may be calls of tools alone.
        if message.get("content") is None and not message.get("tool_calls"):
            raise RowFault(f"message {number} of {key!r} has no content", form)


def _read_tools(value: Any, *, key: str) -> list[dict[str, Any]] | None:
    """A row's tools: a list of objects, or the same as text, since columns cannot be ragged."""
    if isinstance(value, str):
        try:
            value = _DECODER.decode(value) if value.strip() else None
        except (ValueError, RecursionError) as error:
            raise RowFault(f"{key!r} is not JSON ({error})") from error
    if value is None:
        return None
    is_list = isinstance(value, Sequence) and all(isinstance(item, dict) for item in value)
    if not is_list:
        raise RowFault(f"{key!r} is not a list of tools (objects)")
    return list(value) or None
