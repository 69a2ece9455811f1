"""Shards of a rollout: one that fails or waits is dealt with while the others work; pools."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy.faults import job_of
from toy.program import fail_stage
from toy.world import World, make_settings, with_spec

from slurm_rl.launch.memory import MemoryJob
from slurm_rl.launch.memory_process import Effect, Process
from slurm_rl.storage.intents import POOL_FOLDER

POOLS = {"fixed": {"shards": 1}, "spot": {"shards": 2}}


def make_world(folder: Path, **changes: object) -> World:
    return World(folder, make_settings(folder, **{"rollout_batch_size": 12, **changes}))


def undisturbed(folder: Path, **changes: object) -> dict[str, str]:
    (folder / "plain").mkdir()
    world = make_world(folder / "plain", **changes)
    world.shell()
    assert world.finish()
    return world.digests()


def rollouts(world: World, iteration: int = 0) -> list[MemoryJob]:
    name = f".i{iteration:04d}.rollout"
    return [job for job in world.cluster.history if name in job.request.name]


def test_a_shard_that_failed_is_tried_again_before_the_others_end(folder: Path) -> None:
    expected = undisturbed(folder, shards=3)
    world = make_world(folder, shards=3, retry_delay_s=1.0)
    world.cluster.nodes = {"node1": 8}
    fail_stage(world.run.root, "rollout", 0, how="system")
    beside: set[int | None] = set()

    def look(process: Process, effect: Effect) -> None:
        job = job_of(world.cluster, process)
        if job is not None and ".i0000.rollout." in process.name and len(job.request.shards) == 1:
            others = (j for j in rollouts(world) if j.process and j.base_id != job.base_id)
            beside.update(other.task for other in others)

    world.cluster.before = look
    world.shell()
    assert world.finish()
    world.check(may_fail=True)
    assert world.digests() == expected
    (retried,) = {job.request.shards for job in rollouts(world) if len(job.request.shards) == 1}
    assert beside == {0, 1, 2} - set(retried), "it waited for the others"


@pytest.mark.parametrize("pools", [{}, POOLS])
def test_shards_that_wait_too_long_go_elsewhere_and_the_rest_stay(
    folder: Path, pools: dict[str, object]
) -> None:
    expected = undisturbed(folder, shards=3)
    world = make_world(folder, tick_s=20.0, **({"pools": pools} if pools else {"shards": 3}))
    kind = "rollout-spot" if pools else "rollout"
    with_spec(world, fallbacks=((kind, 30.0),))
    world.cluster.nodes = {"node1": 1}
    world.cluster.fallback_nodes = {"other1": 4}
    world.shell()
    assert world.finish()
    assert world.digests() == expected
    elsewhere = [job for job in rollouts(world) if job.request.fallback]
    assert elsewhere and {job.node for job in elsewhere} == {"other1"}
    stayed = [job for job in rollouts(world) if not job.request.fallback and job.node]
    assert {job.node for job in stayed} == {"node1"}, "some of them ran where they were"
    moved = [job.task for job in elsewhere]
    assert len(moved) == len(set(moved)), "each goes once"
    if pools:
        assert set(moved) <= {1, 2}, "the other pool has no fallback"


def test_a_large_array_of_which_each_shard_moves_once_is_no_reason_to_halt(folder: Path) -> None:
    """Each fails once, waits in vain for its place, and goes to the fallback: twenty cancelled
    jobs that never looked for work, and none of them lost."""
    num = 20
    world = make_world(
        folder, rollout_batch_size=2 * num, shards=num, tick_s=20.0, retry_delay_s=1.0
    )
    with_spec(world, fallbacks=(("rollout", 60.0),))
    world.cluster.nodes = {"node1": num + 4}
    world.cluster.fallback_nodes = {"other1": num}
    fail_stage(world.run.root, "rollout", 0, how="system", times=num)

    def take_the_nodes() -> None:
        if sum(job.process is not None for job in rollouts(world)) == num:
            world.cluster.nodes["node1"] = 0
            world.cluster.at(900.0, lambda: world.cluster.nodes.update(node1=num + 4))
        else:
            world.cluster.at(0.2, take_the_nodes)

    world.cluster.at(1.2, take_the_nodes)
    world.shell()
    assert world.finish()
    world.check(may_fail=True)  # and no halt
    elsewhere = [job for job in rollouts(world) if job.request.fallback]
    assert len({job.task for job in elsewhere}) > num / 2, "too few moved to show anything"


def test_a_pool_that_cannot_start_holds_nothing_once_all_groups_are_made(folder: Path) -> None:
    """Whoever is done commits for the others then: it takes what is in the journals."""
    expected = undisturbed(folder, shards=3)
    world = make_world(folder, pools=POOLS, decides=True)
    world.cluster.nodes = {"node1": 1}  # the two pools never run at once
    world.shell()
    assert world.finish()
    world.check()
    assert world.digests() == expected
    claims = [
        path.read_text()
        for path in world.run.root.glob("iterations/000000/rollout.t0/shard-*/claim.*")
    ]
    (first,) = {
        job.request.name.rpartition(".")[2]
        for job in rollouts(world)
        if job.request.pool == "fixed"
    }
    assert len(claims) == 3 and all(first in claim for claim in claims)


def test_intents_of_pools_lie_apart_and_are_folded(folder: Path) -> None:
    world = make_world(folder, pools=POOLS)
    world.shell()
    assert world.finish()
    stage = world.run.root / "iterations/000000/rollout.t0"
    found = sorted(str(p.relative_to(stage)) for p in stage.glob("**/submit.0001"))
    assert found == [f"{POOL_FOLDER}fixed/submit.0001", f"{POOL_FOLDER}spot/submit.0001"]


def test_the_job_of_one_pool_takes_no_shard_of_another_that_it_does_not_fit(folder: Path) -> None:
    world = make_world(folder, pools=POOLS)
    world.fits = lambda have, need: have == need
    world.shell()
    assert world.finish()
    claims = {
        path.parent.name: path.read_text()
        for path in world.run.root.glob("iterations/000000/rollout.t0/shard-*/claim.0001")
    }
    for job in rollouts(world):
        for shard, claim in claims.items():
            if job.request.name.rpartition(".")[2] in claim:
                own = (0,) if job.request.pool == "fixed" else (1, 2)
                assert int(shard.removeprefix("shard-")) in own
    assert len(claims) == 3
