"""What a data set's name says: where its rows are, of which kind, and which of them are meant.

    data/x.jsonl                one JSON object a line
    data/x.parquet              columns
    data/folder                 a folder that the library `datasets` saved
    reasoning_gym:chain_sum     made, not read
    data/x.jsonl@[100:-5]       a Python slice of the rows of any of them

Pure: it looks at no file. That a name without an ending is a folder is found out on opening.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

from slurm_rl.config.derive import PROCEDURAL

Kind = Literal["jsonl", "parquet", "folder", "procedural"]

_SLICE = re.compile(r"(?P<source>.*)@\[(?P<start>-?\d+)?:(?P<stop>-?\d+)?\]", re.DOTALL)
#: Endings of files that hold data, but not in a form that is read here, and what to do.
_OTHER_FORMS = {
    ".json": "write one object a line and call it .jsonl",
    ".arrow": "name the folder that `datasets` saved, not a file in it",
    **dict.fromkeys((".gz", ".zst", ".xz", ".bz2", ".zip"), "unpack it"),
    **dict.fromkeys(
        (".csv", ".tsv", ".txt", ".pkl", ".feather", ".orc"), "convert it to jsonl or parquet"
    ),
}
FORMS = "x.jsonl, x.parquet, a folder that `datasets` saved, reasoning_gym:NAME"


@dataclass(frozen=True, slots=True)
class DataName:
    """A data set's name in its parts: `DataName("jsonl", "/d/x.jsonl", slice(0, 10))`.

    source: the path, or the name of what makes a procedural data set.
    """

    kind: Kind
    source: str
    rows: slice


def parse_data_name(text: str) -> DataName:
    """`text` in its parts; without a slice, every row."""
    source, rows = parse_slice(text)
    if source.startswith(PROCEDURAL):
        return DataName("procedural", source.removeprefix(PROCEDURAL), rows)
    suffix = PurePath(source).suffix
    if suffix in (".jsonl", ".parquet"):
        return DataName("jsonl" if suffix == ".jsonl" else "parquet", source, rows)
    return DataName("folder", source, rows)


def parse_slice(text: str) -> tuple[str, slice]:
    """`data.jsonl@[10:20]` as a path and a slice; without one, every row."""
    found = _SLICE.fullmatch(text)
    if not found:
        return text, slice(None)
    start, stop = (None if text is None else int(text) for text in found.group("start", "stop"))
    return found["source"], slice(start, stop)


def _is_empty(rows: slice) -> bool:
    """Whether a slice has no rows, however many there are."""
    start, stop = rows.start or 0, rows.stop
    return stop is not None and (stop == 0 or (stop <= start and (stop < 0) == (start < 0)))


def find_fault(text: str) -> tuple[str, str] | None:
    """(rule, fix) where `text` cannot be the name of a data set; None if it can."""
    source, rows = parse_slice(text)
    if "@[" in source:
        return "has a slice that is none", "write it as x.jsonl@[10:20], without a step"
    if _is_empty(rows):
        return "has a slice without rows", "write the first row, then the one behind the last"
    if source.startswith(PROCEDURAL):
        if source == PROCEDURAL:
            return "names no data set", "write reasoning_gym:chain_sum"
        return None
    if not source.strip():
        return "is empty", f"it takes {FORMS}"
    suffix = PurePath(source).suffix.lower()
    if suffix in _OTHER_FORMS:
        return f"ends in {suffix}, which is not read", _OTHER_FORMS[suffix]
    return None
