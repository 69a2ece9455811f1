"""Prompts in lines of JSON. Holds a place for every 16th row, and a few blocks of lines.

One pass over the file finds the places and digests the bytes; blank lines are no rows.
"""

from __future__ import annotations

import os
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from typing import IO

from slurm_rl.errors import DataError
from slurm_rl.rollout.data.rows import (
    Keys,
    Prompt,
    check_plain,
    check_rows,
    choose_rows,
    make_prompt,
    parse_line,
)
from slurm_rl.storage.digest import digest_blocks

_STRIDE = 16
_READ_BYTES = 4 << 20
#: Blocks of `_STRIDE` rows that are kept: rows in order come from the one that was just read.
_NUM_BLOCKS = 4


class JsonlSource:
    """The rows of a file, or of a slice of it. Raises DataError with file and line."""

    def __init__(self, path: str, rows: slice, keys: Keys) -> None:
        self.name = path
        self._keys = keys
        #: Of rows 0, 16, 32, …: where its line begins, and the line's number less one.
        self._offsets, self._lines = array("Q"), array("Q")
        self._blocks: OrderedDict[int, list[tuple[int, bytes]]] = OrderedDict()
        self._file = _open(path)
        try:
            self._num_in_file, self._size = 0, 0
            whole = digest_blocks(self._scan())
            self._rows = choose_rows(name_slice(path, rows), rows, self._num_in_file)
            self.num_rows = len(self._rows)
            is_whole = self.num_rows == self._num_in_file
            self.fingerprint = whole if is_whole else digest_blocks(self._chosen_lines())
        except BaseException:
            self._file.close()
            raise

    def read(self, row: int) -> Prompt:
        number, line = self._line(self._rows[row])
        place = f"{self.name}:{number}"
        prompt = make_prompt(parse_line(line, place=place), row=row, place=place, keys=self._keys)
        if b"\\u" in line:  # may be half of a surrogate pair, which no tokenizer takes
            check_plain(prompt, place=place)
        return prompt

    def check(self) -> None:
        check_rows(self, self._keys)

    def close(self) -> None:
        self._file.close()

    def _scan(self) -> Iterator[bytes]:
        """Index the file; yields the rows in blocks, to be digested as `_chosen_lines` does."""
        offset, number, row = 0, 0, 0
        while lines := self._file.readlines(_READ_BYTES):
            kept = []
            for line in lines:
                if row_text := line.strip():
                    if row % _STRIDE == 0:
                        self._offsets.append(offset)
                        self._lines.append(number)
                    row += 1
                    kept.append(row_text + b"\n")
                offset += len(line)
                number += 1
            yield b"".join(kept)
        self._num_in_file, self._size = row, offset

    def _chosen_lines(self) -> Iterator[bytes]:
        return (self._line(row)[1].strip() + b"\n" for row in self._rows)

    def _line(self, row: int) -> tuple[int, bytes]:
        """A row of the file: the number of its line, and the line."""
        index, inside = divmod(row, _STRIDE)
        block = self._blocks.get(index)
        if block is None:
            block = self._blocks[index] = self._read_block(index)
            if len(self._blocks) > _NUM_BLOCKS:
                self._blocks.popitem(last=False)
        if inside >= len(block):
            raise DataError(f"{self.name}: was changed while it was read")
        return block[inside]

    def _read_block(self, index: int) -> list[tuple[int, bytes]]:
        begin = self._offsets[index]
        is_last = index + 1 == len(self._offsets)
        end = self._size if is_last else self._offsets[index + 1]
        data = os.pread(self._file.fileno(), end - begin, begin)
        numbered = enumerate(data.split(b"\n"), self._lines[index] + 1)
        return [item for item in numbered if item[1] and not item[1].isspace()]


def name_slice(path: str, rows: slice) -> str:
    """A path with its slice, as the user wrote it."""
    if rows == slice(None):
        return path
    start, stop = ("" if bound is None else bound for bound in (rows.start, rows.stop))
    return f"{path}@[{start}:{stop}]"


def _open(path: str) -> IO[bytes]:
    try:
        return open(path, "rb")
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror}", hint="give the path of a data set that is there"
        ) from error
