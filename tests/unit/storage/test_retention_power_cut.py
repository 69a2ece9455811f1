"""A power cut at any moment of a deletion: what is missing is always known to be pruned."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from toy.power_cut import Op, RecordingFs, replay, survivors, write_tree
from toy.world import FastFs

from slurm_rl.storage.claims import attempt_dir, try_claim
from slurm_rl.storage.commits import publish_commit, read_commit
from slurm_rl.storage.durable import make_directory, seal_files
from slurm_rl.storage.prune import delete_bulk, find_unwhole
from slurm_rl.storage.rundir import RunDir
from slurm_rl.storage.tombstones import is_pruned, publish_tombstone, read_tombstone
from slurm_rl.types import Claim, Slot

SLOT = Slot(0, "train", 0)
CLAIM = Claim(1, "job", "attempt")
NAMES = ("checkpoint/state", "weights/model", "weights/config")


@pytest.fixture
def folder() -> Iterator[Path]:
    memory = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else None))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def record_deletion(disk: Path) -> tuple[list[Op], int]:
    """A commit is made and deleted; the record, and how much of it was the making."""
    disk.mkdir()
    fs = RecordingFs(FastFs())
    run = RunDir(disk / "toy", fs)
    make_directory(run.root, below=disk, fs=fs)
    assert try_claim(run, SLOT, CLAIM)
    attempt = attempt_dir(run, SLOT, CLAIM)
    for name in NAMES:
        fs.mkdir((attempt / name).parent)
        fs.create(attempt / name, name.encode())
    files = seal_files(attempt, NAMES, fs=fs)
    entries = [{"path": f.path, "size_bytes": f.size_bytes, "digest": f.digest} for f in files]
    provenance = {"attempt": CLAIM.attempt_name}
    assert publish_commit(run, SLOT, content={"files": entries}, provenance=provenance)
    made = len(fs.ops)
    publish_tombstone(run, SLOT, clock=lambda: 0.0)
    commit = read_commit(run, SLOT)
    assert commit is not None
    assert delete_bulk(run, SLOT, commit, archive=None)
    return fs.ops, made


def check(folder: Path, ops: list[Op], made: int) -> None:
    seen = set()
    for length in range(made, len(ops) + 1):
        for tree in survivors(replay(ops[:length], folder / "disk")):
            key = tuple(sorted(tree.items()))
            if key in seen:
                continue
            seen.add(key)
            after = folder / "after"
            shutil.rmtree(after, ignore_errors=True)
            write_tree(tree, after)
            run = RunDir(after / "toy", FastFs())
            commit = read_commit(run, SLOT)
            assert commit is not None, "a COMMIT is gone"
            if find_unwhole(run, SLOT, commit):
                assert is_pruned(run, SLOT), "files are gone, and nothing says why"
                if read_tombstone(run, SLOT) is None:
                    left = [n for n in NAMES if (attempt_dir(run, SLOT, CLAIM) / n).exists()]
                    assert not left, "the deletion is not known to be unfinished"
    assert len(seen) > 20


def test_what_is_missing_is_known_to_be_pruned(folder: Path) -> None:
    check(folder, *record_deletion(folder / "disk"))


@pytest.mark.parametrize(
    ("kind", "part"),
    [("fsync", "PRUNED"), ("fsync_dir", "/train.t0"), ("fsync_dir", CLAIM.attempt_name)],
)
def test_a_sync_left_out_is_noticed(folder: Path, kind: str, part: str) -> None:
    ops, made = record_deletion(folder / "disk")

    def is_left_out(op: Op) -> bool:
        path = str(op.path)
        found = path.endswith(part) if kind == "fsync_dir" else part in path
        return op.kind == kind and found

    kept = [op for op in ops[made:] if not is_left_out(op)]
    assert made + len(kept) < len(ops), "nothing was left out"
    with pytest.raises(Exception, match=r"nothing says why|not readable|not known to be"):
        check(folder, [*ops[:made], *kept], made)
