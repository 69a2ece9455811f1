"""A file system with faults: it refuses, lies about what it did, tears what it writes, and lags.

`FaultyFs` answers chosen operations with an errno, whether or not it has done them. `NodeFs` is how
one node sees what the others do: late. Both wrap any `Fs`.
"""

from __future__ import annotations

import errno
import functools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from slurm_rl.storage.fs import Fs, explained

#: Operations that take a new inode, those that take room, those that change anything.
MAKES = ("create", "mkdir")
FILLS = (*MAKES, "append", "link", "rename", "now")
WRITES = (*FILLS, "fsync", "fsync_dir", "unlink", "rmdir")
READS = ("read", "list", "size")
EVERY = (*WRITES, *READS)


@dataclass
class StorageFault:
    """What happens to operations `ops` on paths in which `path` (a regular expression) is found.

    error:   the errno that is answered; 0: none, the operation is merely torn.
    happens: the operation takes place all the same (the reply to a success was lost).
    part:    share of the bytes that a create or append writes before it fails.
    skip:    matching operations that are let pass first.
    times:   how many are struck; None: all, as long as `is_on`.
    node:    only on this one; empty: on all.
    die:     called instead of answering: the process does not live to hear.
    """

    error: int
    ops: tuple[str, ...] = EVERY
    path: str = ""
    happens: bool = False
    part: float | None = None
    skip: int = 0
    times: int | None = 1
    node: str = ""
    die: Callable[[], None] | None = None
    is_on: bool = True
    struck: list[str] = field(default_factory=list)

    def strikes(self, op: str, path: Path, node: str) -> bool:
        """Whether this operation is hit; counts it."""
        if not self.is_on or op not in self.ops or not re.search(self.path, str(path)):
            return False
        if self.node and self.node != node:
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        if self.times is not None and len(self.struck) >= self.times:
            return False
        self.struck.append(f"{op} {path}")
        return True


@dataclass
class FaultyFs:
    """`inner`, struck by `faults` (a list that may change while it is in use)."""

    inner: Fs
    faults: list[StorageFault]
    node: str = ""

    def create(self, path: Path, data: bytes) -> None:
        self._do("create", path, lambda: self.inner.create(path, data), data)

    def append(self, path: Path, data: bytes) -> None:
        self._do("append", path, lambda: self.inner.append(path, data), data)

    def fsync(self, path: Path) -> None:
        self._do("fsync", path, lambda: self.inner.fsync(path))

    def fsync_dir(self, path: Path) -> None:
        self._do("fsync_dir", path, lambda: self.inner.fsync_dir(path))

    def link(self, source: Path, target: Path) -> None:
        self._do("link", target, lambda: self.inner.link(source, target))

    def rename(self, source: Path, target: Path) -> None:
        self._do("rename", target, lambda: self.inner.rename(source, target))

    def unlink(self, path: Path) -> None:
        self._do("unlink", path, lambda: self.inner.unlink(path))

    def rmdir(self, path: Path) -> None:
        self._do("rmdir", path, lambda: self.inner.rmdir(path))

    def mkdir(self, path: Path) -> None:
        if path.is_dir():
            return  # what is there takes no inode, on any file system
        self._do("mkdir", path, lambda: self.inner.mkdir(path))

    def read(self, path: Path) -> bytes:
        self._do("read", path, lambda: None)
        return self.inner.read(path)

    def list(self, path: Path) -> list[str]:
        self._do("list", path, lambda: None)
        return self.inner.list(path)

    def size(self, path: Path) -> int:
        self._do("size", path, lambda: None)
        return self.inner.size(path)

    def now(self, folder: Path) -> float:
        self._do("now", folder, lambda: None)
        return self.inner.now(folder)

    def _do(self, op: str, path: Path, act: Callable[[], None], data: bytes = b"") -> None:
        fault = next((f for f in self.faults if f.strikes(op, path, self.node)), None)
        if fault is None:
            act()
            return
        if fault.part is not None and op in ("create", "append"):
            written = data[: int(len(data) * fault.part)]
            getattr(self.inner, op)(path, written)
        elif fault.happens:
            act()
        if fault.die is not None:
            fault.die()
        elif fault.error:
            with explained(path):
                raise OSError(fault.error, os.strerror(fault.error), str(path))


@dataclass
class Version:
    """What a path was from a moment on: bytes, a directory (None), or nothing (`is_there`)."""

    when: float
    node: str
    data: bytes | None
    is_there: bool = True


