"""SlurmScheduler against a real Slurm: every call, and every kind of answer."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from slurm.cluster import Cluster, wait_for

from slurm_rl.chain.scheduler import JobState, LinkRequest, QueuedJob
from slurm_rl.config.schema import Settings
from slurm_rl.errors import SchedulerUnavailable, SubmitRefused
from slurm_rl.launch.slurm import SlurmScheduler, expand_nodes
from slurm_rl.types import StageRef

STAGE = (StageRef(1, "rollout"),)
#: A comment with all that the two readers of a job's text could trip over.
COMMENT = "preemption=yes;requeue=true \\ \"q\" 'single' # $HOME `x` end"

MakeScheduler = Callable[..., SlurmScheduler]


@pytest.fixture
def make(cluster: Cluster, tmp_path: Path) -> MakeScheduler:
    """A scheduler of jobs that run `script` in the place of the supervisor."""

    def build(script: str = "sleep 300", **slurm: Any) -> SlurmScheduler:
        program = tmp_path / f"program{len(list(tmp_path.iterdir()))}"
        program.write_text(f"#!/bin/bash\n{script}\n")
        program.chmod(0o755)
        config = {
            "run": {"name": "demo", "dir": str(tmp_path)},
            "num_rollout": 1,
            "rollout": {"prompt_data": "/p", "rollout_batch_size": 1},
            "train": {"global_batch_size": 1},
            "host_python": str(program),
            "slurm": {"nodes": 1, "cpus_per_task": 1, "time": "5"} | slurm,
        }
        (tmp_path / "demo").mkdir(exist_ok=True)
        return SlurmScheduler(Settings.model_validate(config), "demo")

    return build


def request(label: str, tmp_path: Path, **changed: Any) -> LinkRequest:
    defaults: dict[str, Any] = {
        "name": f"demo.i0001.{label}",
        "command": ("link", "a b", "$HOME"),
        "stages": STAGE,
        "log": str(tmp_path / f"100% {label}"),
    }
    return LinkRequest(**defaults | changed)


def look(scheduler: SlurmScheduler, job_id: str) -> QueuedJob:
    return next(job for job in scheduler.query() if job.job_id == job_id)


def await_state(scheduler: SlurmScheduler, job_id: str, *states: JobState) -> QueuedJob:
    def seen() -> QueuedJob | None:
        jobs = [job for job in scheduler.query() if job.job_id == job_id and job.state in states]
        return jobs[0] if jobs else None

    found = wait_for(seen, what=f"{job_id} in {states}")
    assert found is not None
    return found


def test_a_job_from_submission_to_its_end(
    make: MakeScheduler, cluster: Cluster, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    script = f'pwd; printf "<%s>" "$@"; while [ ! -e {go} ]; do sleep 0.1; done; exit 7'
    scheduler = make(script, nodes=2, comment=COMMENT, partition="low")
    job_id = scheduler.submit(request("x.ab12", tmp_path))
    job = await_state(scheduler, job_id, JobState.RUNNING)
    assert (job.name, job.token, job.raw) == ("demo.i0001.x.ab12", "ab12", "RUNNING")
    assert expand_nodes(job.nodes) == ["node1", "node2"]
    assert 0 <= job.age_s < 60
    shown = cluster.call("scontrol", "show", "job", job_id)
    assert f"Comment={COMMENT} " in shown
    assert "Requeue=1" in shown
    go.touch()
    assert await_state(scheduler, job_id, JobState.ENDED).raw == "FAILED"
    log = tmp_path / f"100% x.ab12.{job_id}.log"
    assert log.read_text() == f"{tmp_path}/demo\n<-m><slurm_rl.launch.job><link><a b><$HOME>"


def test_only_jobs_of_the_run_are_shown(
    make: MakeScheduler, cluster: Cluster, tmp_path: Path
) -> None:
    scheduler = make()
    job_id = scheduler.submit(request("x.a", tmp_path))
    for name in ("demo2.i0001.x.b", "demo", "weird\nname demo|"):
        cluster.call("sbatch", "-o", "/dev/null", "-J", name, "--wrap", "sleep 60")
    assert [job.job_id for job in scheduler.query() if job.state.is_live] == [job_id]


def test_the_supervisor_is_the_batch_process(
    make: MakeScheduler, cluster: Cluster, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    scheduler = make(
        f"trap 'echo told > {told}; exit 0' USR1; echo ready > {tmp_path}/ready\n"
        "while :; do sleep 0.1; done"
    )
    job_id = scheduler.submit(request("x.a", tmp_path))
    wait_for((tmp_path / "ready").exists, what="a start")
    cluster.call("scancel", "--batch", "--signal=USR1", job_id)
    wait_for(told.exists, what="a signal")


def test_dependencies(make: MakeScheduler, tmp_path: Path) -> None:
    scheduler = make()
    first = scheduler.submit(request("x.a", tmp_path))
    other = scheduler.submit(request("x.b", tmp_path))
    waiting = scheduler.submit(request("y.c", tmp_path, after=(first,)))
    job = look(scheduler, waiting)
    assert (job.state, job.reason, job.after) == (JobState.PENDING, "Dependency", (first,))
    scheduler.repoint(waiting, (other,))
    assert look(scheduler, waiting).after == (other,)
    scheduler.repoint(waiting, ())
    await_state(scheduler, waiting, JobState.RUNNING)
    scheduler.repoint(waiting, (first,))  # too late, and no error


def test_the_end_of_a_failed_job_wakes_the_next(make: MakeScheduler, tmp_path: Path) -> None:
    first = make("exit 7").submit(request("x.a", tmp_path))
    scheduler = make()
    waiting = scheduler.submit(request("y.b", tmp_path, after=(first,)))
    await_state(scheduler, waiting, JobState.RUNNING)


def test_an_array_of_shards(make: MakeScheduler, tmp_path: Path) -> None:
    scheduler = make("echo task $SLURM_ARRAY_TASK_ID; sleep 300")
    job_id = scheduler.submit(request("x.a", tmp_path, shards=(0, 1, 5)))
    waiting = scheduler.submit(request("y.b", tmp_path, after=(job_id,)))
    jobs = {job.task: job for job in scheduler.query() if job.base_id == job_id}
    assert set(jobs) == {0, 1, 5}
    assert look(scheduler, waiting).after == (job_id,)
    await_state(scheduler, f"{job_id}_5", JobState.RUNNING)
    log = tmp_path / f"100% x.a.{job_id}_5.log"
    wait_for(lambda: log.exists() and log.read_text() == "task 5\n", what="a log")
    scheduler.cancel([job_id])
    for task in (0, 1, 5):
        await_state(scheduler, f"{job_id}_{task}", JobState.ENDED)
    await_state(scheduler, waiting, JobState.RUNNING)


def test_a_pending_array_is_spelled_out(make: MakeScheduler, tmp_path: Path) -> None:
    scheduler = make()
    first = scheduler.submit(request("x.a", tmp_path))
    job_id = scheduler.submit(request("y.b", tmp_path, shards=tuple(range(200)), after=(first,)))
    tasks = [job.task for job in scheduler.query() if job.base_id == job_id]
    assert sorted(tasks) == list(range(200))


def test_a_tick_waits_for_its_time(make: MakeScheduler, cluster: Cluster, tmp_path: Path) -> None:
    scheduler = make(gpus_per_node=0, nodes=3)
    tick = LinkRequest(
        name="demo.tick.a", command=("tick",), begin_s=600.0, log=str(tmp_path / "tick")
    )
    job_id = scheduler.submit(tick)
    job = look(scheduler, job_id)
    assert (job.state, job.reason, job.after) == (JobState.PENDING, "BeginTime", ())
    shown = cluster.show(job_id)
    assert (shown["NumNodes"], shown["NumCPUs"]) == ("1-1", "1")


def test_cancel(make: MakeScheduler, tmp_path: Path) -> None:
    scheduler = make()
    running = scheduler.submit(request("x.a", tmp_path))
    await_state(scheduler, running, JobState.RUNNING)
    pending = scheduler.submit(request("y.b", tmp_path, after=(running,)))
    scheduler.cancel([pending, running, "999999"])
    assert await_state(scheduler, pending, JobState.ENDED).raw == "CANCELLED"
    assert await_state(scheduler, running, JobState.ENDED).raw == "CANCELLED"
    scheduler.cancel([running])


def test_requeue_keeps_the_id_and_the_log(make: MakeScheduler, tmp_path: Path) -> None:
    scheduler = make("echo restart ${SLURM_RESTART_COUNT:-0}; sleep 300")
    job_id = scheduler.submit(request("x.a", tmp_path))
    log = tmp_path / f"100% x.a.{job_id}.log"
    wait_for(lambda: log.exists() and log.read_text(), what="a log")
    assert scheduler.requeue(job_id)
    await_state(scheduler, job_id, JobState.PENDING)
    # Between the two Slurm notes the requeue.
    wait_for(lambda: "restart 1\n" in log.read_text(), what="a second run")
    assert log.read_text().startswith("restart 0\n")


def test_requeue_may_be_forbidden(make: MakeScheduler, tmp_path: Path) -> None:
    scheduler = make(requeue=False)
    job_id = scheduler.submit(request("x.a", tmp_path))
    await_state(scheduler, job_id, JobState.RUNNING)
    assert not scheduler.requeue(job_id)
    assert not scheduler.requeue("999999")


def test_held_jobs(make: MakeScheduler, cluster: Cluster, tmp_path: Path) -> None:
    scheduler = make()
    first = scheduler.submit(request("x.a", tmp_path))
    by_admin = scheduler.submit(request("y.b", tmp_path, begin_s=900.0))
    by_user = scheduler.submit(request("y.c", tmp_path, begin_s=900.0))
    await_state(scheduler, first, JobState.RUNNING)
    cluster.call("scontrol", "hold", by_admin)
    cluster.call("scontrol", "uhold", by_user)
    cluster.call("scontrol", "requeuehold", first)
    assert look(scheduler, by_admin).state is JobState.HELD
    assert look(scheduler, by_user).state is JobState.PENDING
    held = await_state(scheduler, first, JobState.HELD)
    assert "held" in held.reason


@pytest.mark.parametrize(
    ("slurm", "said"),
    [
        ({"partition": "nope"}, "invalid partition specified: nope"),
        ({"reservation": "nope"}, "Requested reservation is invalid"),
        ({"gpus_per_node": 8}, "Requested node configuration is not available"),
        ({"site_option": "x"}, "unrecognized option '--site-option=x'"),
    ],
)
def test_what_slurm_refuses(
    make: MakeScheduler, tmp_path: Path, slurm: dict[str, Any], said: str
) -> None:
    with pytest.raises(SubmitRefused, match=said) as caught:
        make(**slurm).submit(request("x.a", tmp_path))
    assert "\n" not in str(caught.value)


def test_a_submission_from_within_a_job(make: MakeScheduler, tmp_path: Path) -> None:
    """What the outer job has must not reach the inner one."""
    os.environ |= {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "64", "SBATCH_PARTITION": "nope"}
    try:
        scheduler = make("env | grep -E '^SLURM_(NTASKS|MEM_PER_CPU)='; echo end; sleep 300")
        job_id = scheduler.submit(request("x.a", tmp_path))
    finally:
        for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SBATCH_PARTITION"):
            del os.environ[name]
    log = tmp_path / f"100% x.a.{job_id}.log"
    wait_for(lambda: log.exists() and "end" in log.read_text(), what="a log")
    assert "64" not in log.read_text()


def test_a_stopped_controller_says_nothing(
    make: MakeScheduler, cluster: Cluster, tmp_path: Path
) -> None:
    scheduler = make()
    job_id = scheduler.submit(request("x.a", tmp_path))
    cluster.tool("controller", "down")
    calls: list[Callable[[], object]] = [
        scheduler.query,
        lambda: scheduler.submit(request("x.b", tmp_path)),
        lambda: scheduler.cancel([job_id]),
        lambda: scheduler.requeue(job_id),
        lambda: scheduler.repoint(job_id, ()),
    ]
    with ThreadPoolExecutor(len(calls)) as pool:  # each takes Slurm nine seconds
        errors = [future.exception() for future in [pool.submit(call) for call in calls]]
    assert [type(error) for error in errors] == [SchedulerUnavailable] * len(calls)
    assert all(str(error).strip() and "\n" not in str(error) for error in errors)
    cluster.tool("controller", "up")
    assert look(scheduler, job_id).state.is_live
