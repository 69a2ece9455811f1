"""What a shard knows of the others' groups without reading their prompts."""

from __future__ import annotations

import asyncio

import pytest
from toy.rollouts import Numbers, Shard, Text, by_length

from slurm_rl.rollout.groups import Finisher
from slurm_rl.rollout.journal import Journal
from slurm_rl.rollout.single_turn import SingleTurn
from slurm_rl.types import JOURNAL_NAME


@pytest.fixture
def folder(tmp_path_factory):
    return lambda: tmp_path_factory.mktemp("run")


@pytest.fixture
def plain(make_settings):
    return make_settings(n_samples_per_prompt=3)


def test_another_shards_group_of_other_data_is_not_counted(folder, plain):
    """Of the others' groups the prompt is not read; what all keys share tells them apart."""
    root = folder()
    elsewhere = Shard(root, plain, 1, 2, start={"data_fingerprint": "xxh3:other"})
    for shard in (elsewhere, Shard(root, plain, 0, 2)):
        shard.engine.start(shard.weights)
    found = asyncio.run(_journal_own(elsewhere))
    assert found == 6
    mine = Shard(root, plain, 0, 2, attempt=2)
    asyncio.run(mine.run())
    assert sorted(mine.engine.made) == list(range(12))  # its own, and all of the other's
    same = Shard(root, plain, 1, 2, attempt=2)
    asyncio.run(same.run())
    assert same.engine.made == []


def test_what_another_shard_makes_is_not_read(folder, plain):
    root = folder()
    first = Shard(root, plain, 1, 2)
    first.engine.start(first.weights)
    asyncio.run(_journal_own(first))
    opened = []

    class Watched(Numbers):
        def visit(self, group_index):
            opened.append(group_index)
            return super().visit(group_index)

    other = Shard(root, plain, 0, 2, stream=Watched())
    asyncio.run(other.run())
    assert opened == [0, 2, 4, 6, 8, 10]
    assert other.supply.entries.keys() == {0, 2, 4, 6, 8, 10}
    assert len(other.close.decision.admitted) == 12


async def _journal_own(shard):
    """Make and journal a shard's own groups, without looking at others or closing."""
    generate = SingleTurn(shard.engine, Finisher(shard.weights, Text()))
    with Journal(shard.folder / JOURNAL_NAME) as journal:
        num = 0
        while (group := shard.supply.take()) is not None and shard.supply.is_own(group.group_index):
            graded = await by_length(await generate(group))
            shard.supply.absorb(journal.append(group.key, graded.samples))
            num += 1
    return num