@dataclass
class Disk:
    """What every node did, and when. Others see it `delay_s` later, or after `looks` of their own.

    only: a regular expression; what else happens is seen at once.
    """

    clock: Callable[[], float]
    delay_s: float
    looks: int | None = None
    only: str = ""
    versions: dict[str, list[Version]] = field(default_factory=dict)
    within: dict[str, list[str]] = field(default_factory=dict)  # folder -> those of `versions`
    known: dict[tuple[str, str], int] = field(default_factory=dict)
    num_late: int = 0

    def note(self, path: str, node: str, data: bytes | None, *, is_there: bool = True) -> None:
        if re.search(self.only, path):
            if path not in self.versions:
                self.versions[path] = []
                self.within.setdefault(path.rpartition("/")[0], []).append(path)
            self.versions[path].append(Version(self.clock(), node, data, is_there))
            self.reveal(path, node)

    def reveal(self, path: str, node: str) -> None:
        """The node has dealt with the path itself: it knows what is there now."""
        self.known[node, path] = len(self.versions.get(path, []))

    def newest(self, path: str, node: str) -> tuple[Version | None, bool]:
        """What the node sees of a path, and whether that is what is there. (None, False): that it
        was never there; (None, True): nothing is known of it, ask the disk."""
        history = self.versions.get(path)
        if not history:
            return None, True
        seen = self.known.get((node, path), 0)
        for number, version in enumerate(history, 1):
            is_own = version.node == node
            if is_own or number <= seen or version.when + self.delay_s <= self.clock():
                seen = max(seen, number)
        if seen < len(history):
            self.num_late += 1
        return (history[seen - 1] if seen else None), seen == len(history)


@dataclass
class NodeFs:
    """The shared file system as `node` sees it: its own changes at once, others' late."""

    inner: Fs
    disk: Disk
    node: str
    counts: dict[str, int] = field(default_factory=dict)

    def create(self, path: Path, data: bytes) -> None:
        self._enter(path)
        self._know(path)
        self.inner.create(path, data)
        self.disk.note(str(path), self.node, data)

    def append(self, path: Path, data: bytes) -> None:
        self._enter(path)
        self.inner.append(path, data)
        self.disk.note(str(path), self.node, self.inner.read(path))

    def fsync(self, path: Path) -> None:
        self._enter(path)
        self.inner.fsync(path)

    def fsync_dir(self, path: Path) -> None:
        if not self._sees(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        self.inner.fsync_dir(path)

    def link(self, source: Path, target: Path) -> None:
        self._enter(target)
        self._know(target)  # an answer of EEXIST is one of the server's
        self.inner.link(source, target)
        self.disk.note(str(target), self.node, self.inner.read(target))

    def rename(self, source: Path, target: Path) -> None:
        self._enter(target)
        self._know(target)
        self.inner.rename(source, target)
        self.disk.note(str(source), self.node, None, is_there=False)
        is_file = target.is_file()
        self.disk.note(str(target), self.node, self.inner.read(target) if is_file else None)

    def unlink(self, path: Path) -> None:
        self._enter(path)
        self._know(path)
        self.inner.unlink(path)
        self.disk.note(str(path), self.node, None, is_there=False)

    def rmdir(self, path: Path) -> None:
        self._know(path)
        self.inner.rmdir(path)
        self.disk.note(str(path), self.node, None, is_there=False)

    def mkdir(self, path: Path) -> None:
        missing = [place for place in (path, *path.parents) if not place.exists()]
        for place in (path, *path.parents):
            self._know(place)
        self.inner.mkdir(path)
        for place in missing:
            self.disk.note(str(place), self.node, None)

    def read(self, path: Path) -> bytes:
        data = self._look(path)
        return self.inner.read(path) if data is None else data

    def size(self, path: Path) -> int:
        data = self._look(path)
        return self.inner.size(path) if data is None else len(data)

    def list(self, path: Path) -> list[str]:
        if not self._sees(path):
            return []
        folder = str(path)
        there = {name for name in self.inner.list(path) if self._sees_name(f"{folder}/{name}")}
        names = {place.rpartition("/")[2]: place for place in self.disk.within.get(folder, ())}
        gone = {
            name for name, place in names.items() if name not in there and self._still_sees(place)
        }
        return sorted(there | gone)

    def now(self, folder: Path) -> float:
        return self.inner.now(folder)

    def _look(self, path: Path) -> bytes | None:
        """The bytes of an older version that is still seen; None: what is there now."""
        if not self._sees(path.parent):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        self._count(str(path))
        version, is_now = self.disk.newest(str(path), self.node)
        if is_now:
            return None
        if version is None or not version.is_there:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        if not path.exists():
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return version.data

    def _count(self, path: str) -> None:
        self.counts[path] = self.counts.get(path, 0) + 1
        if self.disk.looks is not None and self.counts[path] > self.disk.looks:
            self.disk.reveal(path, self.node)

    def _sees_name(self, path: str) -> bool:
        version, is_now = self.disk.newest(path, self.node)
        return is_now or (version is not None and version.is_there)

    def _still_sees(self, path: str) -> bool:
        version, is_now = self.disk.newest(path, self.node)
        return not is_now and version is not None and version.is_there

    def _sees(self, folder: Path) -> bool:
        places = [place for place in _upwards(str(folder)) if place in self.disk.versions]
        for place in places:
            self._count(place)
        return all(self._sees_name(place) for place in places)

    def _enter(self, path: Path) -> None:
        """A change needs a directory that this node sees."""
        if not self._sees(path.parent):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    def _know(self, path: Path) -> None:
        self.disk.reveal(str(path), self.node)


@functools.lru_cache(maxsize=4096)
def _upwards(path: str) -> tuple[str, ...]:
    """A path and all folders above it."""
    return (path, *(str(folder) for folder in Path(path).parents))
