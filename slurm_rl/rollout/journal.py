"""The journal of a rollout attempt: one line a finished group, so that a kill loses little.

Owns `journal.jsonl` in the attempt directory. Each line is

    <digest> {"key": …, "group_index": …, "outcome": …, "keep": …, "reason": …}
        <tab>{a sample's line}<tab>{another's}…<tab>{"response_tokens": [[…], […], …], …}

(in one line) so that whoever only wants to know what is done need not parse the samples, and the
samples' lines are sealed as they stand. Lines are appended
whole and fsynced once a second. Later attempts of the stage, and its other shards, take groups
over from here. The journal is never committed: at the end its groups are sealed (`sealing.py`).

What a crash may lose: groups of the last second. A torn last line is normal and ignored; a line
that is damaged elsewhere is reported, and its group is generated again. `key` digests all that a
group depends on, so that a group which was made from anything else is never taken over.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import orjson

from slurm_rl.rollout.fast_json import dumps, loads
from slurm_rl.rollout.samples import RoutedSample, Sample, place_of, render_sample
from slurm_rl.storage.digest import digest_bytes
from slurm_rl.storage.fs import POSIX, Fs
from slurm_rl.types import JOURNAL_NAME

log = logging.getLogger(__name__)

Outcome = Literal["graded", "dropped", "ungraded"]
_ROUTED = "routed_experts"
_TUPLES = ("prompt_tokens", "response_tokens", "rollout_logprobs", "loss_mask", "token_versions")
#: A journal is read in pieces of this size, and the rest of a line.
_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """What a line says of its group, and where its samples lie.

    outcome: `graded`, `dropped` (its reward failed) or `ungraded` (a service is down).
    keep:    whether it may be trained on: it was not dropped, and passed the filter; else `reason`.
    """

    key: str
    group_index: int
    outcome: Outcome
    keep: bool
    reason: str
    path: Path
    offset: int
    size_bytes: int


class Journal:
    """Writer of one attempt's journal; a context manager. `append` may be called by one thread."""

    def __init__(self, path: Path, *, fs: Fs = POSIX, interval_s: float = 1.0) -> None:
        self._path = path
        self._fs = fs
        self._interval_s = interval_s
        self._size = 0
        self._dirty = threading.Event()
        self._closing = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._sync_often, name="journal", daemon=True)

    def __enter__(self) -> Journal:
        self._fs.create(self._path, b"")
        self._fs.fsync_dir(self._path.parent)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closing.set()
        self._thread.join()
        self._sync()

    def append(
        self,
        key: str,
        samples: Sequence[Sample],
        *,
        outcome: Outcome = "graded",
        keep: bool = True,
        reason: str = "",
    ) -> Entry:
        """Add a finished group. On return it is with the operating system, not yet on the disk."""
        if self._failure is not None:
            raise self._failure
        line = render_line(key, samples, outcome=outcome, keep=keep, reason=reason)
        self._fs.append(self._path, line)
        self._dirty.set()
        offset, self._size = self._size, self._size + len(line)
        index = samples[0].group_index
        return Entry(key, index, outcome, keep, reason, self._path, offset, len(line))

    def _sync_often(self) -> None:
        while not self._closing.wait(self._interval_s):
            try:
                self._sync()
            except OSError as error:  # told to the writer at its next append
                self._failure = error
                return

    def _sync(self) -> None:
        if self._dirty.is_set():
            self._dirty.clear()
            self._fs.fsync(self._path)


def render_line(
    key: str,
    samples: Sequence[Sample],
    *,
    outcome: Outcome = "graded",
    keep: bool = True,
    reason: str = "",
) -> bytes:
    """One group as a line of the journal."""
    head = {
        "key": key,
        "group_index": samples[0].group_index,
        "outcome": outcome,
        "keep": keep,
        "reason": reason,
    }
    columns = {name: [getattr(sample, name) for sample in samples] for name in _TUPLES}
    if any(isinstance(sample, RoutedSample) for sample in samples):
        columns[_ROUTED] = [getattr(sample, _ROUTED, "") for sample in samples]
    lines = [render_sample(sample) for sample in samples]
    body = b"\t".join([dumps(head), *lines, dumps(columns)])  # JSON has no tab
    return digest_bytes(body).encode() + b" " + body + b"\n"


def parse_head(line: bytes) -> dict[str, Any] | None:
    """The head of a line (without its end); None if the line is not what was written."""
    digest, _, body = line.partition(b" ")
    if digest != digest_bytes(body).encode():
        return None
    head: dict[str, Any] = loads(body.partition(b"\t")[0])
    return head


