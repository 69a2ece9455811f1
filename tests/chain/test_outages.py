"""A service that is down: the score stage is deferred, nothing is spent, and nobody holds a GPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy.faults import kill
from toy.program import fail_stage, set_service
from toy.world import HABITS, World, make_settings, with_spec

from slurm_rl.chain.advance import look
from slurm_rl.chain.outages import LONGEST_S
from slurm_rl.chain.plan import plan
from slurm_rl.launch.memory import MemoryJob
from slurm_rl.launch.memory_process import Effect, Process
from slurm_rl.storage.control import read_control

POLL_S = 30.0


def make_world(folder: Path, **changes: Any) -> World:
    return World(
        folder, make_settings(folder, score={"enabled": True, "poll_s": POLL_S}, **changes)
    )


def take_down(world: World, *, at: float, seconds: float) -> None:
    run_dir = world.run.root
    world.later(at, lambda: set_service(run_dir, is_down=True))
    world.later(at + seconds, lambda: set_service(run_dir, is_down=False))


def jobs(world: World, label: str) -> list[MemoryJob]:
    return [job for job in world.cluster.history if f".{label}." in job.request.name]


@pytest.mark.slow
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    start_s=st.floats(0.0, 60.0),
    outage_s=st.sampled_from([5.0, 90.0, 700.0, 4_000.0, 20_000.0]),
    lag=st.integers(0, 1),
    pack=st.sampled_from(["stage", "iteration"]),
    shards=st.integers(1, 2),
)
def test_an_outage_of_any_length_costs_no_retries(
    tmp_path_factory: pytest.TempPathFactory,
    start_s: float,
    outage_s: float,
    lag: int,
    pack: str,
    shards: int,
) -> None:
    shards = 1 if pack == "iteration" else shards
    folder = tmp_path_factory.mktemp("outage")
    # One failure would be one too many, were an outage counted as one.
    changes: dict[str, Any] = {"lag": lag, "pack": pack, "shards": shards, "tick_s": 2_000.0}
    world = make_world(folder, **changes, max_attempts=1, max_stops=1)
    take_down(world, at=start_s, seconds=outage_s)
    world.shell()
    assert world.finish(limit_s=60_000.0)
    world.check()
    worst = max(world.num_submissions().values())
    # Looks are poll_s apart at first, twice as far each time, and LONGEST_S in the end.
    assert worst <= 2 + 6 + outage_s / LONGEST_S
    assert worst <= 2 + outage_s / POLL_S
    plain = World(
        folder / "plain", make_settings(folder / "plain", score={"enabled": True}, **changes)
    )
    plain.shell()
    assert plain.finish()
    assert world.digests() == plain.digests()


def test_those_behind_it_keep_their_places_in_the_queue(folder: Path) -> None:
    """The train job that waited for the scores is made to wait for the next look, not woken."""
    world = make_world(folder)
    take_down(world, at=0.0, seconds=3_000.0)
    world.shell()
    assert world.finish()
    assert len(jobs(world, "i0000.score")) > 4
    assert len(jobs(world, "i0000.train")) == len(jobs(world, "i0001.rollout")) == 1


def test_no_job_with_gpus_is_alive_while_the_service_is_down(folder: Path) -> None:
    world = with_spec(make_world(folder), gpus=(("rollout", 8), ("train", 8)))
    take_down(world, at=0.0, seconds=5_000.0)
    world.shell()
    assert world.finish()
    down = (world.run.root / "iterations" / "000000" / "score.t0").glob("a*/ended.json")
    assert len(list(down)) > 4
    for job in world.cluster.history:
        is_large = any(ref.kind in ("rollout", "train") for ref in job.request.stages)
        if is_large and job.started and ".i0000.rollout." not in job.request.name:
            assert job.started - 1_000_000.0 > 5_000.0, job.request.name


def test_a_large_job_that_finds_a_deferred_stage_leaves_it_alone(folder: Path) -> None:
    """The controller loses the score's next look; the train job wakes, and takes nothing over."""
    world = make_world(folder)
    take_down(world, at=0.0, seconds=2_000.0)

    def lose_it(process: Process, effect: Effect) -> None:
        later = [j for j in jobs(world, "i0000.score")[1:] if j in world.cluster.jobs]
        if later and not lost:
            lost.append(later[0])
            world.cluster.jobs.remove(later[0])

    lost: list[MemoryJob] = []
    world.cluster.before = lose_it
    world.shell()
    assert world.finish()
    assert lost
    names = [path.read_text() for path in world.run.root.glob("iterations/000000/score.t0/claim.*")]
    tokens = {job.request.name.rpartition(".")[2] for job in jobs(world, "i0000.score")}
    assert names and all(any(token in name for token in tokens) for name in names)


