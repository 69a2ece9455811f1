"""What a run may cost, how long and where its jobs wait, and when it has had enough: a rule a test."""

from __future__ import annotations

from pathlib import Path

from toy.faults import job_of, kill
from toy.program import fail_stage
from toy.world import World, make_settings, with_spec

from slurm_rl.chain.advance import Ask
from slurm_rl.launch import memory_faults
from slurm_rl.launch.memory_process import Effect, Process
from slurm_rl.storage.control import Halt, clear_stops, read_control, write_budget


def make_world(folder: Path, **changes: object) -> World:
    return World(folder, make_settings(folder, **changes))


def halt_of(world: World) -> Halt:
    found = read_control(world.run).halt
    assert found is not None
    return found


def test_a_run_that_has_used_its_gpu_hours_halts_and_goes_on_with_more(folder: Path) -> None:
    hours = {"gpus": (("rollout", 2), ("train", 8)), "gpu_hours": 150.0 / 3600}
    world = with_spec(make_world(folder, num_rollout=4), **hours)
    world.shell()
    assert not world.finish()
    assert "chain.budget.gpu_hours" in halt_of(world).reason
    assert not world.cluster.live_jobs()
    done = len(world.digests())
    assert 3 <= done < 9
    clear_stops(world.run)
    with_spec(world, gpu_hours=1.0).shell("resume")
    assert world.finish()
    assert len(world.digests()) == 9


def test_a_run_past_its_last_day_starts_nothing_new(folder: Path) -> None:
    world = make_world(folder, num_rollout=4)
    with_spec(world, until=world.cluster.now + 30.0)
    world.shell()
    assert not world.finish()
    assert "chain.budget.until" in halt_of(world).reason
    started = [job.started for job in world.cluster.history if not job.is_tick and job.started]
    assert max(started) <= world.spec.until + 30.0
    assert not world.cluster.live_jobs()


def test_a_stage_that_waits_too_long_goes_to_its_fallback_once(folder: Path) -> None:
    world = make_world(folder, tick_s=60.0)
    with_spec(world, fallbacks=(("train", 100.0), ("rollout", 100.0)))
    world.cluster.nodes = {"node1": 4}
    world.cluster.fallback_nodes = {"other1": 4}

    def fill_up() -> None:
        if "i0000.rollout" in world.digests():
            world.cluster.nodes["node1"] = 0

    world.on_step = fill_up
    world.shell()
    assert world.finish()
    elsewhere = [job for job in world.cluster.history if job.request.fallback]
    assert {job.node for job in elsewhere} == {"other1"}
    assert [job.request.stages[0].kind for job in elsewhere] == ["rollout", "train"]
    assert max(world.num_submissions().values()) == 2


def test_a_retry_stays_away_from_the_node_that_failed(folder: Path) -> None:
    world = make_world(folder, retry_delay_s=5.0)
    world.cluster.nodes = {"bad": 4, "good": 4}

    def fail_there(process: Process, effect: Effect) -> None:
        if process.node == "bad" and effect.target.endswith("order.json") and effect.op == "rename":
            kill(world.cluster, process)

    world.cluster.before = fail_there
    world.shell()
    assert world.finish()
    retries = [job for job in world.cluster.history if job.request.exclude]
    assert retries and {job.request.exclude for job in retries} == {("bad",)}
    assert {job.node for job in retries} == {"good"}


def test_a_retry_goes_anywhere_if_no_other_node_is_left(folder: Path) -> None:
    world = make_world(folder, retry_delay_s=5.0)
    world.cluster.nodes = {"only": 4}
    fail_stage(world.run.root, "train", 0, how="system", times=2)
    world.shell()
    assert world.finish()


def test_a_bad_node_is_forgiven_after_a_while(folder: Path) -> None:
    world = make_world(folder, retry_delay_s=40.0, exclude_s=30.0, max_attempts=9)
    fail_stage(world.run.root, "train", 0, how="system", times=2)
    world.shell()
    assert world.finish()
    trains = [j for j in world.cluster.history if ".i0000.train." in j.request.name]
    assert [job.request.exclude for job in trains] == [(), ("node1",), ("node2",)]


def test_a_stage_that_is_always_preempted_halts(folder: Path) -> None:
    world = make_world(folder, max_stops=3)

    def preempt_it(process: Process, effect: Effect) -> None:
        job = job_of(world.cluster, process)
        if job and ".train." in process.name and effect.target.endswith("checkpoint"):
            memory_faults.preempt(world.cluster, job)

    world.cluster.before = preempt_it
    world.shell()
    assert not world.finish()
    assert "i0000.train.t0: preempted 3 times" in halt_of(world).reason
    assert "qos or partition" in halt_of(world).hint
    assert world.num_claims() == 3
    world.cluster.before = None
    write_budget(world.run, {"i0000.train.t0": 3})
    clear_stops(world.run)
    world.shell("resume")
    assert world.finish()


def test_the_same_failure_at_the_same_place_is_tried_twice_only(folder: Path) -> None:
    world = make_world(folder, retry_delay_s=5.0, max_attempts=9)
    fail_stage(world.run.root, "train", 0, how="again", times=9)
    world.shell()
    assert not world.finish()
    assert "failed twice in the same way" in halt_of(world).reason
    assert world.num_claims() == 2


def test_a_job_at_its_learnt_limit_asks_for_more_instead_of_a_requeue(folder: Path) -> None:
    settings = make_settings(folder, max_attempts=9, retry_delay_s=5.0, num_rollout=6)
    world = World(folder, settings)
    world.asks = {"train": Ask(True, longest_s=4000.0)}
    fail_stage(world.run.root, "train", 4, how="hang")

    def end_it(process: Process, effect: Effect) -> None:
        job = job_of(world.cluster, process)
        if job and ".i0004.train." in process.name and not world.num_claims() > 1:
            if world.cluster.now - job.started > 100.0 and effect.target.endswith("heartbeat"):
                memory_faults.reach_time_limit(world.cluster, job, warning_s=60.0)

    world.cluster.before = end_it
    world.shell()
    assert world.finish()
    trains = [j for j in world.cluster.history if ".i0004.train." in j.request.name]
    limits = [job.request.wall.limit_s for job in trains if job.request.wall]
    assert len(limits) == len(trains) >= 2
    assert limits[0] is not None and limits[1] is not None and limits[1] > limits[0]
    assert trains[0].restarts == 0
