"""Tombstones: what is going to be deleted, since when, and what is gone on purpose.

They lie in the slot's directory, beside its COMMIT:

    TOMBSTONE              the bulk of the commit is to go; carries a token
    TOMBSTONE.<attempt>    so is what an abandoned attempt left
    <either>.since-<token> when its grace began: a clock read *after* the tombstone was published
    PRUNED                 the point of no return: files of the commit may be missing from here on

A tombstone alone can be taken back; PRUNED stays, and tells pruned from damaged. What is deleted,
and when, is `retention`'s and `prune`'s.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_rl.errors import CorruptError, PrunedError, StorageError
from slurm_rl.storage.durable import publish, read_published, remove_published
from slurm_rl.storage.rundir import RunDir
from slurm_rl.types import Slot, canonical_json

TOMBSTONE = "TOMBSTONE"
PRUNED = "PRUNED"
_SINCE = ".since-"


@dataclass(frozen=True, slots=True)
class Tombstone:
    """`since`: when the grace began, by the clock of the run's file system; None: not yet."""

    token: str
    since: float | None = None


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was deleted under which tombstone, and the directory that has a verified copy."""

    token: str
    num_files: int = 0
    size_bytes: int = 0
    archive: str = ""


def read_tombstone(run: RunDir, slot: Slot, attempt: str = "") -> Tombstone | None:
    """The tombstone over a commit's bulk, or over an abandoned attempt. Raises CorruptError."""
    path = _tombstone_path(run, slot, attempt)
    raw = _read(run, path)
    if raw is None:
        return None
    token = str(raw.get("token", ""))
    since = _read(run, _since_path(path, token))
    return Tombstone(token, None if since is None else float(since["since"]))


def publish_tombstone(
    run: RunDir, slot: Slot, attempt: str = "", *, clock: Callable[[], float]
) -> Tombstone:
    """Say that something is going to be deleted; what is there if somebody said so already.

    A crash leaves nothing, or a tombstone whose grace has not begun: the next call begins it.
    """
    path = _tombstone_path(run, slot, attempt)
    publish(path, canonical_json({"token": secrets.token_hex(6)}), fs=run.fs)
    found = read_tombstone(run, slot, attempt)
    if found is None:
        raise StorageError(f"{path}: published, and gone again")
    if found.since is None:
        # The clock is read now: were it read before, a writer that hangs would give no grace.
        since = canonical_json({"since": clock()})
        publish(_since_path(path, found.token), since, fs=run.fs)
        found = read_tombstone(run, slot, attempt) or found
    return found


def remove_tombstone(run: RunDir, slot: Slot, attempt: str = "") -> None:
    """Take a tombstone away: the deletion is done, or is not to be.

    `since` goes first: without its tombstone nobody would remove it.
    """
    path = _tombstone_path(run, slot, attempt)
    begun = [n for n in run.fs.list(path.parent) if n.startswith(f"{path.name}{_SINCE}")]
    for name in [*begun, path.name]:
        remove_published(path.with_name(name), fs=run.fs)
    run.fs.fsync_dir(path.parent)


def publish_pruned(run: RunDir, slot: Slot, pruned: Pruned) -> None:
    """The point of no return, before the first file is deleted."""
    publish(_pruned_path(run, slot), canonical_json(dataclasses.asdict(pruned)), fs=run.fs)


def read_pruned(run: RunDir, slot: Slot) -> Pruned | None:
    """What was deleted of a slot's commit, or of the stage that it is a shard of; None: nothing."""
    for place in dict.fromkeys([slot, dataclasses.replace(slot, shard=None)]):
        raw = _read(run, _pruned_path(run, place))
        if raw is not None:
            try:
                return Pruned(**raw)
            except TypeError as error:
                path = _pruned_path(run, place)
                raise CorruptError(f"{path}: not a note of pruning ({error})") from error
    return None


def is_pruned(run: RunDir, slot: Slot) -> bool:
    """Whether files of the slot's commit may be gone on purpose."""
    return read_pruned(run, slot) is not None


def is_condemned(run: RunDir, slot: Slot) -> bool:
    """Whether the bulk of the slot's commit is gone or going: nobody may begin to read it."""
    places = dict.fromkeys([slot, dataclasses.replace(slot, shard=None)])
    return any({TOMBSTONE, PRUNED} & set(run.fs.list(run.slot_dir(p))) for p in places)


def check_there(run: RunDir, slot: Slot) -> None:
    """Raises PrunedError if the bulk of the slot's commit is gone or going."""
    pruned = read_pruned(run, slot)
    if pruned is not None:
        raise PrunedError(f"{slot}: {explain_pruned(run, slot, pruned)}")
    if is_condemned(run, slot):
        error = PrunedError(
            f"{slot}: marked for deletion ({run.slot_dir(slot) / TOMBSTONE})",
            hint="`slurm-rl gc RUN` says why, and takes back a mark that is not meant any more",
        )
        error.blame = "system"  # it may yet be taken back
        raise error


def explain_pruned(run: RunDir, slot: Slot, pruned: Pruned) -> str:
    """One line for a person who looks for the files."""
    where = f"; a copy is in {pruned.archive}" if pruned.archive else ""
    return f"pruned by retention ({pruned.num_files} files of {run.slot_dir(slot)}){where}"


def tombstones_in(names: list[str]) -> list[str]:
    """Attempts (`""` for the commit's bulk) that a slot directory with these names condemns."""
    found = []
    for name in names:
        head, dot, attempt = name.partition(".")
        if head == TOMBSTONE and _SINCE not in name:
            found.append(attempt if dot else "")
    return found


def is_tombstone(name: str) -> bool:
    """Whether a name in a slot directory is a tombstone, or the beginning of its grace."""
    return name.partition(".")[0] == TOMBSTONE


def _tombstone_path(run: RunDir, slot: Slot, attempt: str) -> Path:
    return run.slot_dir(slot) / (f"{TOMBSTONE}.{attempt}" if attempt else TOMBSTONE)


def _since_path(path: Path, token: str) -> Path:
    return path.with_name(f"{path.name}{_SINCE}{token}")


def _pruned_path(run: RunDir, slot: Slot) -> Path:
    return run.slot_dir(slot) / PRUNED


def _read(run: RunDir, path: Path) -> dict[str, Any] | None:
    data = read_published(path, fs=run.fs)
    if data is None:
        return None
    try:
        raw = json.loads(data)
        if not isinstance(raw, dict):
            raise ValueError("not a mapping")
        return raw
    except ValueError as error:
        raise CorruptError(f"{path}: not readable ({error})") from error