def parse_samples(line: bytes) -> list[Sample]:
    """The samples of a line that `parse_head` found whole."""
    return [sample for sample, _ in parse_rendered(line)]


def parse_rendered(line: bytes) -> list[tuple[Sample, bytes]]:
    """The samples of such a line, each with its own line of `samples.jsonl`."""
    _, *lines, columns = line.split(b"\t")
    fields = loads(b"[" + b",".join(lines) + b"]")
    numbers = orjson.loads(columns)  # tokens and the like: none is larger than 64 bits
    rows = zip(fields, *(numbers[name] for name in _TUPLES), strict=True)
    found = [_join(*row) for row in rows]
    if (routed := numbers.get(_ROUTED)) is not None:
        found = [_with_routing(s, text) for s, text in zip(found, routed, strict=True)]
    return list(zip(found, lines, strict=True))


def _with_routing(sample: Sample, text: str) -> Sample:
    own = {f.name: getattr(sample, f.name) for f in fields(sample)}
    return RoutedSample(**own, routed_experts=text)


def _join(
    raw: dict[str, Any],
    prompt_tokens: list[int],
    response_tokens: list[int],
    rollout_logprobs: list[float],
    loss_mask: list[int],
    token_versions: list[int],
) -> Sample:
    """A sample from its line and its numbers; by place, which is twice as quick as by name."""
    return Sample(
        raw["group_index"],
        raw["index"],
        tuple(prompt_tokens),
        tuple(response_tokens),
        tuple(rollout_logprobs),
        tuple(loss_mask),
        raw["prompt"],
        raw["response"],
        raw["label"],
        raw["reward"],
        raw["status"],
        raw["weights_version"],
        raw["seed"],
        raw["metadata"],
        raw["rewards"],
        tuple(token_versions),
        raw["rollout_index"],
        raw["data_set"],
    )


def parse_sample(entry: dict[str, Any]) -> Sample:
    """A sample from its fields as JSON has them."""
    for name in _TUPLES:
        entry[name] = tuple(entry[name])
    return Sample(**entry)


def read_group(entry: Entry) -> list[Sample] | None:
    """The samples of a finished group; None if its line is not there any more as it was."""
    with GroupReader() as reader:
        found = reader.read(entry)
    return None if found is None else [sample for sample, _ in found]


#: Far fewer than a process may have: a stage may have hundreds of shards, and attempts of each.
_MOST_OPEN = 64


class GroupReader:
    """Reads groups of some journals, of which it keeps a few open. A context manager."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}

    def __enter__(self) -> GroupReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def read(self, entry: Entry) -> list[tuple[Sample, bytes]] | None:
        """The samples of a finished group, sorted, each with its line of `samples.jsonl`; None if
        the group is not there any more as it was."""
        try:
            file = self._open(entry.path)
            line = os.pread(file, entry.size_bytes, entry.offset).rstrip(b"\n")
        except OSError:
            return None
        head = parse_head(line)
        if head is None or head["key"] != entry.key:
            return None
        return sorted(parse_rendered(line), key=lambda item: place_of(item[0]))

    def _open(self, path: Path) -> int:
        file = self._files.get(path)
        if file is None:
            if len(self._files) == _MOST_OPEN:
                os.close(self._files.pop(next(iter(self._files))))
            file = self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return file


class JournalReader:
    """Follows the journals of some attempts: each `poll` tells what was appended since the last."""

    def __init__(self) -> None:
        self._offsets: dict[Path, int] = {}
        self._lines: dict[Path, int] = {}

    def poll(self, attempt_dirs: Iterable[Path]) -> Iterator[Entry]:
        """Entries of new whole lines. A journal that cannot be read now is read the next time."""
        for folder in attempt_dirs:
            path = folder / JOURNAL_NAME
            try:
                # Opened anew each time: that is when a network file system looks for what others
                # wrote.
                with open(path, "rb") as file:
                    file.seek(self._offsets.get(path, 0))
                    is_whole = True
                    while is_whole and (block := file.read(_BLOCK_BYTES) + file.readline()):
                        yield from self._parse(path, self._offsets.get(path, 0), block)
                        is_whole = block.endswith(b"\n")  # the last line may not be finished yet
            except OSError:
                continue

    def _parse(self, path: Path, offset: int, data: bytes) -> Iterator[Entry]:
        number = self._lines.get(path, 0)
        for line in data.split(b"\n")[:-1]:  # the last one is empty, or not finished yet
            head, number, size = parse_head(line), number + 1, len(line) + 1
            if head is None:
                log.warning("%s:%d is damaged; its group is generated again", path, number)
            else:
                yield Entry(**head, path=path, offset=offset, size_bytes=size)
            offset += size
        self._offsets[path], self._lines[path] = offset, number
