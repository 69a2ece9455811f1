"""doctor, its stage check, the preflight and the shell on a real Slurm.

Here all nodes share one kernel and one file system: that files are seen late cannot be shown,
only that both ways are measured.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slurm.cluster import Cluster, wait_for
from toy.commands import PROGRAM, ToyRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"

Doctor = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def sets(cluster: Cluster, tmp_path: Path) -> list[str]:
    """The quickstart as a Slurm run below a folder that every node sees."""
    for folder in (tmp_path, tmp_path.parent):
        folder.chmod(0o755)
    values = {
        "launcher": "slurm",
        "run.dir": tmp_path / "runs",
        "host_python": sys.executable,
        "slurm.partition": "low",
        "slurm.time": '"00:08:00"',
        "network_interface": "lo",
    }
    return [f"--set={key}={value}" for key, value in values.items()]


@pytest.fixture
def doctor(sets: list[str]) -> Doctor:
    """Exit status, the facts, and stderr."""

    def examine(*argv: str) -> tuple[int, dict[str, Any], str]:
        command = [PROGRAM, "doctor", str(CONFIG), *sets, "--json", "--patience", "60", *argv]
        # Not what other tests wait for files: a busy machine takes longer.
        env = os.environ | {"SLURM_RL_VISIBLE_S": "45", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout), done.stderr

    return examine


def found(facts: dict[str, Any], name: str) -> list[tuple[str, str]]:
    return [(f["level"], f["found"]) for f in facts["findings"] if f["name"] == name]


def test_the_site_is_looked_at_by_jobs_and_nothing_is_left(
    cluster: Cluster, doctor: Doctor, tmp_path: Path
) -> None:
    status, facts, err = doctor()
    assert status == 0, (facts, err)
    (cpu,) = found(facts, "CPU-only jobs")
    assert cpu[0] == "ok" and "ran on node" in cpu[1]
    assert found(facts, "sbatch from a node")[0][0] == "ok"
    here, between = found(facts, "visibility")
    assert (here[0], between[0]) == ("ok", "ok") and "between node" in between[1]
    assert "2 s after they are told" in found(facts, "preemption in low")[0][1]
    assert list(tmp_path.iterdir()) == []
    assert not cluster.job_names()


def test_a_site_that_refuses_sbatch_on_its_nodes_is_found(doctor: Doctor, tmp_path: Path) -> None:
    fake = tmp_path / "fake" / "sbatch"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho 'sbatch: error: Access/permission denied' >&2\nexit 1\n")
    fake.chmod(0o755)
    setup = f'--set=setup=["export PATH={fake.parent}:$PATH"]'
    status, facts, err = doctor(setup)
    assert status == 6 and "sbatch from a node" in err
    bad = [f for f in facts["findings"] if f["level"] == "bad"]
    assert [f["name"] for f in bad] == ["sbatch from a node"]
    assert "submit_from: login" in bad[0]["fix"]


def test_a_partition_that_takes_no_small_job_is_found(doctor: Doctor) -> None:
    status, facts, _ = doctor("--set=tick.slurm.partition=nowhere")
    assert status == 6
    assert found(facts, "CPU-only jobs")[0][0] == "bad"
    (missing,) = [said for level, said in found(facts, "partition") if level == "bad"]
    assert "nowhere is not there (tick)" in missing


def test_a_doctor_that_was_killed_leaves_no_job_behind_for_long(
    cluster: Cluster, sets: list[str], doctor: Doctor, tmp_path: Path
) -> None:
    quiet = subprocess.DEVNULL
    command = [PROGRAM, "doctor", str(CONFIG), *sets]
    killed = subprocess.Popen(command, stdout=quiet, stderr=quiet)
    wait_for(lambda: cluster.call("squeue", "-h", "-t", "R", "-o", "%i").split(), what="its job")
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert [path.name[:8] for path in tmp_path.iterdir()] == [".doctor-"]
    status, facts, _ = doctor()
    assert status == 0, facts
    assert list(tmp_path.iterdir()) == []
    wait_for(lambda: not cluster.job_names(), what="an empty queue")


def test_a_stage_is_tried_with_its_own_job_on_two_nodes(
    cluster: Cluster, doctor: Doctor, tmp_path: Path
) -> None:
    status, facts, err = doctor(
        "--stage", "train", "--set=train.num_ranks=2", "--set=train.slurm.nodes=2"
    )
    assert status == 0, (facts, err)
    assert "gloo over 2 rank(s): right" in found(facts, "all-reduce")[0][1]
    assert "2 on 2 node(s)" in found(facts, "ranks")[0][1]
    assert list(tmp_path.iterdir()) == [] and not cluster.job_names()


def test_nodes_that_call_themselves_localhost_are_found(doctor: Doctor) -> None:
    status, facts, _ = doctor(
        "--stage", "train", "--set=train.num_ranks=2", "--set=train.slurm.nodes=2",
        "--set=network_interface=null",
    )  # fmt: skip
    assert status == 2
    bad = {f["name"]: f["found"] for f in facts["findings"] if f["level"] == "bad"}
    assert "resolves to 127.0.0.1" in bad["address"]


def test_a_wall_time_beyond_the_partitions_is_refused_before_anything_is_made(
    cluster: Cluster, sets: list[str], tmp_path: Path
) -> None:
    command = [PROGRAM, "submit", str(CONFIG), *sets, '--set=train.slurm.time="1-00:00:01"']
    told = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert told.returncode == 2
    assert "partition low" in told.stderr and "MaxTime 1-00:00:00" in told.stderr
    assert len(told.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == [] and not cluster.job_names()


def test_a_shell_has_the_stages_allocation_and_commits_nothing(
    cluster: Cluster, tmp_path: Path
) -> None:
    for folder in (tmp_path, tmp_path.parent):
        folder.chmod(0o755)
    run = ToyRun(tmp_path)
    run.write(
        launcher="slurm",
        num_rollout=1,
        host_python=sys.executable,
        setup=["export FROM_SETUP=yes"],
        slurm={"partition": "low", "time": "00:05:00", "cpus_per_task": 2},
    )
    assert run.command("submit", str(run.config), "--wait").returncode == 0
    wait_for(
        lambda: not [n for n in cluster.job_names() if ".tick." not in n], what="an idle queue"
    )
    before = run.digests()
    command = (
        "hostname; echo $SLURM_CPUS_PER_TASK $SLURM_JOB_PARTITION $SLURM_JOB_NAME $FROM_SETUP;"
        " $SLURM_RL_PYTHON -m slurm_rl.stages $SLURM_RL_ORDER && ls;"
        " touch $SLURM_RL_INPUT_ROLLOUT/x; exit 5"
    )
    argv = ("shell", str(run.root), "-i", "0", "--stage", "train", "--time", "00:02:00")
    done = run.command(*argv, "--command", command)
    assert done.returncode == 5, done.stderr
    host, job, *files = done.stdout.splitlines()
    assert host.startswith("node")
    cpus, partition, name, setup = job.split()
    assert (cpus, partition, setup) == ("2", "low", "yes") and ".shell-train.shell" in name
    assert "result.json" in files
    assert "Read-only file system" in done.stderr
    assert run.digests() == before and not list(run.root.rglob(".shell-*"))
    wait_for(lambda: ".shell-" not in "".join(cluster.job_names()), what="the end of its job")
