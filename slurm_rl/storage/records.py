"""Records of old iterations: intents, claims, orders, last words, logs, all in one file.

    iterations/000012/records.0001.tar

A long run has a few inodes for each old iteration then: the COMMITs, what was kept, and this. The
tar is published whole and without replacing; an original is deleted only if its bytes were read
back from the published file. So two folders at once do no harm, and a crash leaves originals that
the next one finds in the tar. What comes late (a zombie's last word) goes into the next number.

It refuses everything that it does not know: committed files, notes of pruning, a user's own files.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from slurm_rl.errors import CorruptError
from slurm_rl.storage.durable import publish_file, remove_published
from slurm_rl.storage.fs import Fs
from slurm_rl.storage.intents import POOL_FOLDER
from slurm_rl.storage.prune import is_record
from slurm_rl.storage.rundir import RunDir
from slurm_rl.storage.tombstones import is_tombstone

_TAR = re.compile(r"records\.(\d{4,})\.tar")
_STAGE = re.compile(r".+\.t\d+")
#: What lies below a stage as the files of a slot do: shards, and the intents of pools.
_PART = re.compile(rf"shard-\d{{4,}}|{POOL_FOLDER}.+")
_ATTEMPT = re.compile(r"a\d{4,}-[0-9a-zA-Z]+")
#: Claims and intents, and what belongs to them.
_OF_SLOT = re.compile(r"(claim|submit)\.\d{4,}(\..+)?")
#: Groups as they arrived: committed as samples, so of interest to people only.
_JOURNAL = "journal.jsonl"
_TEMPORARY = ".tmp-"
_BLOCK_BYTES = 4 << 20


def fold_records(run: RunDir, iteration: int, *, committed: Iterable[Path]) -> int:
    """Put the records of an iteration into one file and delete the originals; how many.

    The caller knows that the iteration is complete, settled and far behind. `committed` are the
    files that its COMMITs name. Raises CorruptError if an earlier tar cannot be read.
    """
    root, fs = run.iteration_dir(iteration), run.fs
    kept = set(committed)
    found = find_records(run, iteration, committed=kept)
    left = _delete_folded(root, found, fs=fs)
    if left:
        target = root / f"records.{1 + _last_number(root, fs=fs):04d}.tar"
        temporary = root / f"{_TEMPORARY}{target.name}-{secrets.token_hex(4)}"
        _write_tar(temporary, root, left, fs=fs)
        publish_file(temporary, target, fs=fs)
        left = _delete_folded(root, left, fs=fs)
    _remove_litter(root, kept, fs=fs)
    return len(found) - len(left)


def find_records(run: RunDir, iteration: int, *, committed: Iterable[Path]) -> list[Path]:
    """Files of an iteration that may be folded, sorted."""
    kept = set(committed)
    return sorted(p for p in _candidates(run.iteration_dir(iteration)) if p not in kept)


def records_of(run: RunDir, iteration: int) -> list[Path]:
    """The tars that hold the records of an iteration; empty if they were never folded."""
    root = run.iteration_dir(iteration)
    return [_readable(root / name) for name in run.fs.list(root) if _TAR.fullmatch(name)]


def _candidates(root: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(root):
        here = Path(parent).relative_to(root)
        folders[:] = [name for name in folders if not (Path(parent) / name).is_symlink()]
        for name in names:
            path = Path(parent) / name
            if _is_candidate(here.parts, name) and not path.is_symlink():
                yield path


def _is_candidate(folder: tuple[str, ...], name: str) -> bool:
    """Whether a file in `folder` (parts below the iteration) is a record."""
    if not folder or name.startswith(_TEMPORARY):
        return False
    if folder[0] == "logs":
        return True
    rest = _below_slot(folder)
    if rest is None:
        return False
    if not rest:
        return _OF_SLOT.fullmatch(name) is not None
    if _OF_SLOT.fullmatch(rest[0]):
        return True  # without hard links a published name is a directory with one file
    is_attempt = len(rest) == 1 and _ATTEMPT.fullmatch(rest[0]) is not None
    return is_attempt and (is_record(name) or name == _JOURNAL)


def _below_slot(folder: tuple[str, ...]) -> tuple[str, ...] | None:
    """What is below the slot's directory in `folder`; None outside of slots."""
    if not folder or not _STAGE.fullmatch(folder[0]):
        return None
    rest = folder[1:]
    return rest[1:] if rest and _PART.fullmatch(rest[0]) else rest


