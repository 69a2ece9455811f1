"""Samples from files that others wrote: slime's debug dumps, and what `slurm-rl samples` exports.

    .pt          a dictionary {"rollout_id": …, "samples": [{…}, …]}, saved by torch
    .json        the same, or the list alone
    .jsonl       a sample a line
    .parquet     a sample a row; prompt, label, rewards and metadata are JSON text

A sample is a dictionary with slime's field names: `group_index`, `index`, `tokens` (prompt and
response), `response_length`, `reward`, `loss_mask`, `rollout_log_probs`, `status`, `prompt`,
`response`, `label`, `metadata`, `weight_versions`, `remove_sample`, `rollout_id`; exports add
`token_versions`, `rewards`, `seed` and `data_set`. A field that is missing or odd is a DataError
that names file, sample and field: nothing is guessed.

Such a file comes from somewhere else, so that no code of it runs: what torch cannot read as plain
values and tensors is refused.

Also a program, for processes that have no torch themselves:

    python -m slurm_rl.rollout.dumps FILE FOLDER VERSION [REWARD_KEY]

writes `samples.safetensors` and `samples.jsonl` into FOLDER, with VERSION as the weights version.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slurm_rl.errors import DataError, SlurmRlError
from slurm_rl.rollout.listing import PARQUET_TEXTS
from slurm_rl.rollout.samples import STATUSES, Sample, write_samples

_MAX_TOKEN, _MAX_INT = 2**31 - 1, 2**63 - 1
_VERSION = re.compile(r"(\d+)$")


def read_dump(path: Path, *, reward_key: str | None = None) -> list[Sample]:
    """The samples in `path`, sorted by group, numbered in their groups by their `index`.

    reward_key: which entry of a reward that is an object is trained on. Raises DataError.
    """
    entries = _read_entries(path)
    if not entries:
        raise DataError(f"{path}: it holds no samples")
    rows = [_Row(path, number, entry) for number, entry in enumerate(entries)]
    return _number([(row, _parse(row, reward_key)) for row in rows])


def as_version(sample: Sample, version: int) -> Sample:
    """The sample as if `version` had finished it; earlier tokens stay as much earlier."""
    shift = version - sample.weights_version
    versions = tuple(max(0, made + shift) for made in sample.token_versions)
    return replace(sample, weights_version=version, token_versions=versions)


@dataclass(frozen=True, slots=True)
class _Row:
    """One sample of the file, as it stands there."""

    path: Path
    number: int
    entry: Mapping[str, Any]

    def wrong(self, name: str, why: str) -> DataError:
        return DataError(f"{self.path}: sample {self.number}: {name} {why}")

    def get(self, name: str, kind: type, what: str, default: Any = None) -> Any:
        """The field, of this type; DataError if it is missing, without a default, or is another."""
        value: Any = self.entry.get(name)
        if value is None:
            if default is None:
                raise self.wrong(name, f"is missing; it must be {what}")
            return default
        if not _is_number(value, (kind,)) if kind is int else type(value) is not kind:
            raise self.wrong(name, f"= {_short(value)} is not {what}")
        return value

    def numbers(
        self, name: str, kinds: tuple[type, ...], what: str, default: Any = None
    ) -> tuple[Any, ...]:
        """The field as a tuple of numbers of these types; a tensor of them is taken too."""
        value: Any = self.entry.get(name)
        if hasattr(value, "tolist"):
            value = value.tolist()
        if value is None and default is not None:
            return tuple(default)
        is_list = isinstance(value, list | tuple)
        if not is_list or not all(_is_number(v, kinds) for v in value):
            missing = "is missing; it" if value is None else f"= {_short(value)}"
            raise self.wrong(name, f"{missing} must be a list of {what}")
        return tuple(value)


def _parse(row: _Row, reward_key: str | None) -> Sample:
    tokens = row.numbers("tokens", (int,), "token ids")
    if not all(0 <= token <= _MAX_TOKEN for token in tokens):
        raise row.wrong("tokens", "holds a number that is no token id")
    length = row.get("response_length", int, "a whole number")
    if not 0 <= length < len(tokens):
        raise row.wrong("response_length", f"= {length} leaves no prompt of {len(tokens)} tokens")
    split = len(tokens) - length
    reward, rewards = _parse_reward(row, reward_key)
    version = _parse_version(row)
    return Sample(
        group_index=row.get("group_index", int, "a whole number"),
        sample_index=row.get("index", int, "a whole number"),
        prompt_tokens=tokens[:split],
        response_tokens=tokens[split:],
        rollout_logprobs=_fitting(
            row,
            "rollout_log_probs",
            row.numbers("rollout_log_probs", (int, float), "numbers"),
            length,
        ),
        loss_mask=_parse_mask(row, length),
        prompt=_plain(row, "prompt", ""),
        response=row.get("response", str, "text", ""),
        label=_plain(row, "label", None),
        reward=reward,
        status=_parse_status(row),
        weights_version=version,
        seed=row.get("seed", int, "a whole number", 0),
        metadata=_plain(row, "metadata", {}, kind=dict),
        rewards=rewards,
        token_versions=_parse_token_versions(row, length, version),
        data_set=row.get("data_set", str, "text", "data"),
    )


def _parse_reward(row: _Row, reward_key: str | None) -> tuple[float | None, dict[str, float]]:
    value: Any = row.entry.get("reward")
    parts = _plain(row, "rewards", {}, kind=dict)
    if isinstance(value, dict):
        if reward_key is None or reward_key not in value:
            keys = ", ".join(sorted(map(str, value)))
            raise row.wrong(
                "reward", f"is an object with {keys}; the reward key names none of them"
            )
        parts = {str(k): v for k, v in value.items() if _is_number(v)} | parts
        value = value[reward_key]
    if not all(_is_number(part) for part in parts.values()):
        raise row.wrong("rewards", "must hold numbers")
    if value is not None and not _is_number(value):
        raise row.wrong("reward", f"= {_short(value)} is not a number")
    is_open = value is None or math.isnan(value)
    return None if is_open else float(value), {k: float(v) for k, v in parts.items()}


def _parse_mask(row: _Row, length: int) -> tuple[int, ...]:
    mask = row.numbers("loss_mask", (int, bool), "0 and 1", (1,) * length)
    if not all(value in (0, 1) for value in mask):
        raise row.wrong("loss_mask", "must hold 0 and 1 alone")
    _fitting(row, "loss_mask", mask, length)
    removed = row.get("remove_sample", bool, "true or false", default=False)
    return (0,) * length if removed else tuple(int(value) for value in mask)


def _parse_status(row: _Row) -> str:
    status = row.get("status", str, "text")
    if status not in STATUSES:
        raise row.wrong("status", f"= {_short(status)} is not one of {', '.join(STATUSES)}")
    return str(status)


def _parse_version(row: _Row) -> int:
    """The newest of `weight_versions`: numbers, or labels that end in one."""
    named = row.entry.get("weight_versions") or []
    if not isinstance(named, list | tuple):
        raise row.wrong("weight_versions", f"= {_short(named)} is not a list")
    found = []
    for name in named:
        match = _VERSION.search(str(name)) if type(name) in (int, str) else None
        if match is None or int(match[1]) > _MAX_TOKEN:
            raise row.wrong("weight_versions", f"names {_short(name)}, which ends in no number")
        found.append(int(match[1]))
    return max(found, default=0)


def _parse_token_versions(row: _Row, length: int, version: int) -> tuple[int, ...]:
    versions = row.numbers("token_versions", (int,), "whole numbers", ())
    if not versions:
        return ()
    if not all(0 <= made <= version for made in versions):
        raise row.wrong("token_versions", f"must lie between 0 and {version}")
    return _fitting(row, "token_versions", versions, length)


def _fitting(row: _Row, name: str, values: tuple[Any, ...], length: int) -> tuple[Any, ...]:
    if len(values) != length:
        raise row.wrong(name, f"has {len(values)} values, the response {length} tokens")
    return values


def _plain(row: _Row, name: str, default: Any, *, kind: type | None = None) -> Any:
    """A field that is kept as it is: it must be expressible as JSON."""
    value = row.entry.get(name)
    if value is None:
        return default
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise row.wrong(name, f"is not plain text, numbers, lists and objects ({error})") from error
    if kind is not None and not isinstance(value, kind):
        raise row.wrong(name, f"= {_short(value)} is not an object")
    return value


def _number(parsed: Sequence[tuple[_Row, Sample]]) -> list[Sample]:
    """Each group's samples by their index, numbered from 0, with their conversations."""
    groups: dict[int, list[tuple[_Row, Sample]]] = defaultdict(list)
    for row, sample in parsed:
        groups[sample.group_index].append((row, sample))
    done = []
    for _, members in sorted(groups.items()):
        members.sort(key=lambda item: item[1].sample_index)
        conversations: dict[Any, int] = {}
        for place, (row, sample) in enumerate(members):
            if place and members[place - 1][1].sample_index == sample.sample_index:
                raise row.wrong("index", f"= {sample.sample_index} is in its group twice")
            own = _conversation_of(row, place)
            number = conversations.setdefault(own, len(conversations))
            done.append(replace(sample, sample_index=place, rollout_index=number))
    return done


