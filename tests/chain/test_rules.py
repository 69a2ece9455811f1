"""What the chain does when people, limits and failing stages interfere; one rule a test."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Generator
from pathlib import Path

import pytest
from toy.faults import At
from toy.hunt import second_shell
from toy.program import fail_stage
from toy.world import HABITS, World, make_settings, with_spec

from slurm_rl.chain.advance import advance
from slurm_rl.chain.scheduler import JobState
from slurm_rl.errors import CorruptError
from slurm_rl.launch import memory_faults
from slurm_rl.launch.memory import MemoryJob
from slurm_rl.launch.memory_process import Effect, Process
from slurm_rl.launch.supervisor import Supervisor
from slurm_rl.storage.control import (
    Change,
    clear_stops,
    read_control,
    start_timeline,
    write_budget,
    write_change,
    write_pause,
)
from slurm_rl.types import StageRef


def make_world(folder: Path, **changes: object) -> World:
    return World(folder, make_settings(folder, **changes))


def running(world: World, label: str) -> MemoryJob:
    """Let time go on until a job of stage `label` has begun its program."""

    def job() -> MemoryJob | None:
        jobs = [j for j in world.cluster.jobs if f".{label}." in j.request.name]
        return next((j for j in jobs if j.process and j.process.on_terminate), None)

    assert world.cluster.run_until(lambda: job() is not None, limit_s=1000.0)
    found = job()
    assert found is not None
    return found


def live_links(world: World) -> list[MemoryJob]:
    return [job for job in world.cluster.live_jobs() if not job.is_tick]


def visit_every(world: World, seconds: float) -> None:
    """A person, or cron, advances from the login node now and then."""

    def visit() -> Generator[float, None, int]:
        while not world.is_complete():
            advance(world.chain(process))
            yield seconds
        return 0

    process = Process(world.cluster, name="cron")
    world.cluster.start_process(process, visit())


# -- who advances ---------------------------------------------------------------------------------


def test_from_the_login_node_there_are_no_ticks_and_jobs_submit_nothing(folder: Path) -> None:
    world = make_world(folder, submit_from="login", num_rollout=3)

    def refuse_on_nodes(process: Process, effect: Effect) -> None:
        if effect.op == "submit" and process.node != "login":
            world.cluster.submit_faults.append("refused")

    world.cluster.before = refuse_on_nodes
    visit_every(world, 60.0)
    world.shell()
    assert world.finish()
    world.check()
    assert not any(job.is_tick for job in world.cluster.history)


def test_with_ticks_a_run_survives_the_loss_of_every_link(folder: Path) -> None:
    world = make_world(folder)
    world.shell()
    running(world, "rollout")
    for job in live_links(world):
        if job.process is not None:
            memory_faults.kill(world.cluster, job)
        else:
            world.cluster.jobs.remove(job)  # a controller that has forgotten it
    assert world.finish()
    world.check()


def test_at_most_two_ticks_are_pending_and_they_are_spaced(folder: Path) -> None:
    world = make_world(folder, tick_s=20.0)
    world.shell()
    worst = 0

    def look(process: Process, effect: Effect) -> None:
        nonlocal worst
        ticks = [j for j in world.cluster.live_jobs() if j.is_tick and j.state is JobState.PENDING]
        worst = max(worst, len(ticks))

    world.cluster.before = look
    assert world.finish()
    times = [job.submitted for job in world.cluster.history if job.is_tick]
    assert worst == 2
    assert min(b - a for a, b in itertools.pairwise(times)) > 5.0


def test_two_submits_at_once_interleaved_at_every_effect(folder: Path) -> None:
    for number in range(1, 200):
        root = folder / str(number)
        root.mkdir()
        world = make_world(root)
        world.cluster.before = At({number: second_shell(0.5)})
        first = world.shell("first")
        world.cluster.run_for(0.5)
        assert set(world.num_submissions().values()) == {1}
        assert len(live_links(world)) == 3
        if first.effects < number:
            return
    raise AssertionError("the first advance never ended")


# -- failures -------------------------------------------------------------------------------------


def test_retries_are_capped_and_the_halt_says_why(folder: Path) -> None:
    world = make_world(folder, max_attempts=3, retry_delay_s=5.0)
    fail_stage(world.run.root, "train", 0, how="system", times=100)
    world.shell()
    assert not world.finish()
    halt = read_control(world.run).halt
    assert halt is not None
    assert "i0000.train.t0: 3 attempts" in halt.reason
    assert "told to fail" in halt.reason
    assert halt.hint
    assert Path(halt.log).is_dir()
    assert not world.cluster.live_jobs()


class Stillborn(Supervisor):
    """A job whose environment is broken: it ends before it can claim anything."""

    def run(self) -> Generator[float, None, int]:
        yield 1.0
        return 1


def test_jobs_that_end_before_they_claim_halt_the_run(folder: Path) -> None:
    settings = make_settings(folder, max_attempts=1)
    world = World(folder, settings, supervisor_class=Stillborn)
    world.shell()
    assert not world.finish()
    halt = read_control(world.run).halt
    assert halt is not None and "ended before they could look for work" in halt.reason
    assert not world.cluster.live_jobs()
    assert max(world.num_submissions().values()) <= 8


@pytest.mark.parametrize("how", ["system", "crash", "lie"])
def test_a_failure_below_the_cap_is_tried_again(folder: Path, how: str) -> None:
    world = make_world(folder, max_attempts=3, retry_delay_s=5.0)
    fail_stage(world.run.root, "rollout", 1, how=how, times=2)
    world.shell()
    assert world.finish()


@pytest.mark.parametrize("how", ["user", "rank"])
def test_a_failure_that_is_the_users_halts_at_once(folder: Path, how: str) -> None:
    world = make_world(folder)
    fail_stage(world.run.root, "rollout", 0, how=how)
    world.shell()
    assert not world.finish()
    halt = read_control(world.run).halt
    assert halt is not None
    assert f"told to fail ({how})" in halt.reason
    assert world.num_claims() == 1
    assert not world.cluster.live_jobs()


def test_a_killed_rank_is_no_request_to_stop(folder: Path) -> None:
    world = make_world(folder, retry_delay_s=5.0)
    fail_stage(world.run.root, "train", 0, how="survivor", times=9)
    world.shell()
    assert not world.finish()
    halt = read_control(world.run).halt
    assert halt is not None and "failed twice in the same way" in halt.reason
    assert "status 137" in halt.reason
    assert world.num_claims() == 2


def test_a_halt_leaves_running_tasks_of_an_array_alone(folder: Path) -> None:
    world = make_world(folder, shards=3, rollout_batch_size=3)
    world.cluster.nodes = {"node1": 2}  # the third shard waits
    fail_stage(world.run.root, "rollout", 0, how="user")
    world.shell()
    assert not world.finish()
    shards = [job for job in world.cluster.history if ".rollout." in job.request.name]
    assert [job.raw for job in shards][:3] == ["FAILED", "COMPLETED", "CANCELLED"]


def test_resume_after_a_cap_opens_a_new_budget(folder: Path) -> None:
    world = make_world(folder, max_attempts=2, retry_delay_s=5.0)
    fail_stage(world.run.root, "train", 0, how="system", times=3)
    world.shell()
    assert not world.finish()
    write_budget(world.run, {"i0000.train.t0": world.num_claims()})
    clear_stops(world.run)
    world.shell("resume")
    assert world.finish()


def test_without_the_new_budget_the_run_halts_again(folder: Path) -> None:
    world = make_world(folder, max_attempts=2, retry_delay_s=5.0)
    fail_stage(world.run.root, "train", 0, how="system", times=3)
    world.shell()
    assert not world.finish()
    clear_stops(world.run)
    world.shell("resume")
    assert not world.finish()
    assert read_control(world.run).halt is not None


def test_a_damaged_commit_halts_and_is_not_made_again(folder: Path) -> None:
    world = make_world(folder)
    world.shell()
    running(world, "train")
    path = world.run.root / "iterations/000000/rollout.t0/COMMIT"
    damaged = path.read_bytes().replace(b'"position":2', b'"position":3')
    path.write_bytes(damaged)
    world.cluster.run_until(lambda: not world.cluster.live_jobs(), limit_s=2000.0)
    halt = read_control(world.run).halt
    assert halt is not None
    assert "COMMIT" in halt.reason
    assert path.read_bytes() == damaged
    with pytest.raises(CorruptError, match="digest"):
        world.is_complete()


def test_a_hanging_program_is_ended_by_its_deadline(folder: Path) -> None:
    world = make_world(folder, retry_delay_s=5.0)
    world.deadlines = {"train": 60.0}
    fail_stage(world.run.root, "train", 0, how="hang")
    world.shell()
    assert world.finish()


# -- what the scheduler does ----------------------------------------------------------------------


def test_a_preempted_job_goes_back_by_itself_and_counts_as_no_failure(folder: Path) -> None:
    world = make_world(folder, max_attempts=1)
    world.shell()
    job = running(world, "train")
    memory_faults.preempt(world.cluster, job)
    assert world.finish()
    world.check()
    assert job.restarts == 1
    assert set(world.num_submissions().values()) == {1}


def test_a_job_at_its_time_limit_is_tried_again(folder: Path) -> None:
    settings = make_settings(folder, max_attempts=3)
    habits = dataclasses.replace(HABITS, time_limit_s=60.0, warning_s=20.0)
    world = World(folder, settings, habits=habits)
    fail_stage(world.run.root, "rollout", 0, how="hang")
    world.shell()
    assert world.finish()
    assert world.num_claims() == 2


def test_a_lost_node_costs_one_stage(folder: Path) -> None:
    world = make_world(folder)
    world.shell()
    job = running(world, "rollout")
    memory_faults.lose_node(world.cluster, job.node, live_on=True)
    assert world.finish()
    world.check()


def test_the_limit_of_submitted_jobs_defers_and_leaves_room_for_ticks(folder: Path) -> None:
    world = make_world(folder, max_submit_jobs=4, window=4, num_rollout=3)
    world.cluster.habits = dataclasses.replace(HABITS, max_jobs=4)
    world.shell()
    world.cluster.run_for(30.0)
    assert sum(job.is_tick for job in world.cluster.live_jobs()) == 2
    assert world.finish()
    world.check()


def test_a_failure_with_shapes_that_do_not_fit_does_not_burn_the_window(folder: Path) -> None:
    world = make_world(folder, retry_delay_s=5.0)
    world.fits = lambda have, need: have == need
    fail_stage(world.run.root, "rollout", 0, how="system", times=2)
    world.shell()
    assert world.finish()
    assert max(world.num_submissions().values()) <= 4


# -- what people do -------------------------------------------------------------------------------


def test_a_pause_lets_what_runs_commit_and_nothing_else_start(folder: Path) -> None:
    world = make_world(folder)
    world.shell()
    running(world, "rollout")
    write_pause(world.run, "by a person")
    assert not world.finish()
    assert set(world.digests()) == {"i0000.init", "i0000.rollout"}
    assert not world.cluster.live_jobs()
    clear_stops(world.run)
    world.shell("resume")
    assert world.finish()
    world.check()


def test_a_rewind_makes_new_history_and_a_zombie_cannot_touch_it(folder: Path) -> None:
    world = make_world(folder)
    world.shell()
    old = running(world, "train")
    memory_faults.split_brain(world.cluster, old)
    assert start_timeline(world.run, StageRef(0, "rollout"), after=0, reason="again")
    assert not start_timeline(world.run, StageRef(0, "rollout"), after=0, reason="second")
    world.shell("rewind")
    assert world.finish()
    world.check()
    assert (world.run.root / "iterations/000000/rollout.t1/COMMIT").exists()
    assert (world.run.root / "iterations/000001/train.t1/COMMIT").exists()


def test_a_smaller_window_submits_no_further_ahead(folder: Path) -> None:
    world = with_spec(make_world(folder, num_rollout=3), window=1)
    world.shell()
    worst = 0

    def look(process: Process, effect: Effect) -> None:
        nonlocal worst
        worst = max(worst, len(live_links(world)))

    world.cluster.before = look
    assert world.finish()
    assert worst <= 2  # a link, and the one before that is about to end


# -- people and machines at once --------------------------------------------------------------------


def test_a_change_in_the_middle_of_an_advance_does_not_end_the_chain(folder: Path) -> None:
    """What was planned from the old control is planned again: nobody else may look for long."""
    for number in range(1, 400):
        root = folder / str(number)
        root.mkdir()
        world = make_world(root)

        def change(cluster: object, process: Process, world: World = world) -> None:
            write_change(world.run, Change(0, "init", values={"chain.window": 3}))

        world.cluster.before = At({number: change})
        shell = world.shell("submit")
        world.cluster.run_for(0.5)
        assert len(live_links(world)) == 3, number
        assert sum(job.is_tick for job in world.cluster.live_jobs()) == 1, number
        if shell.effects < number:
            return
    raise AssertionError("the advance never ended")


def test_a_lonely_tick_stays_until_there_are_two_others(folder: Path) -> None:
    world = make_world(folder, tick_s=300.0)
    fail_stage(world.run.root, "init", 0, how="hang")
    world.shell()
    world.cluster.run_for(290.0)
    assert sum(job.is_tick for job in world.cluster.live_jobs()) == 1
    world.cluster.run_for(30.0)
    pending = [j for j in world.cluster.live_jobs() if j.is_tick and j.state is JobState.PENDING]
    assert len(pending) == 2
    assert abs(pending[0].submitted - pending[1].submitted) > 10.0
