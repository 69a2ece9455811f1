"""Rows and what they become: the keys under which a row holds its parts, and `Prompt`.

Owns the rules of a row and the words of their errors, whatever it was read from. A prompt holds
only what JSON can: it goes into journals and commits.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from slurm_rl.errors import DataError
from slurm_rl.types import canonical_json

log = logging.getLogger(__name__)

_ONE_OBJECT = "one JSON object a line"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row: `prompt` is a text or a list of chat messages; `row` counts inside the slice.

    Example: `Prompt(3, "1+1=", "2", {}, data_set="data")`.
    """

    row: int
    prompt: Any
    label: Any
    metadata: dict[str, Any]
    data_set: str = "data"
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Keys:
    """Under which keys a row of one data set holds its parts.

    places: field -> where the user set it, if not in `rollout`: `eval.aime.input_key`.
    """

    data_set: str
    input_key: str = "prompt"
    label_key: str | None = None
    metadata_key: str | None = None
    tool_key: str | None = None
    places: Mapping[str, str] = field(default_factory=dict)

    def place(self, name: str) -> str:
        return self.places.get(name, f"rollout.{name}")

    @property
    def used(self) -> list[str]:
        """The keys that a row is asked for."""
        keys = (self.input_key, self.label_key, self.metadata_key, self.tool_key)
        return list(dict.fromkeys(key for key in keys if key is not None))


class Source(Protocol):
    """Rows by number, none of which it holds in memory.

    name:        for people: the path, or `reasoning_gym:chain_sum`.
    fingerprint: digest of what the rows are made of; no path is part of it.
    """

    @property
    def name(self) -> str: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    def read(self, row: int) -> Prompt: ...
    def check(self) -> None: ...
    def close(self) -> None: ...


def check_rows(source: Source, keys: Keys) -> None:
    """Read every row in order, one at a time. Raises DataError for the first that is bad."""
    has_metadata = has_tools = False
    for row in range(source.num_rows):
        prompt = source.read(row)
        has_metadata = has_metadata or bool(prompt.metadata)
        has_tools = has_tools or prompt.tools is not None
    for name, is_there in (("metadata_key", has_metadata), ("tool_key", has_tools)):
        key = getattr(keys, name)
        if key is not None and not is_there:
            log.warning("%s: no row has anything under %r (%s)", source.name, key, keys.place(name))


def choose_rows(name: str, rows: slice, num_rows: int) -> range:
    """The rows of a file that a slice means. Raises DataError if there are none."""
    chosen = range(num_rows)[rows]
    if not chosen:
        raise DataError(
            f"{name} has no prompts ({num_rows} rows in all)",
            hint="give it rows, or mend the slice" if num_rows else "put prompts in it",
        )
    return chosen


def make_prompt(values: Mapping[str, Any], *, row: int, place: str, keys: Keys) -> Prompt:
    """A row's values as a prompt. Raises DataError that begins with `place`.

    A row may lack metadata and tools, but not the prompt, and not the label if one is asked for.
    """
    prompt = take_key(values, "input_key", keys.input_key, place=place, keys=keys)
    _check_prompt(prompt, place=place, key=keys.input_key)
    label = metadata = tools = None
    if keys.label_key is not None:
        label = take_key(values, "label_key", keys.label_key, place=place, keys=keys)
    if keys.metadata_key is not None:
        metadata = values.get(keys.metadata_key)
        if metadata is not None and not isinstance(metadata, dict):
            raise DataError(f"{place}: {keys.metadata_key!r} is not an object")
    if keys.tool_key is not None:
        tools = _read_tools(values.get(keys.tool_key), place=place, key=keys.tool_key)
    return Prompt(row, prompt, label, metadata or {}, keys.data_set, tools)


def take_key(
    values: Mapping[str, Any], field_name: str, key: str, *, place: str, keys: Keys
) -> Any:
    if key not in values:
        setting = keys.place(field_name)
        raise DataError(
            f"{place}: no key {key!r} ({setting}); there are {sorted(values)}",
            hint=f"set {setting} to one of them",
        )
    return values[key]


def check_plain(prompt: Prompt, *, place: str) -> None:
    """Raises DataError for values that JSON cannot hold: dates, bytes, NaN, half a character."""
    try:
        canonical_json([prompt.prompt, prompt.label, prompt.metadata, prompt.tools])
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{place}: holds a value that JSON cannot ({error})",
            hint="convert it to text or numbers",
        ) from error


def parse_line(line: bytes, *, place: str) -> dict[str, Any]:
    """A line's object. Raises DataError."""
    try:
        values = _DECODER.decode(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not JSON ({error})", hint=_ONE_OBJECT) from error
    if not isinstance(values, dict):
        raise DataError(f"{place}: a {type(values).__name__}", hint=_ONE_OBJECT)
    return values


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a number of JSON")


def _read_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large a number")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_read_float)


def _check_prompt(prompt: Any, *, place: str, key: str) -> None:
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, list):
        raise DataError(
            f"{place}: {key!r} is a {type(prompt).__name__};"
            " a prompt is a text or a list of messages"
        )
    if not prompt:
        raise DataError(f"{place}: {key!r} has no messages")
    for number, message in enumerate(prompt):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(
                f"{place}: message {number} of {key!r} has no role",
                hint='a message is {"role": "user", "content": "…"}',
            )


def _read_tools(value: Any, *, place: str, key: str) -> list[dict[str, Any]] | None:
    """A row's tools: a list of objects, or the same as text, since columns cannot be ragged."""
    if isinstance(value, str):
        try:
            value = _DECODER.decode(value) if value.strip() else None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{place}: {key!r} is not JSON ({error})") from error
    if value is None:
        return None
    is_list = isinstance(value, Sequence) and all(isinstance(item, dict) for item in value)
    if not is_list:
        raise DataError(f"{place}: {key!r} is not a list of tools (objects)")
    return list(value) or None
