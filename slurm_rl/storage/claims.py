"""Claims: who works on a slot, and whether that somebody is alive.

A claim is a published file `claim.0001`, `claim.0002`, …; the highest epoch holds the slot. It
carries the job's token (a requeue of the same job may supersede it at once) and a fresh token of
the attempt. Job ids and restart counts are not used: a controller crash reissues ids.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from slurm_rl.errors import CorruptError
from slurm_rl.storage.durable import make_directory, publish, read_published, write_hint
from slurm_rl.storage.rundir import RunDir
from slurm_rl.types import Claim, Slot, canonical_json

_PREFIX = "claim."
#: Nothing else is a claim: people leave backups, and a crash leaves temporary files.
_NAME = re.compile(r"claim\.\d{4,}")


def read_claims(run: RunDir, slot: Slot) -> list[Claim]:
    """Every claim on `slot`, by epoch."""
    folder = run.slot_dir(slot)
    names = [name for name in run.fs.list(folder) if _NAME.fullmatch(name)]
    return [_read_claim(run, folder / name) for name in names]


def read_latest_claim(run: RunDir, slot: Slot) -> Claim | None:
    """The claim that holds `slot`."""
    folder = run.slot_dir(slot)
    names = [name for name in run.fs.list(folder) if _NAME.fullmatch(name)]
    return _read_claim(run, folder / names[-1]) if names else None


def try_claim(run: RunDir, slot: Slot, claim: Claim) -> bool:
    """Take `slot` at `claim.epoch`; False if somebody else has that epoch.

    On success the attempt directory exists. A crash in between leaves a claim without one,
    which counts as an attempt.
    """
    folder = run.slot_dir(slot)
    make_directory(folder, below=run.root, fs=run.fs)
    data = canonical_json(dataclasses.asdict(claim))
    won = publish(folder / f"{_PREFIX}{claim.epoch:04d}", data, fs=run.fs)
    if won:
        make_directory(attempt_dir(run, slot, claim), below=folder, fs=run.fs)
    return won


def is_superseded(run: RunDir, slot: Slot, claim: Claim) -> bool:
    """Whether a later epoch holds the slot."""
    folder = run.slot_dir(slot)
    return read_published(folder / f"{_PREFIX}{claim.epoch + 1:04d}", fs=run.fs) is not None


def attempt_dir(run: RunDir, slot: Slot, claim: Claim) -> Path:
    """The only directory in which the attempt writes."""
    return run.slot_dir(slot) / claim.attempt_name


def node_name() -> str:
    """This node as Slurm calls it, which need not be its hostname."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def new_token() -> str:
    """A fresh attempt token."""
    return secrets.token_hex(6)


def write_heartbeat(
    run: RunDir, slot: Slot, claim: Claim, counter: int, *, elapsed_s: float
) -> None:
    """Show watchers a counter that differs from the last, and for how long the attempt has run.

    Not durable: nobody needs it later.
    """
    path = attempt_dir(run, slot, claim) / "heartbeat"
    write_hint(path, f"{counter} {elapsed_s:.1f}".encode(), fs=run.fs)


def read_heartbeat(run: RunDir, slot: Slot, claim: Claim) -> str:
    """The counter of an attempt and its seconds so far; empty if there is none yet."""
    try:
        return run.fs.read(attempt_dir(run, slot, claim) / "heartbeat").decode()
    except FileNotFoundError:
        return ""


def read_elapsed(run: RunDir, slot: Slot, claim: Claim) -> float:
    """Seconds that an attempt ran: by its own last word, else by its last heartbeat."""
    end = read_end(run, slot, claim)
    if end is not None and end.elapsed_s:
        return end.elapsed_s
    try:
        return float(read_heartbeat(run, slot, claim).partition(" ")[2] or 0.0)
    except ValueError:
        return 0.0


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """How an attempt ended, as it says itself; an attempt that was killed says nothing.

    outcome: committed | failed | stopped (told to stop) | timed_out | superseded | deferred
             (`service`, outside of the run, is down).
    blame:   for `failed`: `user` (a retry cannot help), `system` (it may), or `repeat` (it may
             not: if the next one fails in the same `place`, the run halts).
    """

    outcome: str
    blame: str = ""
    error: str = ""
    message: str = ""
    node: str = ""
    ended: float = 0.0
    place: str = ""
    elapsed_s: float = 0.0
    service: str = ""


def write_end(run: RunDir, slot: Slot, claim: Claim, end: AttemptEnd) -> None:
    """Leave word of how the attempt ended."""
    path = attempt_dir(run, slot, claim) / "ended.json"
    write_hint(path, canonical_json(dataclasses.asdict(end)), fs=run.fs)


def read_end(run: RunDir, slot: Slot, claim: Claim) -> AttemptEnd | None:
    """How the attempt ended, if it could say so."""
    try:
        data = run.fs.read(attempt_dir(run, slot, claim) / "ended.json")
        return AttemptEnd(**json.loads(data))
    except (FileNotFoundError, ValueError, TypeError):
        return None  # word of mouth only: nothing is decided by its absence


def _read_claim(run: RunDir, path: Path) -> Claim:
    data = read_published(path, fs=run.fs)
    try:
        return _parse_claim(data or b"")
    except (ValueError, TypeError) as error:
        raise CorruptError(f"{path}: not a claim ({error})") from error


@functools.lru_cache(maxsize=256)  # who waits reads the same bytes every second
def _parse_claim(data: bytes) -> Claim:
    return Claim(**json.loads(data))
