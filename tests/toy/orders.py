"""Orders for stage programs that are called as functions: inputs as a commit would have them."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from slurm_rl.storage.digest import digest_entries
from slurm_rl.storage.durable import list_files, seal_files
from slurm_rl.types import Input


def weights_input(model: Path, root: Path, *, version: int = 0) -> Input:
    shutil.copytree(model, root / "weights", dirs_exist_ok=True)
    names = [f"weights/{name}" for name in list_files(root / "weights")]
    entries = seal_files(root, names)
    return Input(
        role="weights",
        iteration=max(0, version - 1),
        kind="train" if version else "init",
        digest="xxh3:c",
        path=str(root),
        files={name: str(root / name) for name in names},
        content={
            "files": [dataclasses.asdict(entry) for entry in entries],
            "weights": {"version": version, "digest": digest_entries(entries)},
        },
    )
