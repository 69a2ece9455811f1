"""Durable writes: the only code that names a file which must survive a crash.

Two promises:
- `write_file`: afterwards `path` holds `data`; a crash leaves the old file or the new one.
- `publish`: `path` is made once, never replaced. Whatever the link call answered (on NFS the
  reply to a success can be lost), the file is read again: *I won if and only if it is mine*,
  so the data must carry a token of its writer's own.

Where hard links are missing, the published name is a directory that holds one file; the
rename that puts it there fails on a target that is not empty.

A write that fails takes its temporary file away, if the file system still lets it; a crash leaves
one (`.tmp-…`), which nobody reads.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Iterable
from pathlib import Path

from slurm_rl.errors import CorruptError, StorageError
from slurm_rl.storage.digest import digest_file
from slurm_rl.storage.fs import POSIX, Fs, explained
from slurm_rl.types import FileEntry

#: What link(2) answers where the file system has no hard links (FAT, some FUSE, SMB, BeeGFS
#: across directories).
_NO_LINKS = {
    errno.EPERM,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.ENOTSUP,
    errno.EMLINK,
    errno.EXDEV,
}
_INNER = "content"
#: From an attempt's file up to the iteration's directory, and one more.
_LEVELS = 5
#: Waits between looks at a name that a directory lists and that cannot be opened, or whose handle
#: is stale. Listing made the client ask the server again: the second look nearly always finds it.
_LOOK_AGAIN_S = (0.05, 0.2, 1.0)
#: How long a reader waits for what is committed and not to be seen. NFS trusts what it remembers of
#: a directory for a minute (`acdirmax`) unless it is mounted otherwise.
VISIBLE_S = float(os.environ.get("SLURM_RL_VISIBLE_S", "75"))


def write_file(path: Path, data: bytes, *, fs: Fs = POSIX) -> None:
    """Put `data` at `path`, replacing it, so that a crash leaves the old bytes or the new."""
    _replace(path, data, fs=fs, is_synced=True)
    fs.fsync_dir(path.parent)


def write_hint(path: Path, data: bytes, *, fs: Fs = POSIX) -> None:
    """Like `write_file` without the fsyncs: for what may be stale or lost (hints, heartbeats)."""
    _replace(path, data, fs=fs, is_synced=False)


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

    Durable on return. A crash leaves `path` absent or complete, and perhaps a `.tmp-` file. An
    error leaves the same: `path` may be there all the same, and the next reader decides.
    """
    temporary = _temporary_name(path)
    try:
        fs.create(temporary, data)
        fs.fsync(temporary)
        _name_once(temporary, path, fs=fs)
        fs.fsync_dir(path.parent)
    finally:
        _discard(temporary, fs=fs)
    return read_published(path, fs=fs) == data


def publish_file(temporary: Path, path: Path, *, fs: Fs = POSIX) -> None:
    """Give a finished file its name, unless that is taken; who wants to know reads it again.

    For what is too large to be held in memory. `temporary` lies in the same directory and is gone
    afterwards. Durable on return.
    """
    try:
        fs.fsync(temporary)
        _name_once(temporary, path, fs=fs)
        fs.fsync_dir(path.parent)
    finally:
        _discard(temporary, fs=fs)


def read_published(
    path: Path, *, fs: Fs = POSIX, waits: tuple[float, ...] = _LOOK_AGAIN_S
) -> bytes | None:
    """What was published at `path`, or None if nothing was.

    None is said only if the directory does not list the name either: where the two disagree (NFS
    remembers for a while that a name was absent) it looks again after each of `waits`, and then
    raises StorageError. A stale handle is looked at again too. Raises CorruptError for a directory
    that holds no published file: something else made it.
    """
    for wait_s in (*waits, None):
        try:
            return _read_either(path, fs=fs)
        except FileNotFoundError:
            if not _is_listed(path, fs=fs):
                return None
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
        if wait_s is not None:
            time.sleep(wait_s)
    raise _explain_unreadable(path, fs=fs)


def exists(path: Path, *, fs: Fs = POSIX) -> bool:
    """Whether the name can be looked up, whatever its directory lists."""
    try:
        fs.size(path)
    except FileNotFoundError:
        return False
    return True


def remove_published(path: Path, *, fs: Fs = POSIX) -> None:
    """Take a published name away; nothing happens if it is not there.

    Where hard links are missing it is a directory: a crash midway leaves it empty.
    """
    try:
        fs.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:  # Linux answers EISDIR, POSIX EPERM
        if error.errno not in (errno.EISDIR, errno.EPERM):
            raise
        _remove_directory(path, fs=fs)


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


