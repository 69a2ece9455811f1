"""A file system for thousands of runs: real files, of which a copy in memory answers all reading.

Nobody pulls the plug here, so fsync only looks whether the file is there. Everything that changes
files must come through it; what reads them past it finds them on the real file system. `RecordsFs`
keeps what only this package reads and writes in memory alone.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from slurm_rl.storage.fs import PosixFs


@dataclass
class MirrorFs(PosixFs):
    """Implements `Fs`.

    watch: told of each name that a link or rename made, and of stops that are taken away.
    clock: what the file system takes for the time.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    folders: dict[str, set[str]] = field(default_factory=dict)
    watch: Callable[[Path], None] | None = None
    clock: Callable[[], float] = lambda: 0.0

    def create(self, path: Path, data: bytes) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.write(fd, data)
        os.close(fd)
        self._put(path, data)

    def append(self, path: Path, data: bytes) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(fd, data)
        os.close(fd)
        self._put(path, self.files.get(str(path), b"") + data)

    def fsync(self, path: Path) -> None:
        if str(path) not in self.files:
            raise _error(errno.ENOENT, path)

    def fsync_dir(self, path: Path) -> None:
        if str(path) not in self.folders and not path.is_dir():
            raise _error(errno.ENOENT, path)

    def link(self, source: Path, target: Path) -> None:
        os.link(source, target)
        self._put(target, self.files[str(source)])
        self._tell(target)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)
        self._move(str(source), str(target))
        self._tell(target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)
        self._forget(path)

    def rmdir(self, path: Path) -> None:
        os.rmdir(path)
        self.folders.pop(str(path), None)
        self.folders[str(path.parent)].discard(path.name)

    def mkdir(self, path: Path) -> None:
        if str(path) in self.folders:
            return
        os.makedirs(path, exist_ok=True)
        child = ""
        for folder in (path, *path.parents):
            is_known = str(folder) in self.folders
            names = self.folders.setdefault(str(folder), set())
            if child:
                names.add(child)
            if is_known:
                return
            child = folder.name

    def read(self, path: Path) -> bytes:
        data = self.files.get(str(path))
        if data is not None:
            return data
        raise _error(errno.EISDIR if str(path) in self.folders else errno.ENOENT, path)

    def list(self, path: Path) -> list[str]:
        return sorted(self.folders.get(str(path), ()))

    def size(self, path: Path) -> int:
        return len(self.read(path))

    def now(self, folder: Path) -> float:
        self.fsync_dir(folder)
        return self.clock()

    def _put(self, path: Path, data: bytes) -> None:
        self.files[str(path)] = data
        self.folders[str(path.parent)].add(path.name)

    def _forget(self, path: Path) -> None:
        del self.files[str(path)]
        self.folders[str(path.parent)].discard(path.name)
        if path.name in ("PAUSE", "HALT"):
            self._tell(path)

    def _move(self, source: str, target: str) -> None:
        if source in self.files:
            self.files[target] = self.files.pop(source)
        else:
            for name in [n for n in self.files if n.startswith(f"{source}/")]:
                self.files[target + name[len(source) :]] = self.files.pop(name)
            for name in [n for n in self.folders if f"{n}/".startswith(f"{source}/")]:
                self.folders[target + name[len(source) :]] = self.folders.pop(name)
        parent, _, name = target.rpartition("/")
        old_parent, _, old_name = source.rpartition("/")
        self.folders[old_parent].discard(old_name)
        self.folders[parent].add(name)

    def _tell(self, path: Path) -> None:
        if self.watch is not None:
            self.watch(path)


@dataclass
class RecordsFs(MirrorFs):
    """A mirror of which the records are in memory alone: whatever gets its name by way of a temporary
    file (claims, commits, orders, heartbeats). What programs write under its own name is real."""

    records: set[str] = field(default_factory=set)

    def create(self, path: Path, data: bytes) -> None:
        if not path.name.startswith(".tmp-"):
            super().create(path, data)
            return
        self._check_parent(path)
        if str(path) in self.files:
            raise _error(errno.EEXIST, path)
        self._put(path, data)
        self.records.add(str(path))

    def link(self, source: Path, target: Path) -> None:
        if str(source) not in self.records:
            super().link(source, target)
            return
        self._check_parent(target)
        if str(target) in self.files or str(target) in self.folders:
            raise _error(errno.EEXIST, target)
        self._put(target, self.files[str(source)])
        self.records.add(str(target))
        self._tell(target)

    def rename(self, source: Path, target: Path) -> None:
        if str(source) not in self.records:
            super().rename(source, target)
            return
        self._check_parent(target)
        if str(target) in self.folders:
            raise _error(errno.EISDIR, target)
        if str(target) in self.files and str(target) not in self.records:
            os.unlink(target)
        self._move(str(source), str(target))
        self._tell(target)

    def unlink(self, path: Path) -> None:
        if str(path) in self.records:
            self._forget(path)
        else:
            super().unlink(path)

    def rmdir(self, path: Path) -> None:
        if self.folders.get(str(path)):
            raise _error(errno.ENOTEMPTY, path)
        super().rmdir(path)

    def _move(self, source: str, target: str) -> None:
        is_record = source in self.records
        super()._move(source, target)
        moved = {source} if is_record else {n for n in self.records if n.startswith(f"{source}/")}
        self.records -= moved
        self.records |= {target + name[len(source) :] for name in moved}

    def _forget(self, path: Path) -> None:
        super()._forget(path)
        self.records.discard(str(path))

    def _check_parent(self, path: Path) -> None:
        if str(path.parent) not in self.folders:
            raise _error(errno.ENOENT, path)


def _error(number: int, path: Path) -> OSError:
    return OSError(number, os.strerror(number), str(path))
