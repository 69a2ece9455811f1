"""Prompts that are made, not read: the data sets of the library `reasoning-gym`.

A row is made when it is asked for, from the data set's options and the row's number. Its answer
is the label; what the library's own scoring needs goes along as metadata, and `score_answer`
takes it from there. Some of the library's data sets depend on the process that makes them
(`slurm_rl.config.data_checks` names them), and some score by Python types that JSON does not
keep: so an entry is made again for scoring where that gives the same, and else taken as it was
stored.
"""

from __future__ import annotations

import difflib
import json
import random
from functools import lru_cache
from types import ModuleType
from typing import Any

from slurm_rl.config.derive import PROCEDURAL
from slurm_rl.errors import DataError
from slurm_rl.rollout.data.jsonl import name_slice
from slurm_rl.rollout.data.rows import Keys, Prompt, check_graded, choose_rows
from slurm_rl.storage.digest import digest_value

#: Key of a row's origin, beside the entry's own metadata, and name of the reward that reads it.
REWARD_NAME = "reasoning_gym"


class ProceduralSource:
    """The rows of a data set of the library, or of a slice of them.

    is_rewarded: rows name the library's own scoring as their reward (`metadata["rm_type"]`).
    """

    def __init__(
        self, source: str, rows: slice, keys: Keys, *, options: dict[str, Any], is_rewarded: bool
    ) -> None:
        self.name = PROCEDURAL + source
        self._source, self._keys, self._options = source, keys, options
        self._is_rewarded = is_rewarded
        self._data = make_data(source, json.dumps(options, sort_keys=True))
        self._rows = choose_rows(name_slice(self.name, rows), rows, len(self._data))
        self.num_rows = len(self._rows)
        self.fingerprint = digest_value(
            [source, options, self._rows.start, self._rows.stop, library_version()]
        )

    def read(self, row: int) -> Prompt:
        index = self._rows[row]
        place = f"{self.name}: row {index}"
        entry = to_plain(make_entry(self._data, index, place=place))
        question, answer = entry["question"], entry["answer"]
        origin = {"name": self._source, "options": self._options, "index": index}
        origin |= {"question": question, "answer": answer}
        metadata = {**entry["metadata"], REWARD_NAME: origin}
        if self._is_rewarded:
            metadata["rm_type"] = REWARD_NAME
        prompt = Prompt(row, question, answer, metadata, self._keys.data_set, place=place)
        check_graded(prompt, self._keys)
        return prompt

    def check(self) -> None:
        """Make the first and the last row: the rest is the library's, and may take long."""
        self.read(0)
        self.read(self.num_rows - 1)

    def close(self) -> None:
        pass


def score_answer(metadata: dict[str, Any], answer: str | None) -> float:
    """What the library gives for `answer`; `metadata` is that of a row. Raises DataError."""
    origin = metadata.get(REWARD_NAME)
    if not isinstance(origin, dict):
        raise DataError(
            "a sample has no metadata of reasoning-gym",
            hint="use this reward for the prompts of a reasoning_gym data set",
        )
    name, index = origin["name"], origin["index"]
    stored = {"question": origin["question"], "answer": origin["answer"], "metadata": metadata}
    data = make_data(name, json.dumps(origin["options"], sort_keys=True))
    made = make_entry(data, index, place=f"{PROCEDURAL}{name}: row {index}")
    plain = to_plain(made)
    # Others may have added to a sample's metadata since.
    was_stored = {key: metadata.get(key) for key in plain["metadata"]}
    is_same = plain == stored | {"metadata": was_stored}
    return float(data.score_answer(answer, made if is_same else stored))


@lru_cache(maxsize=64)
def make_data(name: str, options: str) -> Any:
    """A data set of the library; `options` is JSON. Raises DataError."""
    library = import_library(name)
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=1)
        raise DataError(
            f"{PROCEDURAL}{name}: reasoning-gym has no such data set",
            hint=f"did you mean {close[0]}?" if close else "see its list of data sets",
        )
    try:
        return library.create_dataset(name, **json.loads(options))
    except Exception as error:  # each data set checks its options in its own way
        raise DataError(
            f"{PROCEDURAL}{name}: refuses its options {options}"
            f" ({type(error).__name__}: {str(error).partition(chr(10))[0]})",
            hint="see the data set's configuration in reasoning-gym",
        ) from error


def make_entry(data: Any, index: int, *, place: str) -> dict[str, Any]:
    """An entry, as a function of the data set's options and `index`. Raises DataError."""
    import numpy

    # Some generators (codeio, list_functions) draw from these two, whatever the data set's seed.
    before = random.getstate(), numpy.random.get_state()
    random.seed(index)
    numpy.random.seed(index % 2**32)
    try:
        entry: dict[str, Any] = data[index]
    except Exception as error:  # generators fail in their own ways for odd options
        raise DataError(f"{place}: cannot be made ({type(error).__name__}: {error})") from error
    finally:
        random.setstate(before[0])
        numpy.random.set_state(before[1])
    return entry


def to_plain(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry as it looks after a trip through JSON; what JSON does not know becomes text."""
    plain: dict[str, Any] = json.loads(json.dumps(entry, default=str))
    return plain


def import_library(name: str) -> ModuleType:
    """reasoning-gym. Raises DataError that says how to install it."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise DataError(
            f"{PROCEDURAL}{name}: needs reasoning-gym", hint="pip install 'slurm-rl[procedural]'"
        ) from error
    module: ModuleType = reasoning_gym
    return module


def library_version() -> str:
    from importlib import metadata

    return metadata.version("reasoning-gym")