def wait_for_size(
    path: Path, size_bytes: int, *, patience_s: float = VISIBLE_S, fs: Fs = POSIX
) -> int:
    """The file's size, once it is `size_bytes` or `patience_s` have passed; -1 if it is not there.

    What another node wrote may show late, or short: NFS has shown a new directory 29 s late.
    Listing the directory makes the client ask the server again.
    """
    deadline = time.monotonic() + patience_s
    while (size := look_at_size(path, size_bytes, fs=fs)) != size_bytes:
        if time.monotonic() >= deadline:
            break
        time.sleep(0.5)
    return size


def look_at_size(path: Path, size_bytes: int, *, fs: Fs = POSIX) -> int:
    """The file's size now, -1 if it is not there; the directory is refreshed if it is another."""
    for is_second in (False, True):
        try:
            size = fs.size(path)
        except FileNotFoundError:
            size = -1
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            size = -1
        if size == size_bytes or is_second:
            break
        refresh(path, fs=fs)
    return size


def read_patiently(path: Path, *, patience_s: float = VISIBLE_S, fs: Fs = POSIX) -> bytes:
    """The bytes of a file that another node has written, once it is there.

    Raises FileNotFoundError after `patience_s`.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return fs.read(path)
        except OSError as error:
            is_late = error.errno in (errno.ENOENT, errno.ESTALE)
            if not is_late or time.monotonic() >= deadline:
                raise
        refresh(path, fs=fs)
        time.sleep(0.5)


def refresh(path: Path, *, fs: Fs = POSIX) -> None:
    """List the directories above `path`, so that the client asks the server what is in them.

    A few of them: the one that holds `path` may itself not be seen here yet.
    """
    for folder in reversed(path.parents[:_LEVELS]):
        with contextlib.suppress(OSError):
            fs.list(folder)


def list_files(root: Path) -> list[str]:
    """Every regular file (or link to one) below `root`, as relative paths, sorted."""
    found = []
    for folder, _, names in os.walk(root):
        found += [str((Path(folder) / name).relative_to(root)) for name in names]
    return sorted(found)


def _replace(path: Path, data: bytes, *, fs: Fs, is_synced: bool) -> None:
    temporary = _temporary_name(path)
    try:
        fs.create(temporary, data)
        if is_synced:
            fs.fsync(temporary)
        fs.rename(temporary, path)
    except BaseException:
        _discard(temporary, fs=fs)
        raise


def _name_once(temporary: Path, path: Path, *, fs: Fs) -> None:
    """Give a finished temporary file its name, unless that is taken."""
    try:
        with explained(path):
            fs.link(temporary, path)
    except FileExistsError:
        pass
    except (OSError, StorageError) as error:
        if isinstance(error, OSError) and error.errno in _NO_LINKS:
            _publish_directory(path, fs.read(temporary), fs=fs)
        elif not _is_listed(path, fs=fs):
            raise


def _publish_directory(path: Path, data: bytes, *, fs: Fs) -> None:
    folder = _temporary_name(path)
    try:
        fs.mkdir(folder)
        fs.create(folder / _INNER, data)
        fs.fsync(folder / _INNER)
        fs.fsync_dir(folder)
        fs.rename(folder, path)
    except BaseException as error:
        # Also after an error the rename may have happened, or somebody else's.
        with contextlib.suppress(OSError, StorageError):
            _remove_directory(folder, fs=fs)
        if not isinstance(error, (OSError, StorageError)) or not _is_listed(path, fs=fs):
            raise


def _explain_unreadable(path: Path, *, fs: Fs) -> StorageError:
    try:
        fs.read(path)
    except IsADirectoryError:
        return CorruptError(
            f"{path}: a directory in which nothing was published",
            hint="something else made it; see what it is, and remove it",
        )
    except OSError:
        pass  # as before
    return StorageError(
        f"{path}: its directory lists it, but it cannot be opened",
        hint="this node sees it late, or holds a stale handle: try again",
    )


def _read_either(path: Path, *, fs: Fs) -> bytes:
    try:
        return fs.read(path)
    except IsADirectoryError:
        return fs.read(path / _INNER)


def _remove_directory(path: Path, *, fs: Fs) -> None:
    """A published directory, or an empty one; somebody else may be removing it too."""
    with contextlib.suppress(FileNotFoundError):
        fs.unlink(path / _INNER)
    with contextlib.suppress(FileNotFoundError):
        fs.rmdir(path)


def _discard(temporary: Path, *, fs: Fs) -> None:
    """Tidy up, if the file system lets us: nobody reads what is left."""
    with contextlib.suppress(OSError, StorageError):
        fs.unlink(temporary)


def _is_listed(path: Path, *, fs: Fs) -> bool:
    return path.name in fs.list(path.parent)


def _temporary_name(path: Path) -> Path:
    return path.with_name(f".tmp-{path.name}-{secrets.token_hex(4)}")
