"""Rows and what they become: `Prompt`, and the errors that say which row is bad.

The rules of a row are in slurm_rl/config/row_rules.py. A prompt holds only what JSON can: it goes
into journals and commits.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from slurm_rl.config import row_rules
from slurm_rl.config.row_rules import Keys, RowFault
from slurm_rl.errors import DataError

log = logging.getLogger(__name__)

__all__ = ["Keys", "Prompt", "Source"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row: `prompt` is a text or a list of chat messages; `row` counts inside the slice.

    place: where it was read, for people: `x.jsonl:12`.

    Example: `Prompt(3, "1+1=", "2", {}, data_set="data")`.
    """

    row: int
    prompt: Any
    label: Any
    metadata: dict[str, Any]
    data_set: str = "data"
    tools: list[dict[str, Any]] | None = None
    place: str = field(default="", compare=False)


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
    """A row's values as a prompt. Raises DataError that begins with `place`."""
    try:
        parts = row_rules.read_parts(values, keys)
    except RowFault as fault:
        raise bad_row(fault, place=place) from fault
    return Prompt(
        row, parts.prompt, parts.label, parts.metadata, keys.data_set, parts.tools, place=place
    )


def take_key(values: Mapping[str, Any], name: str, *, place: str, keys: Keys) -> Any:
    """What a row, or a table's columns, have under a key. Raises DataError."""
    try:
        return row_rules.take_value(values, name, keys)
    except RowFault as fault:
        raise bad_row(fault, place=place) from fault


def check_graded(prompt: Prompt, keys: Keys) -> None:
    """Raises DataError for a made row that its reward could not grade."""
    parts = row_rules.Parts(prompt.prompt, prompt.label, prompt.metadata, prompt.tools)
    try:
        if keys.grading is not None:
            row_rules.check_grading(parts, keys, keys.grading)
    except RowFault as fault:
        raise bad_row(fault, place=prompt.place) from fault


def check_plain(prompt: Prompt, *, place: str) -> None:
    """Raises DataError for values that JSON cannot hold: dates, bytes, NaN, half a character."""
    try:
        row_rules.check_plain([prompt.prompt, prompt.label, prompt.metadata, prompt.tools])
    except RowFault as fault:
        raise bad_row(fault, place=place) from fault


def parse_line(line: bytes, *, place: str) -> dict[str, Any]:
    """A line's object. Raises DataError."""
    try:
        return row_rules.decode_line(line)
    except RowFault as fault:
        raise bad_row(fault, place=place) from fault


def bad_row(fault: RowFault, *, place: str) -> DataError:
    return DataError(f"{place}: {fault.rule}", hint=fault.fix)