def _write_tar(temporary: Path, root: Path, paths: list[Path], *, fs: Fs) -> None:
    """A tar of `paths`, in pieces: logs may be large."""
    fs.create(temporary, b"")
    block = bytearray()
    for path in paths:
        try:
            data, stat = fs.read(path), path.stat()
        except FileNotFoundError:
            continue  # another gc was quicker
        info = tarfile.TarInfo(str(path.relative_to(root)))
        info.size, info.mtime, info.mode = len(data), int(stat.st_mtime), stat.st_mode & 0o777
        block += info.tobuf(tarfile.PAX_FORMAT) + data + bytes(-len(data) % tarfile.BLOCKSIZE)
        if len(block) >= _BLOCK_BYTES:
            fs.append(temporary, bytes(block))
            block.clear()
    fs.append(temporary, bytes(block) + bytes(2 * tarfile.BLOCKSIZE))


def _delete_folded(root: Path, paths: list[Path], *, fs: Fs) -> list[Path]:
    """Delete originals whose bytes are in a published tar; those that are in none."""
    left = {str(path.relative_to(root)): path for path in paths}
    for name in fs.list(root):
        if not left or not _TAR.fullmatch(name):
            continue
        try:
            with tarfile.open(_readable(root / name), "r:") as tar:
                for member in tar:
                    path = left.get(member.name)
                    if path is not None and _is_same(path, tar.extractfile(member)):
                        _remove(path, fs=fs)
                        del left[member.name]
        except (tarfile.TarError, OSError) as error:
            raise CorruptError(
                f"{root / name}: not a readable tar ({error}); the originals stay",
                hint="move it away; the next gc makes another",
            ) from error
    return sorted(left.values())


def _is_same(path: Path, member: IO[bytes] | None) -> bool:
    try:
        return member is not None and path.read_bytes() == member.read()
    except FileNotFoundError:
        return True  # another gc was quicker


def _remove(path: Path, *, fs: Fs) -> None:
    with contextlib.suppress(FileNotFoundError):
        fs.unlink(path)


def _remove_litter(root: Path, kept: set[Path], *, fs: Fs) -> None:
    """Directories that are empty now, and what writers that were killed left behind.

    Nobody has work here any more; a writer that is late all the same fails, and has lost anyway.
    What lies inside of an attempt's own directories is not looked at.
    """
    for parent, folders, names in os.walk(root, topdown=False):
        rest = _below_slot(Path(parent).relative_to(root).parts)
        if rest is not None and len(rest) > 1:
            continue
        changed = False
        for name in [*names, *folders]:
            path = Path(parent) / name
            is_temporary = name.startswith(_TEMPORARY) and path not in kept
            # Left by two passes at once: the tombstone itself is gone.
            if is_temporary or (rest == () and is_tombstone(name)):
                remove_published(path, fs=fs)
                changed = True
        for name in folders:
            path = Path(parent) / name
            if not rest and not path.is_symlink() and not fs.list(path):
                with contextlib.suppress(OSError):
                    fs.rmdir(path)
                    changed = True
        if changed:
            fs.fsync_dir(Path(parent))


def _last_number(root: Path, *, fs: Fs) -> int:
    found = [match for name in fs.list(root) if (match := _TAR.fullmatch(name))]
    return max((int(match[1]) for match in found), default=0)


def _readable(path: Path) -> Path:
    """The file itself, where without hard links the name is a directory."""
    return path / "content" if path.is_dir() else path
