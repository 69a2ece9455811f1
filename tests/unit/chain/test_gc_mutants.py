"""Each rule of garbage collection, broken in a copy of the package, must fail a test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import slurm_rl

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
PASSES = "tests/unit/chain/test_gc.py"
DECISION = "tests/unit/storage/test_retention.py"
LEASES = "tests/unit/storage/test_leases.py"
RECORDS = "tests/unit/storage/test_retention_records.py"

#: name -> (tests, file, text, what it becomes)
MUTANTS = {
    "an attempt that may still commit is deleted": (
        PASSES,
        "storage/retention.py",
        "    if item.is_current and not item.is_committed:\n",
        "    if False:\n",
    ),
    "what an open stage reads may go": (
        DECISION,
        "storage/retention.py",
        "if slot.stage in scene.needed or slot.shard is not None:",
        "if slot.shard is not None:",
    ),
    "the initial weights may go": (
        DECISION,
        "storage/retention.py",
        'CHECKPOINT_KINDS = frozenset({"train", "critic", "reference"})',
        'CHECKPOINT_KINDS = frozenset({"train", "critic", "reference", "init"})',
    ),
    "below two checkpoints": (
        PASSES,
        "storage/retention.py",
        "scene.head - keep_last(rules):",
        "scene.head - 1:",
    ),
    "no grace": (PASSES, "storage/retention.py", "    if left_s > 0:\n", "    if False:\n"),
    "damage to the newest is overlooked": (
        PASSES,
        "storage/retention.py",
        "    if scene.damage:\n",
        "    if False:\n",
    ),
    "leases are not read again": (
        PASSES,
        "chain/gc.py",
        "        held_by=_find_holder(leases, item.slot, now),\n",
        "",
    ),
    "control is not read again": (
        PASSES,
        "chain/gc.py",
        "    if read_control(run) != control:\n",
        "    if False:\n",
    ),
    "files go before PRUNED is there": (
        PASSES,
        "storage/prune.py",
        "        publish_pruned(run, slot, note)\n",
        "",
    ),
    "links are followed": (
        PASSES,
        "storage/prune.py",
        "        if path.is_dir() and not path.is_symlink():\n",
        "        if path.is_dir():\n",
    ),
    "copies are not verified": (
        PASSES,
        "storage/archive.py",
        "    if found == entry.digest and",
        "    if True or",
    ),
    "copies are verified once only": (
        PASSES,
        "storage/archive.py",
        "    for target, entry in copies:\n        _verify(target, entry, fs=run.fs)\n",
        "",
    ),
    "the archive's own directory is made": (
        PASSES,
        "storage/archive.py",
        "    check_archive(archive.parent)\n",
        "    run.fs.mkdir(archive)\n",
    ),
    "the grace begins before the mark": (
        LEASES,
        "storage/tombstones.py",
        "    publish(path, canonical_json({",
        "    begun = clock()\n    clock = lambda: begun\n    publish(path, canonical_json({",
    ),
    "a mark does not turn readers away": (
        LEASES,
        "storage/tombstones.py",
        "    if is_condemned(run, slot):\n        error",
        "    if False:\n        error",
    ),
    "a lease that ran out is renewed": (
        LEASES,
        "storage/leases.py",
        "    if not lease.is_live(now):\n",
        "    if False:\n",
    ),
    "originals go that the tar does not hold": (
        RECORDS,
        "storage/records.py",
        "path.read_bytes() == member.read()",
        "True",
    ),
    "committed files are folded away": (
        RECORDS,
        "storage/records.py",
        "if p not in kept)",
        "if True)",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_rule_fails_a_test(tmp_path: Path, name: str) -> None:
    tests, file, old, new = MUTANTS[name]
    source = Path(slurm_rl.__file__).parent
    shutil.copytree(source, tmp_path / "slurm_rl", ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "slurm_rl" / file
    text = path.read_text()
    assert text.count(old) == 1, f"{file} changed: write this mutant anew"
    path.write_text(text.replace(old, new))
    found = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-x",
                "-m",
                "not slow",
                "-p",
                "no:cacheprovider",
            ),
            *("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), str(ROOT / tests)),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert found.returncode == 1, found.stdout[-2000:] + found.stderr[-2000:]
    assert "1 failed" in found.stdout and "ImportError" not in found.stdout
