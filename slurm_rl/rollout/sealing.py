"""From journals to the committed files: the admitted groups of a shard, by their numbers.

Owns the cut into parts, so that a rollout of any size is sealed in bounded memory: the first
`PART_SAMPLES` samples lie in the attempt directory itself, further ones in `part-0001/` and so on.
What is written depends on the groups alone, not on which journals they lie in.

What a crash leaves: files that nothing names; the next attempt seals anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from slurm_rl.errors import StorageError
from slurm_rl.rollout.journal import Entry, GroupReader
from slurm_rl.rollout.samples import Sample, write_rendered
from slurm_rl.storage.fs import POSIX, Fs

#: Samples of one part: some hundred megabytes of long answers.
PART_SAMPLES = 16_384

Count = Callable[[list[Sample]], None]
#: A sample, and its line of `samples.jsonl`.
Rendered = tuple[Sample, bytes]


def seal_groups(root: Path, entries: Iterable[Entry], *, count: Count, fs: Fs = POSIX) -> list[str]:
    """Write the samples of `entries` (sorted by group) below `root`; the names of the files.

    `count` is told of each group. The caller fsyncs and digests. Raises StorageError for a group
    that its journal does not hold any more as it was: the next attempt makes it again.
    """
    names: list[str] = []
    for number, part in enumerate(_cut(_read(entries, count))):
        folder = root if not number else root / f"part-{number:04d}"
        if number:
            fs.mkdir(folder)
        written = write_rendered(folder, [s for s, _ in part], (line for _, line in part), fs=fs)
        names += [str((folder / name).relative_to(root)) for name in written]
    return names


def _read(entries: Iterable[Entry], count: Count) -> Iterator[list[Rendered]]:
    with GroupReader() as reader:
        for entry in entries:
            group = reader.read(entry)
            if group is None:
                raise StorageError(
                    f"{entry.path}: group {entry.group_index} is gone from the journal"
                )
            count([sample for sample, _ in group])
            yield group


def _cut(groups: Iterable[list[Rendered]]) -> Iterator[list[Rendered]]:
    """Parts of whole groups; at least one, perhaps empty."""
    part: list[Rendered] = []
    num_parts = 0
    for group in groups:
        if part and len(part) + len(group) > PART_SAMPLES:
            yield part
            part, num_parts = [], num_parts + 1
        part.extend(group)
    if part or not num_parts:
        yield part
