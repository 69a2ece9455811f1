"""The run directory: its layout, its making, and the identity that is written once.

A run exists if and only if `run.json` does; it is published whole, with the settings and the
user's text inside, so that two `submit`s at once cannot mix. `config.yaml` and `resolved.json`
are copies for people and stage programs, made again when they are missing.
"""

from __future__ import annotations

import functools
import json
import secrets
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_rl.errors import CorruptError, FormatError, NoRunError
from slurm_rl.storage.durable import (
    make_directory,
    publish,
    read_published,
    remove_published,
    write_file,
)
from slurm_rl.storage.fs import POSIX, Fs
from slurm_rl.types import RUN_FORMAT, Slot, canonical_json

#: Folders of a run that hold what its work has left.
_OF_WORK = ("iterations", "scheduler", "settings", "control")


@dataclass(frozen=True)
class RunDir:
    """Paths of one run, and the file system they lie on.

    Example: `RunDir(Path("runs/demo")).slot_dir(Slot(12, "train", 0))` is
    `runs/demo/iterations/000012/train.t0`.
    """

    root: Path
    fs: Fs = field(default=POSIX, compare=False)

    @property
    def control_dir(self) -> Path:
        return self.root / "control"

    @property
    def settings_path(self) -> Path:
        return self.root / "resolved.json"

    @property
    def scheduler_dir(self) -> Path:
        return self.root / "scheduler"

    def iteration_dir(self, iteration: int) -> Path:
        return self.root / f"iterations/{iteration:06d}"

    def logs_dir(self, iteration: int) -> Path:
        return self.iteration_dir(iteration) / "logs"

    def stage_dir(self, iteration: int, kind: str, timeline: int) -> Path:
        return _slot_dir(self.root, Slot(iteration, kind, timeline))

    def slot_dir(self, slot: Slot) -> Path:
        return _slot_dir(self.root, slot)

    def code_dir(self, digest: str) -> Path:
        return self.root / "code" / (digest.partition(":")[2][:16] or "none")


@functools.lru_cache(maxsize=4096)  # an observation asks for each a dozen times
def _slot_dir(root: Path, slot: Slot) -> Path:
    shard = "" if slot.shard is None else f"/shard-{slot.shard:04d}"
    return root / f"iterations/{slot.iteration:06d}/{slot.kind}.t{slot.timeline}{shard}"


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """What `run.json` says; it never changes."""

    run_id: str
    name: str
    created: float
    owner: str
    code_version: str
    settings: dict[str, Any]
    config_text: str
    site_text: str = ""
    code_digest: str = ""
    parent: str | None = None
    format: int = RUN_FORMAT

    @property
    def short_id(self) -> str:
        """First part of every job token of this run."""
        return self.run_id[:6]


def new_run_id() -> str:
    """A fresh random identity."""
    return secrets.token_hex(8)


def create_run(run: RunDir, identity: RunIdentity) -> bool:
    """Make the run; False if another identity is already there (nothing is changed then).

    A crash leaves no run, or a whole one whose copies are made again by `write_copies`.
    """
    make_directory(run.control_dir, below=run.root.parent, fs=run.fs)
    make_directory(run.root / "iterations", below=run.root, fs=run.fs)
    data = canonical_json({key: getattr(identity, key) for key in RunIdentity.__slots__})
    won = publish(run.root / "run.json", data, fs=run.fs)
    if won:
        write_copies(run, identity)
    return won


def unmake_run(run: RunDir) -> None:
    """Take away a run that no job ever worked on, so that it can be made anew.

    Its identity goes last: a crash leaves the run, with nothing that was done about it, or none.
    The snapshots of code stay. Only who knows that nothing has begun may ask for it.
    """
    for name in _OF_WORK:
        shutil.rmtree(run.root / name, ignore_errors=True)
    for name in ("site.yaml", "run.json"):
        remove_published(run.root / name, fs=run.fs)
    run.fs.fsync_dir(run.root)


def write_copies(run: RunDir, identity: RunIdentity) -> None:
    """`config.yaml`, `site.yaml` if there is one, and `resolved.json`, from the identity."""
    write_file(run.root / "config.yaml", identity.config_text.encode(), fs=run.fs)
    if identity.site_text:
        write_file(run.root / "site.yaml", identity.site_text.encode(), fs=run.fs)
    text = json.dumps(identity.settings, indent=2, sort_keys=True) + "\n"
    write_file(run.settings_path, text.encode(), fs=run.fs)


def read_identity(run: RunDir) -> RunIdentity:
    """The run's identity. Raises NoRunError, FormatError (a newer directory) or CorruptError."""
    path = run.root / "run.json"
    data = read_published(path, fs=run.fs)
    if data is None:
        raise NoRunError(
            f"{run.root}: no run here (run.json is missing)",
            hint="give a run directory, or start one with `slurm-rl submit CONFIG`",
        )
    try:
        raw = json.loads(data)
        version = int(raw["format"])
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{path}: not a run identity ({error})") from error
    if version > RUN_FORMAT:
        raise FormatError(
            f"{path}: format {version} is newer than this slurm-rl reads ({RUN_FORMAT})",
            hint="use the slurm-rl that made the run",
        )
    try:
        return RunIdentity(**raw)
    except TypeError as error:
        raise CorruptError(f"{path}: not a run identity ({error})") from error


def filesystem_now(run: RunDir) -> float:
    """Seconds since the epoch by the clock of the run's file system.

    Ages of intents are differences of this one clock, since nodes' clocks may disagree: where it
    cannot be read, that is raised (OSError, StorageError), and no other clock stands in.
    """
    return run.fs.now(run.control_dir)
