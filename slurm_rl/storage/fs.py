"""The one seam to the file system: a few primitive operations, and the real ones.

Everything that must survive a crash goes through an `Fs`; tests pass one that records,
kills or fails. Lint bans `os.rename`, `os.replace`, `os.link` and `shutil.move` elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from slurm_rl.errors import SpaceError, StorageError


class Fs(Protocol):
    """Primitive operations. Each is one effect: a crash falls between two of them.

    Each raises SpaceError where no space, inode or quota is left, StorageError where the file
    system is read-only, and OSError for everything else.
    """

    def create(self, path: Path, data: bytes) -> None: ...
    def append(self, path: Path, data: bytes) -> None: ...
    def fsync(self, path: Path) -> None: ...
    def fsync_dir(self, path: Path) -> None: ...
    def link(self, source: Path, target: Path) -> None: ...
    def rename(self, source: Path, target: Path) -> None: ...
    def unlink(self, path: Path) -> None: ...
    def rmdir(self, path: Path) -> None: ...
    def mkdir(self, path: Path) -> None: ...
    def read(self, path: Path) -> bytes: ...
    def list(self, path: Path) -> list[str]: ...
    def size(self, path: Path) -> int: ...
    def now(self, folder: Path) -> float: ...


class PosixFs:
    """The operating system's file system, unadorned."""

    def create(self, path: Path, data: bytes) -> None:
        """A new file with `data`; FileExistsError if the name is taken. Not yet durable."""
        with explained(path):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                _write_and_close(fd, data)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(path)  # half a file is of no use, and takes an inode
                raise

    def append(self, path: Path, data: bytes) -> None:
        with explained(path):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            _write_and_close(fd, data)

    def fsync(self, path: Path) -> None:
        with explained(path):  # where space is given late, this is what says that there is none
            _fsync(path, os.O_RDONLY)

    def fsync_dir(self, path: Path) -> None:
        with explained(path):
            _fsync(path, os.O_RDONLY | os.O_DIRECTORY)

    def link(self, source: Path, target: Path) -> None:
        with explained(target):
            os.link(source, target)

    def rename(self, source: Path, target: Path) -> None:
        with explained(target):
            os.rename(source, target)

    def unlink(self, path: Path) -> None:
        with explained(path):
            os.unlink(path)

    def rmdir(self, path: Path) -> None:
        """Take an empty directory away."""
        with explained(path):
            os.rmdir(path)

    def mkdir(self, path: Path) -> None:
        """Make `path` and what is missing above it; nothing happens if it is there."""
        with explained(path):
            path.mkdir(parents=True, exist_ok=True)

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def list(self, path: Path) -> list[str]:
        """Sorted names in `path`; empty if there is no such directory."""
        try:
            return sorted(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, path: Path) -> int:
        """Bytes of the file (behind a symbolic link, of what it leads to)."""
        return path.stat().st_size

    def now(self, folder: Path) -> float:
        """Seconds since the epoch by the clock of the file system that `folder` lies on.

        A file is made there and its time read. Where there is no room for one, the time of
        `folder` itself is set, which needs none.
        """
        probe = folder / f".clock-{secrets.token_hex(4)}"
        try:
            with explained(probe):
                probe.touch()
            return probe.stat().st_mtime
        except SpaceError:
            os.utime(folder)
            return folder.stat().st_mtime
        finally:
            with contextlib.suppress(OSError):
                probe.unlink()


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Give lasting troubles of a file system their name and their remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SpaceError(
                f"{path}: no space left ({error.strerror})",
                hint="free space, inodes or quota in the run's file system, then `slurm-rl resume`",
            ) from error
        if error.errno == errno.EROFS:
            raise StorageError(
                f"{path}: the file system is read-only",
                hint="have it mounted for writing again, then `slurm-rl resume`",
            ) from error
        raise


def _write_and_close(fd: int, data: bytes) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    finally:
        os.close(fd)  # a quota may show only here


def _fsync(path: Path, flags: int) -> None:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


POSIX: Fs = PosixFs()
