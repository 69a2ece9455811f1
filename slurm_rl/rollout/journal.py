"""The journal of a rollout attempt: one line a finished group, so that a kill loses little.

Owns `journal.jsonl` in the attempt directory. Each line is `<digest> <json>`; lines are
appended whole and fsynced once a second. A later attempt of the same stage takes over the
groups of the earlier ones. The journal is never committed: at the end its groups are sealed
into `samples.safetensors` and `samples.jsonl`.

What a crash may lose: groups of the last second. A torn last line is normal and ignored; a
line that is damaged elsewhere is reported, and its group is generated again. `key` digests
all that a group depends on (weights, sampling, prompt, seeds, reward), so that a group which
was made from anything else is never taken over.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slurm_rl.rollout.samples import Sample
from slurm_rl.storage.digest import digest_bytes
from slurm_rl.storage.fs import POSIX, Fs
from slurm_rl.types import JOURNAL_NAME, canonical_json

log = logging.getLogger(__name__)


class Journal:
    """Writer of one attempt's journal; a context manager. `append` may be called by one thread."""

    def __init__(self, path: Path, *, fs: Fs = POSIX, interval_s: float = 1.0) -> None:
        self._path = path
        self._fs = fs
        self._interval_s = interval_s
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

    def append(self, key: str, samples: Iterable[Sample]) -> None:
        """Add a finished group. On return it is with the operating system, not yet on the disk."""
        if self._failure is not None:
            raise self._failure
        self._fs.append(self._path, render_line(key, samples))
        self._dirty.set()

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


def render_line(key: str, samples: Iterable[Sample]) -> bytes:
    """One group as a line of the journal."""
    body = canonical_json({"key": key, "samples": [dataclasses.asdict(s) for s in samples]})
    return digest_bytes(body).encode() + b" " + body + b"\n"


def parse_line(line: bytes) -> tuple[str, list[Sample]] | None:
    """A line (without its end) as key and samples; None if it is not what was written."""
    digest, _, body = line.partition(b" ")
    if digest != digest_bytes(body).encode():
        return None
    raw = json.loads(body)
    return raw["key"], [_parse_sample(entry) for entry in raw["samples"]]


def read_journals(attempt_dirs: Iterable[str], *, fs: Fs = POSIX) -> dict[str, list[Sample]]:
    """Finished groups of earlier attempts, by key. Later attempts win over earlier ones."""
    found: dict[str, list[Sample]] = {}
    for folder in attempt_dirs:
        path = Path(folder) / JOURNAL_NAME
        try:
            data = fs.read(path)
        except FileNotFoundError:
            continue
        lines = data.split(b"\n")
        if lines.pop():
            log.info("%s ends in the middle of a line: the attempt was killed there", path)
        for number, line in enumerate(lines, 1):
            group = parse_line(line)
            if group is None:
                log.warning("%s:%d is damaged; its group is generated again", path, number)
            else:
                found[group[0]] = group[1]
    return found


def _parse_sample(entry: dict[str, Any]) -> Sample:
    names = ("prompt_tokens", "response_tokens", "rollout_logprobs", "loss_mask")
    return Sample(**(entry | {name: tuple(entry[name]) for name in names}))
