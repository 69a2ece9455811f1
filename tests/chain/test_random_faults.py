"""Runs with two faults of any kind at random places, and people who interfere."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from toy.faults import At, Fault
from toy.hunt import FAULTS, Arena, Bounds
from toy.world import World

from slurm_rl.launch.memory import MemoryCluster
from slurm_rl.launch.memory_process import Process
from slurm_rl.storage.control import clear_stops, read_control, start_timeline, write_pause
from slurm_rl.types import StageRef

pytestmark = pytest.mark.slow

SETTINGS = (
    {},
    {"shards": 2},
    {"pack": "iteration", "shards": 2},
    {"window": 1, "tick_s": 40.0},
    {"num_rollout": 3, "window": 2},
)


def pause_and_resume(world: World, *, after_s: float) -> Fault:
    """A person pauses the run and resumes it later."""

    def happen(cluster: MemoryCluster, process: Process) -> None:
        def resume() -> None:
            clear_stops(world.run)
            world.shell("resume")

        write_pause(world.run, "by a person")
        world.later(after_s, resume)

    return happen


def rewind(world: World, ref: StageRef) -> Fault:
    """A person rewrites history from a stage on."""

    def happen(cluster: MemoryCluster, process: Process) -> None:
        last = max((start.number for start in read_control(world.run).timelines), default=0)
        assert start_timeline(world.run, ref, after=last, reason="by a person")
        world.later(1.0, lambda: world.shell("rewind"))

    return happen


def draw_fault(world: World, rng: random.Random) -> tuple[str, Fault]:
    name = rng.choice([*FAULTS, "pause", "rewind"])
    if name == "pause":
        return name, pause_and_resume(world, after_s=rng.choice([5.0, 60.0, 400.0]))
    if name == "rewind":
        ref = StageRef(rng.randrange(world.graph.num_iterations), rng.choice(["rollout", "train"]))
        return f"rewind to {ref}", rewind(world, ref)
    return name, FAULTS[name][0]


def run_with_two_faults(arena: Callable[..., Arena], seed: int) -> None:
    rng = random.Random(seed)
    ground = arena(**rng.choice(SETTINGS))
    num_effects = len(ground.undisturbed[0])
    world = ground.new_world()
    drawn = {rng.randint(1, num_effects): draw_fault(world, rng) for _ in range(2)}
    at = At({number: fault for number, (_, fault) in drawn.items()})
    world.cluster.before = at
    world.shell()
    story = [f"seed {seed}", *(name for name, _ in drawn.values()), *at.log]
    bounds = Bounds(submissions=4, claims=5, cancelled=8, limit_s=10_000.0)
    ground.judge(world, bounds, [*story, *at.log])


@pytest.mark.parametrize("block", range(5))
def test_two_faults_at_random(arena: Callable[..., Arena], block: int) -> None:
    for seed in range(block * 40, (block + 1) * 40):
        run_with_two_faults(arena, seed)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("block", range(5))
def test_two_faults_at_random_many(arena: Callable[..., Arena], block: int) -> None:
    for seed in range(1000 + block * 1000, 1000 + (block + 1) * 1000):
        run_with_two_faults(arena, seed)
