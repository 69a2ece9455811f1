"""Durable writes: the only code that names a file which must survive a crash.

Two promises:
- `write_file`: afterwards `path` holds `data`; a crash leaves the old file or the new one.
- `publish`: `path` is made once, never replaced. Whatever the link call answered (on NFS the
  reply to a success can be lost), the file is read again: *I won if and only if it is mine*,
  so the data must carry a token of its writer's own.

Where hard links are missing, the published name is a directory that holds one file; the
rename that puts it there fails on a target that is not empty.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Iterable
from pathlib import Path

from slurm_rl.errors import SpaceError
from slurm_rl.storage.digest import digest_file
from slurm_rl.storage.fs import POSIX, Fs
from slurm_rl.types import FileEntry

#: What link(2) answers where the file system has no hard links (FAT, some FUSE, SMB, BeeGFS
#: across directories).
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK}
_INNER = "content"
#: How long a reader waits for what is committed and not to be seen.
VISIBLE_S = float(os.environ.get("SLURM_RL_VISIBLE_S", "45"))


def write_file(path: Path, data: bytes, *, fs: Fs = POSIX) -> None:
    """Put `data` at `path`, replacing it, so that a crash leaves the old bytes or the new."""
    temporary = _temporary_name(path)
    fs.create(temporary, data)
    fs.fsync(temporary)
    fs.rename(temporary, path)
    fs.fsync_dir(path.parent)


def write_hint(path: Path, data: bytes, *, fs: Fs = POSIX) -> None:
    """Like `write_file` without the fsyncs: for what may be stale or lost (hints, heartbeats)."""
    temporary = _temporary_name(path)
    fs.create(temporary, data)
    fs.rename(temporary, path)


def make_directory(path: Path, *, below: Path, fs: Fs = POSIX) -> None:
    """Make `path` so that a crash cannot take it away with what is published in it.

    `below` is above it and durable already. What is there is synced too: another process may
    have made it just now.
    """
    fs.mkdir(path)
    for parent in path.parents:
        fs.fsync_dir(parent)
        if parent == below:
            return


def publish(path: Path, data: bytes, *, fs: Fs = POSIX) -> bool:
    """Make `path` with `data` unless it exists; True if what is there now is `data`.

    Durable on return. A crash leaves `path` absent or complete, and perhaps a `.tmp-` file.
    """
    temporary = _temporary_name(path)
    fs.create(temporary, data)
    fs.fsync(temporary)
    try:
        fs.link(temporary, path)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno in _NO_LINKS:
            _publish_directory(path, data, fs=fs)
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SpaceError(f"{path}: no space left ({error.strerror})") from error
        elif not _exists(path, fs=fs):
            raise
    fs.fsync_dir(path.parent)
    try:
        fs.unlink(temporary)
    except FileNotFoundError:
        pass
    return read_published(path, fs=fs) == data


def read_published(path: Path, *, fs: Fs = POSIX) -> bytes | None:
    """What was published at `path`, or None if nothing was."""
    try:
        return fs.read(path)
    except FileNotFoundError:
        return None
    except IsADirectoryError:
        return fs.read(path / _INNER)


def seal_files(root: Path, names: Iterable[str], *, fs: Fs = POSIX) -> list[FileEntry]:
    """Fsync finished files below `root` and the directories that name them; digest each.

    Returns entries in path order, ready for a `Result`. For writers that cannot digest while
    they write (Megatron's, transformers'): the bytes come back from the page cache.
    """
    entries, directories = [], {root}
    for name in sorted(names):
        path = root / name
        fs.fsync(path)
        directories.update(p for p in path.parents if p.is_relative_to(root))
        entries.append(FileEntry(name, path.stat().st_size, digest_file(path)))
    for directory in sorted(directories, reverse=True):
        fs.fsync_dir(directory)
    return entries


def wait_for_size(path: Path, size_bytes: int, *, patience_s: float = VISIBLE_S) -> int:
    """The file's size, once it is `size_bytes` or `patience_s` have passed; -1 if it is not there.

    What another node wrote may show late, or short: NFS has shown a new directory 29 s late.
    Listing the directory makes the client ask the server again.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            size = path.stat().st_size
        except OSError:
            size = -1
        if size == size_bytes or time.monotonic() >= deadline:
            return size
        with contextlib.suppress(OSError):
            os.listdir(path.parent)
        time.sleep(0.5)


def list_files(root: Path) -> list[str]:
    """Every regular file (or link to one) below `root`, as relative paths, sorted."""
    found = []
    for folder, _, names in os.walk(root):
        found += [str((Path(folder) / name).relative_to(root)) for name in names]
    return sorted(found)


def _publish_directory(path: Path, data: bytes, *, fs: Fs) -> None:
    folder = _temporary_name(path)
    fs.mkdir(folder)
    fs.create(folder / _INNER, data)
    fs.fsync(folder / _INNER)
    fs.fsync_dir(folder)
    try:
        fs.rename(folder, path)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise
        fs.unlink(folder / _INNER)
        os.rmdir(folder)


def _exists(path: Path, *, fs: Fs) -> bool:
    return path.name in fs.list(path.parent)


def _temporary_name(path: Path) -> Path:
    return path.with_name(f".tmp-{path.name}-{secrets.token_hex(4)}")
