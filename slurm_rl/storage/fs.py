"""The one seam to the file system: a few primitive operations, and the real ones.

Everything that must survive a crash goes through an `Fs`; tests pass one that records,
kills or fails. Lint bans `os.rename`, `os.replace`, `os.link` and `shutil.move` elsewhere.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Protocol

from slurm_rl.errors import SpaceError


class Fs(Protocol):
    """Primitive operations. Each is one effect: a crash falls between two of them."""

    def create(self, path: Path, data: bytes) -> None: ...
    def append(self, path: Path, data: bytes) -> None: ...
    def fsync(self, path: Path) -> None: ...
    def fsync_dir(self, path: Path) -> None: ...
    def link(self, source: Path, target: Path) -> None: ...
    def rename(self, source: Path, target: Path) -> None: ...
    def unlink(self, path: Path) -> None: ...
    def mkdir(self, path: Path) -> None: ...
    def read(self, path: Path) -> bytes: ...
    def list(self, path: Path) -> list[str]: ...


class PosixFs:
    """The operating system's file system, unadorned."""

    def create(self, path: Path, data: bytes) -> None:
        """A new file with `data`; FileExistsError if the name is taken. Not yet durable."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            _write_all(fd, data, path)
        except SpaceError:
            os.unlink(path)  # half a file is of no use, and takes an inode
            raise
        finally:
            os.close(fd)

    def append(self, path: Path, data: bytes) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            _write_all(fd, data, path)
        finally:
            os.close(fd)

    def fsync(self, path: Path) -> None:
        _fsync(path, os.O_RDONLY)

    def fsync_dir(self, path: Path) -> None:
        _fsync(path, os.O_RDONLY | os.O_DIRECTORY)

    def link(self, source: Path, target: Path) -> None:
        os.link(source, target)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def mkdir(self, path: Path) -> None:
        """Make `path` and what is missing above it; nothing happens if it is there."""
        path.mkdir(parents=True, exist_ok=True)

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def list(self, path: Path) -> list[str]:
        """Sorted names in `path`; empty if there is no such directory."""
        try:
            return sorted(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []


def _write_all(fd: int, data: bytes, path: Path) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SpaceError(
                f"{path}: no space left ({error.strerror})",
                hint="free space or quota in the run's file system, then `slurm-rl resume`",
            ) from error
        raise


def _fsync(path: Path, flags: int) -> None:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


POSIX: Fs = PosixFs()
