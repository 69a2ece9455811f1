"""What a rollout hands on to the next one: groups that were under way when it was closed.

Owns `partial.jsonl`, committed beside the samples, a line a group: its visit, and its samples as
far as they had come (without `partial_rollout` the visit alone: it starts afresh). The file of a
shard holds the groups of that shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from slurm_rl.errors import CorruptError
from slurm_rl.rollout.data import Prompt, Visit
from slurm_rl.rollout.fast_json import dumps, loads
from slurm_rl.rollout.journal import parse_sample
from slurm_rl.rollout.samples import Sample
from slurm_rl.storage.fs import POSIX, Fs

PARTIAL_NAME = "partial.jsonl"
#: What a prompt is; where it was read is no part of it, and must not be of a commit.
_PROMPT = tuple(entry.name for entry in fields(Prompt) if entry.compare)

#: A visit, and its samples so far; none where it starts afresh.
Carried = tuple[Visit, tuple[Sample, ...]]


def write_carried(root: Path, carried: Iterable[Carried], *, fs: Fs = POSIX) -> list[str]:
    """Write the groups below `root`, in the order of their numbers; the names of the files."""
    ordered = sorted(carried, key=lambda item: item[0].group_index)
    lines = [
        dumps(
            {
                "group_index": visit.group_index,
                "prompt": {name: getattr(visit.prompt, name) for name in _PROMPT},
                "tokens": visit.tokens,
                "samples": samples,
            }
        )
        for visit, samples in ordered
    ]
    if not lines:
        return []
    fs.create(root / PARTIAL_NAME, b"\n".join(lines) + b"\n")
    return [PARTIAL_NAME]


def read_carried(paths: Iterable[str | Path]) -> list[Carried]:
    """All groups of the files, by their numbers. Raises CorruptError naming the line."""
    found: list[Carried] = []
    for path in paths:
        for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
            try:
                found.append(_parse(loads(line)))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise CorruptError(f"{path}:{number}: no carried group ({error})") from error
    return sorted(found, key=lambda item: item[0].group_index)


def _parse(raw: Mapping[str, Any]) -> Carried:
    visit = Visit(raw["group_index"], Prompt(**raw["prompt"]), tuple(raw["tokens"]))
    return visit, tuple(parse_sample(entry) for entry in raw["samples"])