def _conversation_of(row: _Row, place: int) -> tuple[str, int]:
    """What samples share that are parts of one conversation."""
    for name in ("rollout_index", "rollout_id"):
        if row.entry.get(name) is not None:
            return name, row.get(name, int, "a whole number")
    return "alone", place


def _read_entries(path: Path) -> list[Mapping[str, Any]]:
    try:
        if path.suffix == ".jsonl":
            value: Any = _read_lines(path)
        elif path.suffix == ".json":
            value = json.loads(path.read_bytes())
        elif path.suffix == ".parquet":
            value = _read_parquet(path)
        else:
            value = _read_torch(path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON ({error})") from error
    entries = value.get("samples") if isinstance(value, dict) else value
    if not isinstance(entries, list | tuple):
        raise DataError(f"{path}: there is no list `samples` in it", hint="is it a rollout's dump?")
    for number, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            raise DataError(f"{path}: sample {number} is not an object")
    return list(entries)


def _read_lines(path: Path) -> list[Any]:
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: not JSON ({error})") from error
    return found


def _read_parquet(path: Path) -> list[Any]:
    """As `slurm-rl samples --export` writes it."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise DataError(
            f"{path}: parquet needs pyarrow", hint="`pip install pyarrow`, or export .jsonl"
        ) from error
    try:
        rows: list[Any] = parquet.read_table(path).to_pylist()
    except ArrowException as error:
        why = str(error).strip().partition("\n")[0]
        raise DataError(f"{path}: it is no parquet file, or damaged ({why})") from error
    for number, row in enumerate(rows):
        for name in PARQUET_TEXTS:
            if isinstance(row.get(name), str):
                row[name] = _read_text(path, number, name, row[name])
    return rows


def _read_text(path: Path, number: int, name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: row {number}: {name} = {_short(text)} is not JSON ({error}): it is no export"
            " of `slurm-rl samples`",
            hint="of other files write each sample as a line of .jsonl",
        ) from error


def _read_torch(path: Path) -> Any:
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # a damaged or foreign file raises whatever its parser raises
        why = str(error).strip().partition("\n")[0].partition(". ")[0][:200]
        raise DataError(
            f"{path}: it cannot be read without running code of it, or is damaged, or no dump of"
            f" samples ({type(error).__name__}: {why})",
            hint="only plain values and tensors are read; where you trust the file, load it "
            "yourself and write its samples as JSON lines",
        ) from error


def _is_number(value: Any, kinds: tuple[type, ...] = (int, float)) -> bool:
    """Whether it is a number of one of these types that an array can hold."""
    return type(value) in kinds and (type(value) is float or abs(value) <= _MAX_INT)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def convert(path: Path, folder: Path, *, version: int, reward_key: str | None = None) -> list[str]:
    """Write the samples of `path` into `folder` as our own files; their names."""
    samples: Iterable[Sample] = read_dump(path, reward_key=reward_key)
    return write_samples(folder, [as_version(sample, version) for sample in samples])


if __name__ == "__main__":
    _file, _folder, _version, *_key = sys.argv[1:]
    try:
        convert(
            Path(_file), Path(_folder), version=int(_version), reward_key=next(iter(_key), None)
        )
    except SlurmRlError as error:
        sys.exit(str(error))
