"""Whole runs on a cluster where nothing goes wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy.world import World, make_settings


@pytest.mark.parametrize("pack", ["stage", "iteration"])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_run_completes_with_one_submission_for_each_link(
    tmp_path: Path, pack: str, shards: int
) -> None:
    world = World(tmp_path, make_settings(tmp_path, pack=pack, shards=shards, num_rollout=3))
    world.shell()
    assert world.finish()
    world.check()
    assert set(world.num_submissions().values()) == {1}
    links = [job for job in world.cluster.history if not job.is_tick]
    assert [job.exit_code for job in links] == [0] * len(links)


def test_pools_are_arrays_of_their_own_and_change_nothing(tmp_path: Path) -> None:
    """Which array a shard is in says where it runs, not what comes out."""
    worlds = []
    for name, change in {
        "one": {"shards": 3},
        "pools": {"pools": {"spot": {"shards": 2}, "fixed": {"shards": 1}}},
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        world = World(folder, make_settings(folder, rollout_batch_size=3, **change))
        world.shell()
        assert world.finish()
        world.check()
        worlds.append(world)
    one, pools = worlds
    assert pools.digests() == one.digests()
    names = {job.request.name.split(".")[-2]: set() for job in pools.cluster.history}
    for job in pools.cluster.history:
        names[job.request.name.split(".")[-2]].add(job.task)
    assert (names["rollout-fixed"], names["rollout-spot"]) == ({0}, {1, 2}), "by name"
