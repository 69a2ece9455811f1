"""The folder that `slurm-rl doctor` and `slurm-rl shell` work in: made, removed, and swept after
a crash.

It is called `<prefix>-<token>` and holds a file `owner` that says whose it is. A leftover is
removed when its process is known to be gone, or after a day where that cannot be known (another
machine). Nothing of a run ever lies in it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from slurm_rl.launch.local import process_start, this_place

DOCTOR = ".doctor"
SHELL = ".shell"
_OLD_S = 86400.0
#: What a job still has open goes when it ends; NFS keeps it under another name until then.
_REMOVE_TRIES = 20


def find_parent(run_dir: Path) -> Path:
    """Where the folder goes: `control/` of a run that exists, else the nearest folder above."""
    if (run_dir / "control").is_dir():
        return run_dir / "control"
    parent = run_dir
    while not parent.is_dir():
        parent = parent.parent
    return parent


@contextlib.contextmanager
def work_folder(parent: Path, *, prefix: str = DOCTOR) -> Iterator[Path]:
    """A fresh folder below `parent`, removed at the end. A crash leaves it to the next sweep."""
    sweep(parent, prefix=prefix)
    folder = parent / f"{prefix}-{secrets.token_hex(4)}"
    folder.mkdir()
    try:
        (folder / "owner").write_text(_owner())
        yield folder
    finally:
        remove(folder)


def sweep(parent: Path, *, prefix: str) -> list[Path]:
    """Remove what crashes left behind; what was removed."""
    found = [folder for folder in sorted(parent.glob(f"{prefix}-*")) if is_abandoned(folder)]
    for folder in found:
        remove(folder)
    return found


def is_abandoned(folder: Path) -> bool:
    """Whether nobody works in it: its process is gone, or it is a day old."""
    try:
        owner = (folder / "owner").read_text().split("\n")
        age_s = time.time() - folder.stat().st_mtime
    except OSError:
        owner, age_s = [], 0.0
        with contextlib.suppress(OSError):
            age_s = time.time() - folder.stat().st_mtime
    if len(owner) >= 3 and owner[0] == this_place():
        return process_start(int(owner[1])) != owner[2]
    return age_s > _OLD_S


def remove(folder: Path) -> None:
    """Take the folder away; what cannot be is left to the next sweep."""
    for _ in range(_REMOVE_TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)


def _owner() -> str:
    pid = os.getpid()
    return f"{this_place()}\n{pid}\n{process_start(pid)}\n"
