"""The archive: verified copies of pruned files, in a directory on another file system.

    <retention.archive>/<run name>-<run id>/iterations/000012/train.t0/<attempt>/…   COMMIT

laid out as in the run directory, so that copying back is `cp -r`. A file gets its name in the
archive only after its copy was fsynced, read back and found to be what was committed; before the
caller deletes anything all are read back once more. It refuses to make the archive's own
directory: where a file system is not mounted, that would fill another one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from slurm_rl.errors import StorageError
from slurm_rl.storage.commits import commit_path, file_path
from slurm_rl.storage.digest import digest_file
from slurm_rl.storage.durable import make_directory, read_published, write_file
from slurm_rl.storage.fs import Fs
from slurm_rl.storage.rundir import RunDir
from slurm_rl.types import Commit, FileEntry, Slot

_BLOCK_BYTES = 16 << 20
_TEMPORARY = ".tmp-"


def archive_commit(run: RunDir, slot: Slot, commit: Commit, archive: Path) -> Path:
    """Copy the files of a commit; the stage's directory in the archive.

    archive: `<retention.archive>/<run name>-<run id>`. On return every copy is durable and was
    read back. A crash leaves whole copies, which are not made again, and `.tmp-` files, which
    the next success removes. Raises StorageError if a copy is not what was committed.
    """
    check_archive(archive.parent)
    place = archive / run.slot_dir(slot).relative_to(run.root)
    copies: list[tuple[Path, FileEntry]] = []
    for entry in commit.files:
        source = file_path(run, slot, commit, entry.path)
        target = archive / source.relative_to(run.root)
        make_directory(target.parent, below=archive.parent, fs=run.fs)
        if not _has_size(target, entry.size_bytes):
            _copy(source, target, entry, fs=run.fs)
        copies.append((target, entry))
    for target, entry in copies:
        _verify(target, entry, fs=run.fs)
    _clean({target.parent for target, _ in copies}, fs=run.fs)
    make_directory(place, below=archive.parent, fs=run.fs)
    data = read_published(commit_path(run, slot), fs=run.fs) or b""
    write_file(place / "COMMIT", data, fs=run.fs)
    return place


def check_archive(root: Path) -> None:
    """Raises StorageError unless `retention.archive` is there and may be written."""
    if not root.is_dir() or not os.access(root, os.W_OK | os.X_OK):
        raise StorageError(
            f"retention.archive = {root}: no directory that can be written; nothing is deleted",
            hint="mount or make it, or unset retention.archive",
        )


def _copy(source: Path, target: Path, entry: FileEntry, *, fs: Fs) -> None:
    temporary = target.with_name(f"{_TEMPORARY}{target.name}-{secrets.token_hex(4)}")
    try:
        fs.create(temporary, b"")
        with open(source, "rb") as file:
            while block := file.read(_BLOCK_BYTES):
                fs.append(temporary, block)
        fs.fsync(temporary)
        _verify(temporary, entry, fs=fs)
        fs.rename(temporary, target)
    except (OSError, StorageError):
        with contextlib.suppress(OSError):
            fs.unlink(temporary)  # half a copy is of no use, and takes space
        raise
    fs.fsync_dir(target.parent)


def _verify(path: Path, entry: FileEntry, *, fs: Fs) -> None:
    """Read a copy back. One that is not what was committed is removed: the next try makes it."""
    _drop_cache(path)
    found = digest_file(path)
    if found == entry.digest and path.stat().st_size == entry.size_bytes:
        return
    with contextlib.suppress(OSError):
        fs.unlink(path)
    raise StorageError(
        f"{path}: the copy has digest {found}, committed was {entry.digest}; nothing is deleted",
        hint="see `slurm-rl verify` for the original; the copy is made again by the next gc",
    )


def _drop_cache(path: Path) -> None:
    """Ask the kernel to forget what it holds of a file, so that the disk is what is read."""
    with contextlib.suppress(OSError, AttributeError), open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _has_size(path: Path, size_bytes: int) -> bool:
    try:
        return path.stat().st_size == size_bytes
    except OSError:
        return False


def _clean(folders: set[Path], *, fs: Fs) -> None:
    """Remove what copies that were killed left. Another gc's copy fails then, harmlessly."""
    for folder in folders:
        for name in fs.list(folder):
            if name.startswith(_TEMPORARY):
                with contextlib.suppress(OSError):
                    fs.unlink(folder / name)
