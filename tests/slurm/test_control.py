"""Commands and other people's hands on a real Slurm, with toy stages."""

from __future__ import annotations

from pathlib import Path

import pytest
from slurm.cluster import Cluster, wait_for
from slurm.runs import open_run, write
from toy.commands import ToyRun
from toy.program import fail_stage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture
def slurm_run(cluster: Cluster, tmp_path: Path) -> ToyRun:
    run = open_run(tmp_path)
    write(run)
    return run


def claims(run: ToyRun, stage: str) -> list[str]:
    return sorted(p.name for p in (run.root / "iterations").glob(f"{stage}.t0/claim.*"))


def test_scancel_of_a_running_job_pauses_the_run(cluster: Cluster, slurm_run: ToyRun) -> None:
    assert slurm_run.command("submit", str(slurm_run.config)).returncode == 0
    stage = "000000/rollout"
    wait_for(lambda: claims(slurm_run, stage), what="a claimed rollout", timeout_s=60)
    running = cluster.call("squeue", "-h", "-t", "R", "-o", "%i").split()
    cluster.call("scancel", *running)
    pause = slurm_run.root / "control" / "PAUSE"
    wait_for(pause.exists, what="a pause", timeout_s=60)
    assert "cancelled by hand" in pause.read_text()
    wait_for(lambda: not cluster.call("squeue", "-h", "-t", "R,CG", "-o", "%i").split(), what="end")
    assert claims(slurm_run, stage) == ["claim.0001"], "a paused run claims nothing"
    done = slurm_run.command("resume", str(slurm_run.root), "--wait")
    assert done.returncode == 0, done.stderr
    wait_for(lambda: not cluster.job_names(), what="an empty queue")


def test_cancel_empties_the_queue_and_resume_goes_on(cluster: Cluster, slurm_run: ToyRun) -> None:
    assert slurm_run.command("submit", str(slurm_run.config)).returncode == 0
    wait_for(lambda: claims(slurm_run, "000000/rollout"), what="a claimed rollout", timeout_s=60)
    told = slurm_run.command("cancel", str(slurm_run.root))
    assert told.returncode == 0 and "cancelled" in told.stdout
    wait_for(lambda: not cluster.job_names(), what="an empty queue", timeout_s=60)
    assert slurm_run.command("submit", str(slurm_run.config)).returncode == 3
    done = slurm_run.command("resume", str(slurm_run.root), "--wait")
    assert done.returncode == 0, done.stderr
    assert len(slurm_run.digests()) == 5


def test_one_job_an_iteration(cluster: Cluster, slurm_run: ToyRun) -> None:
    write(slurm_run, chain__pack="iteration")
    done = slurm_run.command("submit", str(slurm_run.config), "--wait")
    assert done.returncode == 0, done.stderr
    logs = sorted((slurm_run.root / "iterations").glob("*/logs/*"))
    assert {log.name.split(".")[0] for log in logs} == {"iteration"}
    assert len(slurm_run.digests()) == 5


def test_shards_are_an_array(cluster: Cluster, slurm_run: ToyRun) -> None:
    write(slurm_run, rollout__shards=2)
    assert slurm_run.command("submit", str(slurm_run.config)).returncode == 0
    ids = cluster.call("squeue", "-h", "-r", "-o", "%i %j").splitlines()
    rollouts = [line.split()[0] for line in ids if ".i0000.rollout." in line]
    assert [job.partition("_")[2] for job in sorted(rollouts)] == ["0", "1"]
    done = slurm_run.command("watch", str(slurm_run.root))
    assert done.returncode == 0, done.stderr
    assert len(slurm_run.digests()) == 5 + 4, "each rollout has a commit and one for each shard"


def test_one_failing_rank_halts_though_srun_reports_sigterm(
    cluster: Cluster, slurm_run: ToyRun
) -> None:
    write(slurm_run, train__num_ranks=2)
    assert slurm_run.command("submit", str(slurm_run.config)).returncode == 0
    fail_stage(slurm_run.root, "train", 0, how="user")
    halted = slurm_run.command("watch", str(slurm_run.root))
    assert halted.returncode == 4 and "told to fail (user)" in halted.stderr, halted.stderr
    assert claims(slurm_run, "000000/train") == ["claim.0001"]
    wait_for(lambda: not cluster.job_names(), what="an empty queue", timeout_s=60)


def test_a_partition_that_is_not_there_is_named_before_anything_is_made(
    cluster: Cluster, slurm_run: ToyRun
) -> None:
    write(slurm_run, rollout__pools={"a": {"shards": 1}, "b": {"shards": 1}})
    told = slurm_run.command(
        "submit", str(slurm_run.config), "--set", "rollout.pools.b.slurm.partition=lo"
    )
    assert told.returncode == 2, told.stderr
    assert 'rollout.pools.b.slurm.partition = "lo" is no partition of this cluster' in told.stderr
    assert "did you mean low?" in told.stderr
    assert not slurm_run.root.exists() and not cluster.job_names()


def test_a_refused_option_is_one_line_and_the_mended_configuration_is_taken(
    cluster: Cluster, slurm_run: ToyRun
) -> None:
    """Nothing of the run has begun: it is made anew."""
    write(slurm_run)
    wrong = slurm_run.command("submit", str(slurm_run.config), "--set", "slurm.constraint=nowhere")
    assert wrong.returncode == 6 and "feature" in wrong.stderr, wrong.stderr
    assert len(wrong.stderr.strip().splitlines()) == 1, wrong.stderr
    assert not cluster.job_names()
    mended = slurm_run.command("submit", str(slurm_run.config), "--set", "num_rollout=1")
    assert mended.returncode == 0, mended.stderr
    done = slurm_run.command("watch", str(slurm_run.root))
    assert done.returncode == 0, done.stderr
    assert len(slurm_run.digests()) == 3