def test_failures_beside_an_outage_still_count(folder: Path) -> None:
    world = make_world(folder, max_attempts=2, retry_delay_s=5.0)
    take_down(world, at=0.0, seconds=400.0)
    fail_stage(world.run.root, "score", 0, how="system", times=2)
    world.shell()
    assert not world.finish()
    halt = read_control(world.run).halt
    assert halt is not None and "i0000.score.t0: 2 attempts" in halt.reason


def test_the_budget_still_holds(folder: Path) -> None:
    world = make_world(folder)
    with_spec(world, until=world.cluster.now + 2_000.0)
    set_service(world.run.root, is_down=True)
    world.shell()
    assert not world.finish(limit_s=9_000.0)
    halt = read_control(world.run).halt
    assert halt is not None and "chain.budget.until" in halt.reason


def test_it_is_said_what_is_waited_for_and_since_when(folder: Path) -> None:
    world = make_world(folder)
    set_service(world.run.root, is_down=True)
    world.shell()
    world.cluster.run_for(500.0)
    seen = look(world.chain(Process(world.cluster, name="person")))
    (line,) = [w for w in plan(world.spec, seen).waiting if "waits for" in w]
    assert line.startswith("i0000.score.t0 waits for service judge (down since 19")
    assert "looked 4 times" in line and "judge did not answer" in line


def test_where_jobs_submit_nothing_the_small_job_stays_and_asks_again(folder: Path) -> None:
    world = with_spec(make_world(folder, submit_from="login"), gpus=(("train", 8),), window=24)
    take_down(world, at=0.0, seconds=5_000.0)
    world.shell()
    assert world.finish()
    world.check()
    assert set(world.num_submissions().values()) == {1}, "a link was burnt"
    assert len(world.shells) == 1
    assert len(list(world.run.root.glob("iterations/000000/score.t0/a*"))) > 5


def test_and_goes_back_to_the_queue_at_the_end_of_its_time(folder: Path) -> None:
    settings_ = make_settings(folder, score={"enabled": True}, submit_from="login", window=24)
    habits = dataclasses.replace(HABITS, time_limit_s=900.0, warning_s=60.0)
    world = World(folder, settings_, habits=habits)
    take_down(world, at=0.0, seconds=5_000.0)
    world.shell()
    assert world.finish()
    assert set(world.num_submissions().values()) == {1}
    assert jobs(world, "i0000.score")[0].restarts >= 3


def test_an_iteration_that_is_one_job_gives_its_allocation_back(folder: Path) -> None:
    world = make_world(folder, pack="iteration")
    take_down(world, at=0.0, seconds=4_000.0)
    world.shell()
    assert world.finish()
    looks = jobs(world, "i0000.iteration")
    assert len(looks) >= 5
    assert len(jobs(world, "i0001.iteration")) == 1, "the one behind was woken for nothing"
    rollouts = list(world.run.root.glob("iterations/000000/rollout.t0/a*"))
    assert len(rollouts) == 1, "the rollout was made again"


def test_a_job_killed_in_an_outage_is_tried_again_like_any(folder: Path) -> None:
    world = make_world(folder, retry_delay_s=5.0)
    take_down(world, at=0.0, seconds=600.0)
    struck: list[str] = []

    def strike(process: Process, effect: Effect) -> None:
        if ".score." in process.name and len(struck) < 2 and effect.target.endswith("ended.json"):
            struck.append(process.name)
            kill(world.cluster, process)

    world.cluster.before = strike
    world.shell()
    assert world.finish()
    assert len(struck) == 2
