"""Copies of weights on a node's own disk or memory, shared by all that serve there.

    <folder>/slurm-rl-<uid>/       ours alone (0700; anything else there is not believed)
        <digest>/                  a finished copy, and `.slurm-rl.json`: its files and digests
        <digest>.use               held shared by whoever serves it; who deletes it holds it alone
        <digest>.lock              who copies holds it, so that one process of a node reads
        .tmp-<digest>-…/           a copy under way, or what a kill left of one

A copy lies under the digest of its files and gets its name by one rename, after its bytes were
compared with the commit while they were copied, and fsynced. Whoever finds one reads every file of
it again and compares: a stale, damaged or foreign folder is never served, and is made anew. So a
kill at any moment leaves at worst a `.tmp-` folder, which the next one to come deletes. The locks
keep it polite; none of this rests on them, but that what is served is not deleted meanwhile.

Memory that copies take in /dev/shm counts as the job's. The oldest that nobody serves go first.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from slurm_rl.errors import ConfigError, SlurmRlError, StorageError
from slurm_rl.storage.digest import digest_entries, digest_file
from slurm_rl.storage.durable import VISIBLE_S, list_files, wait_for_size
from slurm_rl.storage.fs import POSIX, Fs
from slurm_rl.types import FileEntry, canonical_json

log = logging.getLogger(__name__)

_MANIFEST = ".slurm-rl.json"
_LEFT = re.compile(r"\.tmp-(.+?-[0-9a-f]+)-")
#: Left free on the node's file system: others use it too.
_SPARE_BYTES = 64 << 20
#: How long another process's copy is waited for before the committed files are served instead.
PATIENCE_S = 1800.0


class NoCopy(SlurmRlError):
    """There can be no copy here; the committed files are as good."""


class Copies:
    """The copies below one folder of this node.

    folder:      may name variables of this node's environment, as `$TMPDIR`. ConfigError if one is
                 unset.
    limit_bytes: most that all copies take together; None: room for two of the size that is asked.
    patience_s:  how long another process's copy is waited for.
    visible_s:   how long a committed file that this node does not see yet is.
    """

    def __init__(
        self,
        folder: Path,
        *,
        limit_bytes: int | None = None,
        patience_s: float = PATIENCE_S,
        visible_s: float = VISIBLE_S,
        fs: Fs = POSIX,
    ) -> None:
        expanded = os.path.expandvars(folder)
        if unset := re.search(r"\$\{?\w+\}?", expanded):
            raise ConfigError(
                f"rollout.stage_weights = {folder}: {unset[0]} is not set on this node",
                hint="write the path out, or set it in rollout.env",
            )
        self._root = Path(expanded) / f"slurm-rl-{os.getuid()}"
        self._limit_bytes = limit_bytes
        self._patience_s = patience_s
        self._visible_s = visible_s
        self._fs = fs

    @contextmanager
    def take(self, sources: Mapping[str, Path], entries: Sequence[FileEntry]) -> Iterator[Path]:
        """A verified copy of `entries`, by name in `sources`; nobody deletes it meanwhile.

        Raises NoCopy where there is no room, another takes too long, or the copy is not what was
        committed: whether the committed files are is for the caller to see.
        """
        self._enter_root()
        name = digest_entries(entries).replace(":", "-")
        path = self._root / name
        # Held from before the copy is looked at until nobody serves it.
        with self._using(name):
            with self._copying(name):
                self._clean(name)
                if not self._is_good(path, entries):
                    self._make_room(name, sum(entry.size_bytes for entry in entries))
                    self._copy(name, sources, entries)
                os.utime(path / _MANIFEST)  # when it was last wanted
            yield path

    def _enter_root(self) -> None:
        """Make our own folder; NoCopy if what is there is not ours alone."""
        try:
            self._root.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                self._root.mkdir(mode=0o700)
            found = self._root.lstat()
        except OSError as error:
            raise NoCopy(f"{self._root}: {error.strerror}") from error
        mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
        if not mine or found.st_mode & 0o022:
            raise NoCopy(f"{self._root} can be written by others")

    @contextmanager
    def _using(self, name: str) -> Iterator[None]:
        """A shared hold: nobody deletes the copy `name` meanwhile."""
        with open(self._root / f"{name}.use", "a") as file:
            deadline = time.monotonic() + self._patience_s
            while not _lock(file.fileno(), fcntl.LOCK_SH):
                if time.monotonic() > deadline:
                    raise NoCopy(f"another process is deleting {self._root / name}")
                time.sleep(0.05)
            yield

    @contextmanager
    def _copying(self, name: str) -> Iterator[None]:
        lock = FileLock(self._root / f"{name}.lock", timeout=self._patience_s)
        try:
            lock.acquire()
        except Timeout as error:
            rule = f"another process has not copied {name} within {self._patience_s:g} s"
            raise NoCopy(rule) from error
        except OSError as error:
            raise NoCopy(f"{self._root}: {error.strerror}") from error
        try:
            yield
        finally:
            lock.release()

    def _clean(self, name: str) -> None:
        """Delete what killed copiers of `name` left: its lock is ours, so they are gone."""
        for left in self._root.glob(f".tmp-{name}-*"):
            log.info("deletes what a killed process left: %s", left)
            shutil.rmtree(left, ignore_errors=True)

    def _is_good(self, path: Path, entries: Sequence[FileEntry]) -> bool:
        """Whether `path` holds these very files and no others; what is wrong is put aside."""
        if not path.exists():
            return False
        wrong = describe_copy(path, entries)
        if not wrong:
            log.info("serves the copy %s, verified", path)
            return True
        log.warning("%s; makes it anew", wrong)
        aside = self._root / f".tmp-{path.name}-bad-{secrets.token_hex(4)}"
        self._fs.rename(path, aside)
        shutil.rmtree(aside, ignore_errors=True)
        return False

    def _make_room(self, name: str, size_bytes: int) -> None:
        """Delete the oldest copies that nobody uses until this one fits. Raises NoCopy."""
        # Two versions are never of quite the same size.
        limit = size_bytes * 21 // 10 if self._limit_bytes is None else self._limit_bytes
        if size_bytes > limit:
            raise NoCopy(f"{size_bytes / 1e9:.2f} GB are more than stage_weights_gb allows")
        others = self._others(name)
        while True:
            kept = sum(size for _, size in others)
            free = shutil.disk_usage(self._root).free
            if kept + size_bytes <= limit and size_bytes + _SPARE_BYTES <= free:
                return
            gone = next((o for o in others if self._delete(o[0])), None)
            if gone is None:
                raise NoCopy(
                    f"{self._root}: {size_bytes / 1e9:.2f} GB do not fit: {free / 1e9:.2f} GB are"
                    f" free, {kept / 1e9:.2f} of {limit / 1e9:.2f} GB are taken by copies in use"
                )
            others.remove(gone)

    def _others(self, name: str) -> list[tuple[Path, int]]:
        """Every other copy, finished or not, and its bytes; the one unused for longest first."""
        found = []
        for path in self._root.iterdir():
            if path.name == name or not path.is_dir():
                continue
            with contextlib.suppress(OSError):  # another process may be deleting it
                manifest = path / _MANIFEST
                wanted = manifest.stat().st_mtime if manifest.exists() else path.stat().st_mtime
                names = [name for name in list_files(path) if name != _MANIFEST]
                size = sum((path / name).stat().st_size for name in names)
                found.append((wanted, path, size))
        return [(path, size) for _, path, size in sorted(found)]

    def _delete(self, path: Path) -> bool:
        """Delete a copy that nobody uses, or what a killed copier left; False if somebody does."""
        left = _LEFT.match(path.name)
        lock = f"{left[1]}.lock" if left else f"{path.name}.use"
        with open(self._root / lock, "a") as file:
            if not _lock(file.fileno(), fcntl.LOCK_EX):
                return False
            log.info("deletes %s", path)
            aside = path
            if not left:  # first by its name: a kill midway must not leave a copy that lacks files
                aside = self._root / f".tmp-{path.name}-{secrets.token_hex(4)}"
                self._fs.rename(path, aside)
            shutil.rmtree(aside, ignore_errors=True)
        return True

    def _copy(self, name: str, sources: Mapping[str, Path], entries: Sequence[FileEntry]) -> None:
        began = time.monotonic()
        temporary = self._root / f".tmp-{name}-{secrets.token_hex(4)}"
        try:
            self._fs.mkdir(temporary)
            for entry in entries:
                target, patience_s = temporary / entry.path, self._visible_s
                copy_verified(
                    sources[entry.path], target, entry, patience_s=patience_s, fs=self._fs
                )
            manifest = [[e.path, e.size_bytes, e.digest] for e in entries]
            self._fs.create(temporary / _MANIFEST, canonical_json(manifest))
            self._fs.fsync(temporary / _MANIFEST)
            for folder in sorted({(temporary / e.path).parent for e in entries} | {temporary}):
                self._fs.fsync_dir(folder)
            self._name(temporary, self._root / name, entries)
            self._fs.fsync_dir(self._root)
        except (OSError, StorageError) as error:
            raise NoCopy(f"{self._root}: {error}") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # there only if something failed
        size = sum(entry.size_bytes for entry in entries)
        took_s = time.monotonic() - began
        log.info("copied %.2f GB to %s in %.1f s", size / 1e9, self._root / name, took_s)

    def _name(self, temporary: Path, path: Path, entries: Sequence[FileEntry]) -> None:
        try:
            self._fs.rename(temporary, path)
        except OSError as error:
            # Another process, whatever the locks said, was there first: then it is as good.
            wrong = describe_copy(path, entries)
            if wrong:
                raise NoCopy(f"{path}: {error.strerror}; {wrong}") from error


def describe_copy(path: Path, entries: Sequence[FileEntry]) -> str:
    """How `path` is not a copy of `entries`, in words; empty if it is. Reads all of it."""
    wanted = sorted([e.path, e.size_bytes, e.digest] for e in entries)
    try:
        found = sorted(json.loads((path / _MANIFEST).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        return f"{path} has no manifest that can be read ({error})"
    if found != wanted:
        return f"{path} is of other files than the commit's"
    names = set(list_files(path)) - {_MANIFEST}
    if names != {entry.path for entry in entries}:
        return f"{path} does not hold the files of its manifest"
    for entry in entries:
        try:
            same = (path / entry.path).stat().st_size == entry.size_bytes
            same = same and digest_file(path / entry.path) == entry.digest
        except OSError as error:
            return f"{path / entry.path}: {error.strerror}"
        if not same:
            return f"{path / entry.path} is not what was copied"
    return ""


def copy_verified(
    source: Path, target: Path, entry: FileEntry, *, patience_s: float, fs: Fs = POSIX
) -> None:
    """Copy a file and compare the copy with `entry`; fsynced and read-only. Raises NoCopy.

    patience_s: how long a source is waited for that this node does not see yet.
    """
    wait_for_size(source, entry.size_bytes, patience_s=patience_s, fs=fs)
    try:
        fs.mkdir(target.parent)
        shutil.copyfile(source, target)
        target.chmod(0o444)
        fs.fsync(target)
        digest = digest_file(target)
    except (OSError, StorageError) as error:
        raise NoCopy(f"{source} to {target}: {error}") from error
    if digest != entry.digest:
        raise NoCopy(f"{target}: digest {digest}, but {entry.digest} was committed")


def _lock(fd: int, kind: int) -> bool:
    """Lock an open file, shared or alone, unless that would have to wait."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
