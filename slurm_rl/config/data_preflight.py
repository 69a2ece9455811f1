"""Looks at the data that the settings name: is it there, and do its first rows have the keys?

For `validate` and before a `submit`, on the login node; the rules of rows are row_preflight.py's.
Where a library is missing here but the stage runs in another interpreter, what needs it is not
looked at: the first job of the stage does that.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Iterable, Iterator
from pathlib import Path as File
from typing import Any

from slurm_rl.config.data_checks import DataUse, data_uses
from slurm_rl.config.data_names import FORMS, DataName, parse_data_name
from slurm_rl.config.derive import PROCEDURAL, stage_container, stage_python
from slurm_rl.config.problems import Path, Problem, nearest
from slurm_rl.config.row_preflight import (
    Row,
    check_row,
    check_system_prompt,
    decode_lines,
    keys_of,
    read_columns,
    read_lines,
    row_problem,
)
from slurm_rl.config.row_rules import RowFault
from slurm_rl.config.schema import Settings

Problems = Iterator[Problem]

_NEEDED = ("input_key", "label_key")
#: Rows may lack these, but not all of them.
_OPTIONAL = ("metadata_key", "tool_key")


def check_data_files(settings: Settings) -> Problems:
    """What is missing or not as it should be, a line for each data set at most per key."""
    for use in data_uses(settings):
        name = parse_data_name(use.text)
        said = check_system_prompt(settings, use)
        if said is not None:
            yield said
        if name.kind == "procedural":
            yield from _check_procedural(settings, use, name.source)
        elif name.kind == "jsonl":
            yield from _check_jsonl(settings, use, name)
        else:
            yield from _check_columns(settings, use, name)


def _check_jsonl(settings: Settings, use: DataUse, name: DataName) -> Problems:
    path = File(name.source)
    if not path.is_file():
        yield Problem(use.at, "is not a file", "mend the path", use.text)
        return
    try:
        lines = read_lines(path, name.rows)
        is_empty = not lines and not read_lines(path, slice(0, 1))
    except OSError as error:
        yield Problem(use.at, f"cannot be read ({error.strerror})", "mend the file", use.text)
        return
    if is_empty:
        yield Problem(use.at, "is empty", "put prompts in it", use.text)
    elif lines is not None and not lines:
        yield _beyond(use)
    elif lines is not None:
        yield from _check_rows(settings, use, decode_lines(name.source, lines), name.source)


def _beyond(use: DataUse) -> Problem:
    return Problem(use.at, "has no rows there: the data has fewer", "mend the slice", use.text)


def _check_rows(
    settings: Settings, use: DataUse, rows: Iterable[Row | RowFault], source: str
) -> Problems:
    """The first thing that is wrong with rows, then what none of them has."""
    seen: dict[str, Any] = {}
    for row in rows:
        if isinstance(row, RowFault):
            yield row_problem(use, row)
            return
        place, values = row
        problem = next(_lacking(settings, use, _NEEDED, values, place), None)
        problem = problem or check_row(settings, use, row)
        if problem is not None:
            yield problem
            return
        seen.update(values)
    yield from _lacking(settings, use, _OPTIONAL, seen, f"the first lines of {source}")


def _check_columns(settings: Settings, use: DataUse, name: DataName) -> Problems:
    path = File(name.source)
    if not path.exists():
        yield Problem(use.at, "is not there", "mend the path", name.source)
        return
    if name.kind == "folder":
        problem, path = _find_arrow(use, path)
        if problem is not None:
            yield problem
            return
    elif not path.is_file():
        yield Problem(use.at, "is not a file", "mend the path", name.source)
        return
    problem = _check_library(settings, use, "pyarrow", "rollout")
    if problem is not None:
        yield problem
        return
    try:
        names = _column_names(path, kind=name.kind)
        if names is None:
            return
        lacking = list(_lacking(settings, use, (*_NEEDED, *_OPTIONAL), names, name.source))
        yield from lacking
        if lacking:
            return
        rows = read_columns(path, name.rows, keys_of(settings, use), kind=name.kind)
    except (OSError, ValueError) as error:  # pyarrow's errors are of these two
        rule = f"cannot be read ({str(error).partition(chr(10))[0]})"
        yield Problem(use.at, rule, "mend the file", str(path))
        return
    found = (check_row(settings, use, row) for row in rows)
    yield from [problem for problem in found if problem is not None][:1]


def _find_arrow(use: DataUse, folder: File) -> tuple[Problem | None, File]:
    """The first Arrow file of a folder that `datasets` saved, or what is wrong with the folder."""
    text = str(folder)
    if not folder.is_dir():
        return Problem(use.at, "is no form of data that is read", f"use {FORMS}", text), folder
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
        fix = f"name one of them: {', '.join(splits)}"
        return Problem(use.at, "holds several splits", fix, text), folder
    try:
        state = json.loads((folder / "state.json").read_bytes())
        return None, folder / state["_data_files"][0]["filename"]
    except (OSError, ValueError, LookupError, TypeError):
        rule = "is not a folder that `datasets` saved"
        return Problem(use.at, rule, "make it with save_to_disk", text), folder


def _column_names(path: File, *, kind: str) -> list[str] | None:
    """The columns; None where pyarrow is not here. Raises OSError and ValueError."""
    try:
        pyarrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        return None
    if kind == "parquet":
        return list(parquet.read_schema(path).names)
    with pyarrow.memory_map(str(path)) as mapped:
        return list(pyarrow.ipc.open_stream(mapped).schema.names)


def _check_procedural(settings: Settings, use: DataUse, name: str) -> Problems:
    problem = _check_library(settings, use, "reasoning_gym", "procedural")
    if problem is not None:
        yield problem
        return
    try:
        library = importlib.import_module("reasoning_gym")
        known = importlib.import_module("reasoning_gym.factory").DATASETS
    except ImportError:
        return
    if name not in known:
        close = nearest(name, known)
        fix = f"did you mean {PROCEDURAL}{close}?" if close else "see the library's list"
        yield Problem(use.at, "is not a data set of reasoning-gym", fix, use.text)
        return
    try:
        library.create_dataset(name, **use.options)
    except Exception as error:  # each data set checks its options in its own way
        rule = f"is refused by {name} ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        fix = "see the data set's configuration in reasoning-gym"
        yield Problem(use.options_at, rule, fix, use.options)


def _check_library(settings: Settings, use: DataUse, module: str, extra: str) -> Problem | None:
    """A problem if the stage, which runs in this very interpreter, lacks a library."""
    is_elsewhere = (
        stage_container(settings, use.kind).runtime != "none"
        or stage_python(settings, use.kind) is not None
    )
    if is_elsewhere or importlib.util.find_spec(module) is not None:
        return None
    package = module.replace("_", "-")
    fix = f"pip install 'slurm-rl[{extra}]'"
    return Problem(use.at, f"needs {package}, which is not installed", fix, use.text)


def _lacking(
    settings: Settings, use: DataUse, fields: tuple[str, ...], names: Any, place: str
) -> Problems:
    """A problem for each key that is asked for and is not among `names`.

    Of what rows may lack, only what a data set asks for itself counts, or the only one: in a
    mixture some may have it.
    """
    for field in fields:
        own = getattr(use.own, field)
        key = getattr(settings.rollout, field) if own is None else own
        is_meant = field in _NEEDED or own is not None or use.own_at is None
        if key is not None and key not in names and is_meant:
            at: Path = ("rollout", field) if own is None else (*(use.own_at or ()), field)
            there = ", ".join(names).encode(errors="backslashreplace").decode()
            yield Problem(at, f"is not a key of {place}", f"it has {there}", key)
