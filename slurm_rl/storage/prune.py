"""Deleting what retention let go: the bulk of a commit, or what an abandoned attempt left.

The order, each step durable before the next: tombstone, grace, leases read again (all three are
the caller's); a verified copy in the archive, if there is one; PRUNED; the files; the tombstone's
removal. Killed anywhere, the next `slurm-rl gc` goes on; two at once do the same things twice.

What was written for people (logs, orders, last words) stays until the iteration's records are
folded, and a COMMIT stays for ever.
"""

from __future__ import annotations

import os
from pathlib import Path

from slurm_rl.storage.archive import archive_commit
from slurm_rl.storage.commits import file_path
from slurm_rl.storage.durable import look_at_size
from slurm_rl.storage.fs import Fs
from slurm_rl.storage.rundir import RunDir
from slurm_rl.storage.tombstones import (
    Pruned,
    publish_pruned,
    read_pruned,
    read_tombstone,
    remove_tombstone,
)
from slurm_rl.types import Commit, Slot

#: What an attempt leaves for people and for the accounts: small, and folded later.
_RECORD_SUFFIXES = (".json", ".log")
_RECORD_NAMES = ("heartbeat",)


def delete_bulk(run: RunDir, slot: Slot, commit: Commit, *, archive: Path | None) -> bool:
    """Delete the files of a commit; False if something of them is still there (held open on NFS).

    archive: the run's directory in the archive; the files are there, verified, before the first
    is deleted. Raises StorageError, with nothing deleted, if they cannot be.
    """
    if read_pruned(run, slot) is None:
        tombstone = read_tombstone(run, slot)
        assert tombstone is not None, f"{slot}: nothing is deleted without a tombstone"
        place = None if archive is None else archive_commit(run, slot, commit, archive)
        size = sum(entry.size_bytes for entry in commit.files)
        note = Pruned(tombstone.token, len(commit.files), size, str(place or ""))
        publish_pruned(run, slot, note)
    is_clean, committed = True, committed_files(run, slot, commit)
    for folder in attempt_dirs(run, slot, commit):
        is_clean &= sweep(folder, committed, fs=run.fs)
    if is_clean:
        remove_tombstone(run, slot)
    return is_clean


def delete_attempt(run: RunDir, slot: Slot, attempt: str) -> bool:
    """Delete what an abandoned attempt left, but for its records; False if something is left."""
    is_clean = sweep(run.slot_dir(slot) / attempt, fs=run.fs)
    if is_clean:
        remove_tombstone(run, slot, attempt)
    return is_clean


def attempt_dirs(run: RunDir, slot: Slot, commit: Commit) -> list[Path]:
    """The directories of the attempts that a commit is made of."""
    folder = run.slot_dir(slot)
    if "attempt" in commit.provenance:
        return [folder / str(commit.provenance["attempt"])]
    return [folder / str(place) for place in commit.provenance["attempts"].values()]


def committed_files(run: RunDir, slot: Slot, commit: Commit) -> frozenset[Path]:
    """Where the files of a commit lie."""
    return frozenset(file_path(run, slot, commit, entry.path) for entry in commit.files)


def measure_leftovers(folder: Path, committed: frozenset[Path] = frozenset()) -> tuple[int, int]:
    """What `sweep` would delete below an attempt's directory: files, and their bytes."""
    num_files = size_bytes = 0
    for parent, folders, names in os.walk(folder):
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        for name in [*names, *links]:
            path = Path(parent) / name
            if Path(parent) == folder and is_record(name) and path not in committed:
                continue
            num_files += 1
            try:
                size_bytes += path.lstat().st_size
            except OSError:
                continue  # another gc was quicker
        if Path(parent) != folder and not names and not folders:
            num_files += 1  # an empty directory is an inode too
    return num_files, size_bytes


def sweep(folder: Path, committed: frozenset[Path] = frozenset(), *, fs: Fs) -> bool:
    """Delete all below an attempt's directory but its records; whether nothing else is left.

    committed: deleted too, also where it looks like a record.
    """
    is_clean = True
    for name in fs.list(folder):
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            is_clean &= _remove_tree(path, fs=fs)
        elif not is_record(name) or path in committed:
            is_clean &= _remove_file(path, fs=fs)
    if folder.is_dir():
        fs.fsync_dir(folder)
    return is_clean


def is_record(name: str) -> bool:
    """Whether a file at the top of an attempt's directory is a record of it."""
    return name.endswith(_RECORD_SUFFIXES) or name in _RECORD_NAMES


def find_unwhole(run: RunDir, slot: Slot, commit: Commit) -> str:
    """The first committed file that is not there in its size; empty if all are.

    The digests are `slurm-rl verify`'s: reading a checkpoint at every tick would be too much.
    """
    for entry in commit.files:
        path = file_path(run, slot, commit, entry.path)
        size = look_at_size(path, entry.size_bytes, fs=run.fs)
        if size != entry.size_bytes:
            found = f"{size} bytes" if size >= 0 else "no such file"
            return f"{path}: {found}, but {entry.size_bytes} bytes were committed"
    return ""


def _remove_tree(path: Path, *, fs: Fs) -> bool:
    """Remove a directory and all in it. Links are removed, never followed."""
    is_clean = True
    for name in fs.list(path):
        child = path / name
        if child.is_dir() and not child.is_symlink():
            is_clean &= _remove_tree(child, fs=fs)
        else:
            is_clean &= _remove_file(child, fs=fs)
    try:
        fs.rmdir(path)
    except FileNotFoundError:
        return is_clean  # another gc was quicker
    except OSError:
        return False  # somebody put something there, or NFS keeps an open file under another name
    return is_clean


def _remove_file(path: Path, *, fs: Fs) -> bool:
    try:
        fs.unlink(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
