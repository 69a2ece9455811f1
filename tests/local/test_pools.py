"""Pools of shards by the local launcher: the same samples, and each pool by its name."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy.commands import ToyRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SIZES = {"rollout__rollout_batch_size": 3, "train__global_batch_size": 6, "num_rollout": 1}


def finish(folder: Path, **changes: object) -> ToyRun:
    run = ToyRun(folder)
    folder.mkdir()
    run.write(**SIZES, **changes)
    done = run.command("submit", str(run.config), "--wait")
    assert done.returncode == 0, done.stderr
    return run


def test_pools_end_as_one_array_does_and_are_shown_by_name(tmp_path: Path) -> None:
    plain = finish(tmp_path / "plain", rollout__shards=3)
    pools = {"fixed": {"shards": 1}, "spot": {"shards": 2}}
    run = finish(tmp_path / "pools", rollout__pools=pools)
    assert run.digests() == plain.digests()
    for name, shards in (("rollout-fixed", [0]), ("rollout-spot", [1, 2]), ("rollout", [0, 1, 2])):
        told = run.command("logs", str(run.root), "-i", "0", "--stage", name, "--list")
        assert told.returncode == 0, told.stderr
        shown = [n for n in range(3) if f"/shard-{n:04d}/" in told.stdout]
        assert shown == shards, told.stdout
    wrong = run.command("logs", str(run.root), "-i", "0", "--stage", "rollout-spt")
    assert wrong.returncode != 0 and "did you mean rollout-spot?" in wrong.stderr
