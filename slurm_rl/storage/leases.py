"""Leases: who reads something committed that nobody in the chain is about to read.

A reader writes a lease, *then* looks for a tombstone; the deleter publishes the tombstone, waits,
and *then* reads the leases. So one of the two always sees the other. A lease is renewed by its
holder and runs out by itself, by the clock of the run's file system: a holder that died delays a
deletion, and never prevents it.

    leases/lease.<token>   {"token", "slots", "holder", "renewed", "lifetime_s"}

It refuses to decide what a lease keeps: that is `retention`'s.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from slurm_rl.errors import CorruptError, PrunedError, StorageError
from slurm_rl.storage.durable import make_directory, write_file
from slurm_rl.storage.rundir import RunDir
from slurm_rl.storage.tombstones import check_there
from slurm_rl.types import Slot, canonical_json

#: How long a lease holds without being renewed; a holder renews it four times as often.
LEASE_S = 3600.0
_NAME = re.compile(r"lease\.[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Lease:
    """One reader's word that it reads the committed files of `slots` (by name).

    Example: `Lease("3f", ("i0012.train.t0",), "eval on login1", renewed=5.0, lifetime_s=3600.0)`.
    """

    token: str
    slots: tuple[str, ...]
    holder: str
    renewed: float
    lifetime_s: float = LEASE_S

    def is_live(self, now: float) -> bool:
        return now - self.renewed < self.lifetime_s

    def covers(self, slot: Slot) -> bool:
        """Whether it holds `slot`, the stage that it is a shard of, or a shard of it."""
        stage = str(dataclasses.replace(slot, shard=None))
        if slot.shard is not None:
            return bool({stage, str(slot)} & set(self.slots))
        return any(name == stage or name.startswith(f"{stage}/") for name in self.slots)


def leases_dir(run: RunDir) -> Path:
    return run.root / "leases"


def take_lease(
    run: RunDir, slots: Iterable[Slot], *, holder: str, now: float, lifetime_s: float = LEASE_S
) -> Lease:
    """Write a lease. It counts only if no tombstone is found *afterwards*: see `hold`."""
    names = tuple(sorted({str(slot) for slot in slots}))
    lease = Lease(secrets.token_hex(6), names, holder, now, lifetime_s)
    make_directory(leases_dir(run), below=run.root, fs=run.fs)
    _write(run, lease)
    return lease


def renew_lease(run: RunDir, lease: Lease, *, now: float) -> Lease | None:
    """The lease, renewed; None if it had run out: what it held may be gone, so look again."""
    if not lease.is_live(now):
        return None
    renewed = dataclasses.replace(lease, renewed=now)
    _write(run, renewed)
    return renewed


def drop_lease(run: RunDir, lease: Lease) -> None:
    """Let go. A lease that cannot be removed runs out by itself."""
    with contextlib.suppress(OSError, StorageError):
        run.fs.unlink(_path(run, lease.token))


def read_leases(run: RunDir) -> list[Lease]:
    """Every lease, live or not. Raises CorruptError: one that cannot be read may hold anything."""
    found = []
    for name in run.fs.list(leases_dir(run)):
        if not _NAME.fullmatch(name):
            continue
        path = leases_dir(run) / name
        try:
            raw = json.loads(run.fs.read(path))
            found.append(Lease(**{**raw, "slots": tuple(raw["slots"])}))
        except FileNotFoundError:
            continue  # let go between listing and reading
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptError(
                f"{path}: not a lease ({error}); nothing is deleted while it is there",
                hint="remove the file if nobody reads the run by hand",
            ) from error
    return found


def forget_dead_leases(run: RunDir, leases: Iterable[Lease], *, now: float) -> None:
    """Remove leases that ran out long ago: their holders died."""
    for lease in leases:
        if now - lease.renewed > 2 * lease.lifetime_s:
            drop_lease(run, lease)


@contextlib.contextmanager
def hold(
    run: RunDir,
    slots: Iterable[Slot],
    *,
    holder: str,
    clock: Callable[[], float],
    lifetime_s: float = LEASE_S,
) -> Iterator[Lease]:
    """Read the committed files of `slots` in peace. Raises PrunedError if they are going or gone.

    For readers that are done within `lifetime_s`; longer ones call `renew_lease`.
    """
    wanted = list(slots)
    lease = take_lease(run, wanted, holder=holder, now=clock(), lifetime_s=lifetime_s)
    try:
        for slot in wanted:
            check_there(run, slot)
        yield lease
    finally:
        drop_lease(run, lease)


def check_lease(run: RunDir, lease: Lease, slots: Iterable[Slot], *, now: float) -> Lease:
    """`lease` renewed; if it had run out, taken again. Raises PrunedError if that came too late."""
    renewed = renew_lease(run, lease, now=now)
    if renewed is not None:
        return renewed
    again = dataclasses.replace(lease, renewed=now)
    _write(run, again)
    try:
        for slot in slots:
            check_there(run, slot)
    except PrunedError:
        drop_lease(run, again)
        raise
    return again


def _path(run: RunDir, token: str) -> Path:
    return leases_dir(run) / f"lease.{token}"


def _write(run: RunDir, lease: Lease) -> None:
    write_file(_path(run, lease.token), canonical_json(dataclasses.asdict(lease)), fs=run.fs)
