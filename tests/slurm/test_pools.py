"""Pools of shards on a real Slurm: two arrays in two partitions, and one that cannot start."""

from __future__ import annotations

from pathlib import Path

import pytest
from slurm.cluster import Cluster, wait_for
from slurm.runs import open_run, write
from toy.commands import ToyRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

#: `spot` is in the partition that is down; it goes to the other one after five seconds.
POOLS = {
    "fixed": {"shards": 1},
    "spot": {
        "shards": 2,
        "slurm": {"partition": "low", "fallback": {"after": "00:00:05", "partition": "high"}},
    },
}


@pytest.fixture
def half_down(cluster: Cluster) -> Cluster:
    cluster.call("scontrol", "update", "PartitionName=low", "State=DOWN")
    return cluster


@pytest.fixture
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The same run by the local launcher, in one array."""
    local = ToyRun(tmp_path_factory.mktemp("local"))
    local.write(
        num_rollout=2, rollout__shards=3, rollout__rollout_batch_size=3, train__global_batch_size=6
    )
    assert local.command("submit", str(local.config), "--wait").returncode == 0
    return local.digests()


def jobs(cluster: Cluster, name: str) -> list[list[str]]:
    """Partition and task of every job that was ever queued, by a part of its name."""
    told = cluster.call("squeue", "-h", "-r", "-t", "all", "-o", "%j %P %K %T").splitlines()
    return [line.split()[1:] for line in told if f".{name}." in line]


def test_a_pool_that_cannot_start_goes_elsewhere_and_the_other_does_not_wait(
    half_down: Cluster, tmp_path: Path, expected: dict[str, str]
) -> None:
    run = open_run(tmp_path)
    write(
        run,
        slurm={"partition": "high", "time": "00:05:00", "cpus_per_task": 1},
        env={"TOY_SECOND": "0.2"},
        rollout__pools=POOLS,
        rollout__rollout_batch_size=3,
        train__global_batch_size=6,
        chain={
            "heartbeat_s": 1,
            "lease_s": 5,
            "retry_delay_s": 1,
            "tick_s": 5,
            "submit_deadline_s": 15,
        },
    )
    try:
        told = run.command("submit", str(run.config))
        assert told.returncode == 0, told.stderr
        name = "000000/rollout.t0/shard-0000"
        wait_for(lambda: run.digests().get(name), what="the shard that can run", timeout_s=60)
        assert "000000/rollout.t0" not in run.digests(), "nothing held the other pool"
        told = run.command("watch", str(run.root))
        assert told.returncode == 0, told.stderr
    finally:
        half_down.call("scontrol", "update", "PartitionName=low", "State=UP")
    assert run.digests() == expected
    fixed, spot = jobs(half_down, "rollout-fixed"), jobs(half_down, "rollout-spot")
    assert {part for part, _, _ in fixed} == {"high"} and {task for _, task, _ in fixed} == {"0"}
    done = {(part, task) for part, task, state in spot if state == "COMPLETED"}
    assert done == {("high", "1"), ("high", "2")}, spot
    wait_for(lambda: not half_down.job_names(), what="an empty queue", timeout_s=60)
