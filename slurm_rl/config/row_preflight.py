"""Looks at the first rows of a data set: would the rollout take them?

Reads few rows, starts nothing, and needs no library but pyarrow, where that is. Of the tokenizer it
knows what the settings say: the characters of `init_model`.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path as File
from typing import Any

from slurm_rl.config.data_checks import DataUse
from slurm_rl.config.problems import Problem, format_path
from slurm_rl.config.row_rules import (
    Keys,
    Parts,
    RowFault,
    check_plain,
    decode_line,
    plan_keys,
    read_parts,
)
from slurm_rl.config.schema import SPECIAL_TOKENS, Settings

#: Rows that are looked at; the first rollout reads them all.
NUM_ROWS = 20
#: Of a larger file no slice is looked at that counts from its end, or begins far behind.
_WHOLE_BYTES, _NUM_SKIPPED = 64 << 20, 100_000
#: Tokens of the tokenizer of characters that are longer than one.
_SPECIAL = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))

#: Where a row is, for people, and what it holds.
Row = tuple[str, Mapping[str, Any]]


def read_lines(path: File, rows: slice) -> list[tuple[int, bytes]] | None:
    """The first lines of a slice, each with its number; None if finding them would take long.

    Raises OSError.
    """
    start, stop = rows.start or 0, rows.stop
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        numbered = ((number, line) for number, line in enumerate(file, 1) if line.strip())
        if start < 0 or (stop is not None and stop < 0):
            return None if size > _WHOLE_BYTES else list(numbered)[rows][:NUM_ROWS]
        if start > _NUM_SKIPPED and size > _WHOLE_BYTES:
            return None
        end = start + NUM_ROWS if stop is None else min(stop, start + NUM_ROWS)
        return list(islice(numbered, start, end))


def decode_lines(path: str, lines: Iterable[tuple[int, bytes]]) -> Iterator[Row | RowFault]:
    """The rows of lines; for one that is none, what is wrong with it."""
    for number, line in lines:
        place = f"{path}:{number}"
        try:
            yield place, decode_line(line)
        except RowFault as fault:
            yield RowFault(f"{place}: {fault.rule}", fault.fix)


def read_columns(path: File, rows: slice, keys: Keys, *, kind: str) -> list[Row]:
    """The first rows of columns, where the slice begins near; none where it does not.

    Of a folder, whose rows nobody has counted, no slice is looked at that counts from their end.
    Raises OSError and ValueError.
    """
    start, stop = rows.start or 0, rows.stop
    pyarrow = importlib.import_module("pyarrow")
    if kind == "parquet":
        parquet = importlib.import_module("pyarrow.parquet")
        with parquet.ParquetFile(path) as table:
            start, stop, _ = rows.indices(table.metadata.num_rows)
            if start > NUM_ROWS:
                return []
            columns = [key for key in keys.used if key in table.schema_arrow.names]
            batches = table.iter_batches(batch_size=NUM_ROWS, columns=columns)
            found = [batch.to_pylist() for batch in islice(batches, 2)]
    else:
        if not 0 <= start <= NUM_ROWS or (stop is not None and stop < 0):
            return []
        with pyarrow.memory_map(str(path)) as mapped:
            batches = pyarrow.ipc.open_stream(mapped)
            columns = [key for key in keys.used if key in batches.schema.names]
            first = (batch.select(columns).slice(0, 2 * NUM_ROWS) for batch in batches)
            found = [batch.to_pylist() for batch in islice(first, 1)]
    end = start + NUM_ROWS if stop is None else min(stop, start + NUM_ROWS)
    numbered = list(enumerate(chain.from_iterable(found)))[start:end]
    return [(f"{path}: row {number}", values) for number, values in numbered]


def keys_of(settings: Settings, use: DataUse) -> Keys:
    """The keys of a data set; its name is of no use here."""
    return plan_keys(settings, use.own, name="data", place=format_path(use.own_at or ("rollout",)))


def check_row(settings: Settings, use: DataUse, row: Row) -> Problem | None:
    """What the first rollout would refuse in a row."""
    place, values = row
    try:
        parts = read_parts(values, keys_of(settings, use))
        check_text(settings, use, parts)
        check_plain([parts.prompt, parts.label, parts.metadata, parts.tools])
    except RowFault as fault:
        return row_problem(use, RowFault(f"{place}: {fault.rule}", fault.fix))
    return None


def row_problem(use: DataUse, fault: RowFault) -> Problem:
    """A fault that begins with its place, as a line about the data set."""
    return Problem(use.at, f"has a bad row: {fault.rule}", fault.fix, use.text)


def check_text(settings: Settings, use: DataUse, parts: Parts) -> None:
    """Raises RowFault for a prompt that can become no tokens."""
    prompt, has_template = parts.prompt, use.has_template(settings.rollout)
    if not has_template and not isinstance(prompt, str):
        at = "rollout" if use.own.apply_chat_template is None else format_path(use.own_at or ())
        rule = "the prompt is a list of messages, which needs the chat template"
        raise RowFault(rule, f"set {at}.apply_chat_template: true")
    if not has_template and not prompt:
        raise RowFault("the prompt is empty", "write it, or take the row out")
    # The template of a model of characters writes out the texts and nothing else.
    if "chat_template" in settings.rollout.apply_chat_template_kwargs and has_template:
        return
    texts = [prompt] if isinstance(prompt, str) else [m.get("content") for m in prompt]
    for text in texts:
        unknown = unknown_character(settings, str(text))
        if unknown is not None:
            rule = f"the prompt has {unknown!r}, which init_model.characters lacks"
            raise RowFault(rule, "add it there, or mend the row")
    if settings.init_model is not None and not any(texts) and not _system_prompt(settings, use):
        raise RowFault("the prompt is empty", "write it, or take the row out")


def check_system_prompt(settings: Settings, use: DataUse) -> Problem | None:
    """A text that the model's tokenizer cannot take would be put before every prompt."""
    text = _system_prompt(settings, use)
    unknown = unknown_character(settings, text)
    if unknown is None or "chat_template" in settings.rollout.apply_chat_template_kwargs:
        return None
    at = ("rollout",) if use.own.system_prompt is None else use.own_at or ()
    rule = f"has {unknown!r}, which init_model.characters lacks"
    return Problem((*at, "system_prompt"), rule, "add it there, or change the text", text)


def _system_prompt(settings: Settings, use: DataUse) -> str:
    if not use.has_template(settings.rollout):
        return ""
    own = use.own.system_prompt
    return (settings.rollout.system_prompt if own is None else own) or ""


def unknown_character(settings: Settings, text: str) -> str | None:
    """The first character that the tokenizer of `init_model` does not know."""
    if settings.init_model is None:
        return None
    known = set(settings.init_model.characters)
    return next((c for c in _SPECIAL.sub("", text) if c not in known), None)
