"""Room for a stage: what the file system has left, and what the stage will write.

Asked before a stage's program starts, so that a full disk costs seconds of an allocation, not the
hours up to the checkpoint that does not fit. A quota of the user is not in `statvfs` everywhere: a
small file is written to see whether anything can be written at all. It promises nothing: others
write to the same file system meanwhile.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from slurm_rl.config.model_size import count_parameters
from slurm_rl.config.schema import Settings
from slurm_rl.errors import SpaceError, StorageError
from slurm_rl.storage.commits import read_commit
from slurm_rl.storage.control import Control
from slurm_rl.storage.fs import Fs
from slurm_rl.storage.rundir import RunDir
from slurm_rl.types import UNUSUAL, Commit, Slot, StageRef

#: What a stage may need beyond what its last commit took.
MARGIN = 1.2
#: Bytes of a checkpoint and of exported weights for each parameter, at most: parameters, master
#: copy, two moments and the export, all in 32 bits. With bf16 weights it is 16.
TRAIN_BYTES_PER_PARAMETER = 20
#: A model with random weights, in 32 bits; one that is given is linked, not copied.
INIT_BYTES_PER_PARAMETER = 4
#: Of samples and journal for each token: ids, log-probs, masks, and the text twice.
SAMPLE_BYTES_PER_TOKEN = 64
#: Order, heartbeat, result, logs of the ranks.
_OWN_FILES = 32
_PROBE_BYTES = 64 << 10


class StatVfs(Protocol):
    """The part of `os.statvfs_result` that is looked at."""

    @property
    def f_bavail(self) -> int: ...
    @property
    def f_frsize(self) -> int: ...
    @property
    def f_files(self) -> int: ...
    @property
    def f_favail(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Room:
    """What this user may still use at `place`. free_files: None where there is no such limit."""

    place: str
    free_bytes: int
    free_files: int | None = None


@dataclass(frozen=True, slots=True)
class Need:
    """What a stage will write, and from what that is known."""

    size_bytes: int
    num_files: int = _OWN_FILES
    why: str = ""


def read_room(folder: Path, *, statvfs: Callable[[Path], StatVfs] = os.statvfs) -> Room:
    """Free bytes and inodes of the file system of `folder`, for a user without privileges."""
    found = statvfs(folder)
    # Where inodes are made as they are needed (btrfs, many network file systems) the total is 0.
    free_files = found.f_favail if found.f_files else None
    return Room(_mount_of(folder), found.f_bavail * found.f_frsize, free_files)


def estimate_need(run: RunDir, settings: Settings, slot: Slot, control: Control) -> Need:
    """What the stage will write: as much as the iteration before, or what the model's size says."""
    ref = StageRef(slot.iteration - 1, slot.kind)
    if slot.iteration > 0:
        before = Slot(ref.iteration, ref.kind, control.timeline_of(ref), slot.shard)
        commit = read_commit(run, before)
        if commit is not None and UNUSUAL not in commit.content:
            return need_like(commit, str(ref))
    return first_need(settings, slot.kind)


def need_like(commit: Commit, name: str) -> Need:
    """As much as `commit` holds, and a margin. Pure."""
    size = sum(entry.size_bytes for entry in commit.files)
    num_files = math.ceil(MARGIN * len(commit.files)) + _OWN_FILES
    return Need(math.ceil(MARGIN * size), num_files, f"{MARGIN} times what {name} took")


def first_need(settings: Settings, kind: str) -> Need:
    """What a stage writes when none of its kind has, from the settings and the model's size."""
    if kind == "rollout":
        rollout = settings.rollout
        samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
        tokens = rollout.rollout_max_response_len + (rollout.rollout_max_prompt_len or 0)
        size = samples * tokens * SAMPLE_BYTES_PER_TOKEN // rollout.shards
        return Need(size, why=f"{samples} samples of up to {tokens} tokens")
    per_parameter = TRAIN_BYTES_PER_PARAMETER if kind in ("train", "critic") else 0
    if kind == "reference" and settings.reference.ema is not None:
        per_parameter = INIT_BYTES_PER_PARAMETER
    if kind == "init" and settings.init_model is not None:
        per_parameter = INIT_BYTES_PER_PARAMETER
    parameters = (count_parameters(settings) or 0) if per_parameter else 0
    return Need(parameters * per_parameter, why=f"{per_parameter} bytes a parameter")


def check_room(room: Room, need: Need, *, what: str, run_dir: Path) -> None:
    """Raises SpaceError if `need` is more than there is."""
    hint = (
        f"make room (`slurm-rl gc {run_dir}`, fewer checkpoints by retention.keep_last, other"
        f" files) or raise the quota, then `slurm-rl resume {run_dir}`"
    )
    if need.size_bytes > room.free_bytes:
        free, wanted = _format(room.free_bytes), _format(need.size_bytes)
        raise SpaceError(
            f"{room.place}: {free} free, but {what} needs {wanted} ({need.why})", hint=hint
        )
    if room.free_files is not None and need.num_files > room.free_files:
        raise SpaceError(
            f"{room.place}: {room.free_files} inodes free, but {what} needs {need.num_files}",
            hint=hint,
        )


def check_stage_space(
    run: RunDir,
    settings: Settings,
    slot: Slot,
    control: Control,
    *,
    statvfs: Callable[[Path], StatVfs] = os.statvfs,
) -> None:
    """Raises SpaceError if a stage had better not start; StorageError if nothing can be written.

    `slot`'s directory exists: somebody claimed it.
    """
    folder = run.slot_dir(slot)
    need = estimate_need(run, settings, slot, control)
    check_room(read_room(folder, statvfs=statvfs), need, what=str(slot), run_dir=run.root)
    try:
        probe_write(folder, fs=run.fs)
    except SpaceError as error:
        room = read_room(folder, statvfs=statvfs)
        raise SpaceError(
            f"{room.place}: nothing can be written ({_format(room.free_bytes)} free for all: a"
            f" quota, or inodes), and {slot} needs {_format(need.size_bytes)}",
            hint=error.hint,
        ) from error


def probe_write(folder: Path, *, fs: Fs) -> None:
    """Write a small file, make it durable, take it away: what a quota refuses shows here."""
    path = folder / f".tmp-room-{secrets.token_hex(4)}"
    try:
        fs.create(path, os.urandom(_PROBE_BYTES))
        fs.fsync(path)
    finally:
        try:
            fs.unlink(path)
        except (OSError, StorageError):
            pass  # it was never made, or nothing can be changed there


def _mount_of(folder: Path) -> str:
    place = folder.absolute()
    while not os.path.ismount(place):
        place = place.parent
    return str(place)


def _format(size_bytes: int) -> str:
    size, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
