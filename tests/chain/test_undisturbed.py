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
