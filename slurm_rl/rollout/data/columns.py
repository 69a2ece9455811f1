"""Prompts in columns: parquet files, and folders that the library `datasets` saved.

Parquet is read a row group at a time; a few groups are kept, up to a number of bytes. What
`datasets` saves are Arrow streams: they are mapped into memory, so that the kernel holds what is
used of them. They are read with pyarrow alone: `datasets` would bring a dozen packages, caches
and locks, for the same bytes.

Both digest all bytes of their files when they are opened.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

from slurm_rl.errors import DataError
from slurm_rl.rollout.data.jsonl import name_slice
from slurm_rl.rollout.data.rows import (
    Keys,
    Prompt,
    check_plain,
    check_rows,
    choose_rows,
    make_prompt,
    take_key,
)
from slurm_rl.storage.digest import digest_file, digest_value

#: Row groups that are kept, in bytes of memory; the one that is read is kept however large.
_KEPT_BYTES = 256 << 20
_STATE = "state.json"
_SPLITS = "dataset_dict.json"


class ParquetSource:
    """The rows of a parquet file, or of a slice of it. Raises DataError with file and row."""

    def __init__(self, path: str, rows: slice, keys: Keys) -> None:
        self.name = path
        self._keys = keys
        pyarrow = import_pyarrow(path)
        from pyarrow import parquet

        try:
            digest = digest_file(Path(path))
            self._file = parquet.ParquetFile(path)
        except pyarrow.ArrowInvalid as error:
            raise DataError(f"{path}: not a parquet file ({_first_line(error)})") from error
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}") from error
        info = self._file.metadata
        counts = [info.row_group(k).num_rows for k in range(info.num_row_groups)]
        self._starts = [0, *accumulate(counts)]
        self._groups: OrderedDict[int, Any] = OrderedDict()
        try:
            self._columns = choose_columns(path, self._file.schema_arrow.names, keys)
            self._rows = choose_rows(name_slice(path, rows), rows, self._starts[-1])
        except BaseException:
            self.close()
            raise
        self.num_rows = len(self._rows)
        self.fingerprint = digest_slice(digest, self._rows, num_rows=self._starts[-1])

    def read(self, row: int) -> Prompt:
        real = self._rows[row]
        group = bisect_right(self._starts, real) - 1
        place = f"{self.name}: row {real}"
        table = self._group(group, place=place)
        return read_row(table, real - self._starts[group], row=row, place=place, keys=self._keys)

    def check(self) -> None:
        check_rows(self, self._keys)

    def close(self) -> None:
        self._file.close()
        self._groups.clear()

    def _group(self, index: int, *, place: str) -> Any:
        table = self._groups.get(index)
        if table is not None:
            self._groups.move_to_end(index)
            return table
        try:
            table = self._file.read_row_group(index, columns=self._columns)
        except (OSError, ValueError) as error:  # pyarrow's errors are of these two
            raise DataError(f"{place}: cannot be read ({_first_line(error)})") from error
        self._groups[index] = table
        while len(self._groups) > 1 and sum(t.nbytes for t in self._groups.values()) > _KEPT_BYTES:
            self._groups.popitem(last=False)
        return table


class FolderSource:
    """The rows that `datasets` saved in a folder by `save_to_disk`, or a slice of them."""

    def __init__(self, path: str, rows: slice, keys: Keys) -> None:
        self.name = path
        self._keys = keys
        self._maps: list[Any] = []
        self._batches: list[Any] = []
        try:
            digests = [self._map(file) for file in list_files(Path(path))]
            names = self._batches[0].schema.names if self._batches else keys.used
            self._columns = choose_columns(path, names, keys)
            self._starts = [0, *accumulate(batch.num_rows for batch in self._batches)]
            self._rows = choose_rows(name_slice(path, rows), rows, self._starts[-1])
        except BaseException:
            self.close()
            raise
        self.num_rows = len(self._rows)
        digest = digest_value(digests)
        self.fingerprint = digest_slice(digest, self._rows, num_rows=self._starts[-1])

    def _map(self, file: Path) -> str:
        """Map a file's batches into memory; its digest."""
        pyarrow = import_pyarrow(self.name)
        try:
            digest = digest_file(file)
            self._maps.append(pyarrow.memory_map(str(file)))
            self._batches += pyarrow.ipc.open_stream(self._maps[-1])
        except (OSError, ValueError) as error:  # pyarrow's errors are of these two
            raise DataError(f"{file}: cannot be read ({_first_line(error)})") from error
        return digest

    def read(self, row: int) -> Prompt:
        real = self._rows[row]
        index = bisect_right(self._starts, real) - 1
        batch = self._batches[index].select(self._columns)
        place = f"{self.name}: row {real}"
        return read_row(batch, real - self._starts[index], row=row, place=place, keys=self._keys)

    def check(self) -> None:
        check_rows(self, self._keys)

    def close(self) -> None:
        self._batches = []
        for mapped in self._maps:
            mapped.close()


def import_pyarrow(path: str) -> ModuleType:
    """pyarrow, which only these two forms need. Raises DataError that says how to install it."""
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(
            f"{path}: reading it needs pyarrow", hint="pip install 'slurm-rl[rollout]'"
        ) from error
    module: ModuleType = pyarrow
    return module


def list_files(folder: Path) -> list[Path]:
    """The Arrow files of a folder that `datasets` saved, in order. Raises DataError."""
    if not folder.exists():
        raise DataError(f"{folder}: No such file or directory")
    if not folder.is_dir():
        raise DataError(f"{folder}: is neither .jsonl, .parquet nor a folder")
    if (folder / _SPLITS).is_file():
        splits = sorted(path.parent.name for path in folder.glob(f"*/{_STATE}"))
        raise DataError(
            f"{folder}: holds several splits ({', '.join(splits)})",
            hint=f"name one of them, as {folder}/{splits[0] if splits else 'train'}",
        )
    try:
        state = json.loads((folder / _STATE).read_bytes())
        files = [folder / entry["filename"] for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{folder}: is not a folder that `datasets` saved (no usable {_STATE})",
            hint="make one with save_to_disk, or name a jsonl or parquet file",
        ) from error
    if state.get("_indices_data_files"):
        raise DataError(f"{folder}: keeps its rows by indices", hint="save it again")
    return files


def choose_columns(name: str, columns: list[str], keys: Keys) -> list[str]:
    """The columns that are read. Raises DataError if the prompt's or label's is not there."""
    there = dict.fromkeys(columns)
    take_key(there, "input_key", place=name, keys=keys)
    if keys.label_key is not None:
        take_key(there, "label_key", place=name, keys=keys)
    return [key for key in keys.used if key in there]


def read_row(table: Any, index: int, *, row: int, place: str, keys: Keys) -> Prompt:
    """One row of a table as a prompt of plain values."""
    try:
        (values,) = table.slice(index, 1).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's errors are of these two
        raise DataError(f"{place}: cannot be read ({_first_line(error)})") from error
    prompt = make_prompt(values, row=row, place=place, keys=keys)
    check_plain(prompt, place=place)
    return prompt


def digest_slice(digest: str, rows: range, *, num_rows: int) -> str:
    """Fingerprint of `rows` of files with `digest`."""
    if len(rows) == num_rows:
        return digest
    return digest_value([digest, rows.start, rows.stop])


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
