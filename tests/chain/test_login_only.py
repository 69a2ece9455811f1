"""Where compute nodes may not submit, one command on the login node must last for many iterations.

A window of 24 links, each of an iteration, of which one in twenty dies; nobody comes back. A link
that is lost costs its own time, never the window: the one behind does its work, and, as long as its
own time lasts, its own too. With the usual wall times a loss costs one iteration at most, and the
window lasts for 20.

Links whose wall time is that of one iteration have none to spare. One that finds a claim of a dead
job has to watch it for a lease before it may take over; what is left then does for one stage of its
two. So each loss costs up to three stages: two of the link that died, one of the link that watched.
That is one and a half iterations, and three losses may leave 19: inherent in so short a wall time.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from pathlib import Path

import pytest
from toy.faults import job_of, kill
from toy.mirror_fs import MirrorFs
from toy.program import fail_stage
from toy.world import World, make_settings

from slurm_rl.launch.memory_process import Effect, Process
from slurm_rl.launch.supervisor import Supervisor
from slurm_rl.storage.control import read_control

pytestmark = pytest.mark.slow

LINKS = 24
#: Stages of an iteration; each works for 12 s, the first link's `init` for 8.
STAGES = 2
#: Of this a lease of 20 s leaves 12.
SHORT_S = 32.0


class Unlucky:
    """Before every effect: refuses sbatch on nodes, and kills one link in twenty somewhere."""

    def __init__(self, seed: int, *, share: float) -> None:
        self.rng, self.share = random.Random(seed), share
        self.doomed: dict[str, int] = {}
        self.num_killed = self.num_refused = 0

    def __call__(self, process: Process, effect: Effect) -> None:
        if effect.op == "submit" and process.node != "login":
            self.num_refused += 1
            process.cluster.submit_faults.append("refused")
        if not process.command:
            return
        if process.job_id not in self.doomed:
            is_doomed = self.rng.random() < self.share
            self.doomed[process.job_id] = self.rng.randrange(200) if is_doomed else -1
        self.doomed[process.job_id] -= 1
        if self.doomed[process.job_id] == 0 and job_of(process.cluster, process) is not None:
            self.num_killed += 1
            kill(process.cluster, process)


class Short(Supervisor):
    """A job whose wall time is that of one iteration, `init` included."""

    def run(self) -> Generator[float, None, int]:
        end = self.monotonic() + SHORT_S
        self.left_s = lambda: end - self.monotonic()
        return (yield from super().run())


def make_world(folder: Path, supervisor_class: type[Supervisor] = Supervisor) -> World:
    settings = make_settings(
        folder, pack="iteration", submit_from="login", window=LINKS, num_rollout=30
    )
    fs = MirrorFs()
    world = World(folder, settings, fs=fs, supervisor_class=supervisor_class)
    fs.clock = world.cluster.clock
    return world


def count_iterations(world: World) -> int:
    done = world.digests()
    return sum(f"i{i:04d}.train" in done for i in range(world.graph.num_iterations))


def run_alone(world: World, seed: int, *, share: float = 0.05) -> Unlucky:
    """One command, and nobody ever again."""
    luck = Unlucky(seed, share=share)
    world.cluster.before = luck
    world.shell()
    assert world.cluster.run_until(world.is_idle, limit_s=50_000.0)
    assert len(world.shells) == 1
    for process, error in world.cluster.crashes:
        raise AssertionError(f"{process.name} crashed") from error
    assert read_control(world.run).halt is None
    return luck


def check_short(world: World, began: float, luck: Unlucky) -> None:
    """Each loss cost what it must, and no link stayed on without time for work."""
    assert count_iterations(world) >= (STAGES * LINKS - (STAGES + 1) * luck.num_killed) // STAGES
    assert world.cluster.now - began <= LINKS * SHORT_S


@pytest.mark.parametrize("links", [Supervisor, Short])
@pytest.mark.parametrize("seed", range(6))
def test_a_window_of_links_lasts_without_anybody(
    folder: Path, seed: int, links: type[Supervisor]
) -> None:
    world = make_world(folder, links)
    began = world.cluster.now
    luck = run_alone(world, seed)
    assert luck.num_refused == 0, "a job tried to submit"
    assert len(world.cluster.history) == LINKS
    if links is Short:
        check_short(world, began, luck)
    else:
        assert count_iterations(world) >= max(20, LINKS - luck.num_killed)


@pytest.mark.parametrize("links", [Supervisor, Short])
def test_when_a_third_of_the_links_die_each_costs_its_own_time(
    folder: Path, links: type[Supervisor]
) -> None:
    """The usual link does what the dead before it left; a short one cannot catch up."""
    world = make_world(folder, links)
    began = world.cluster.now
    luck = run_alone(world, 1, share=0.3)
    assert luck.num_killed >= 4
    if links is Short:
        check_short(world, began, luck)
        assert count_iterations(world) < LINKS
    else:
        assert count_iterations(world) >= LINKS - luck.num_killed


def test_a_program_that_fails_does_not_burn_the_window(folder: Path) -> None:
    """The next link waits in its place until the stage may be tried again."""
    world = make_world(folder)
    for iteration in (3, 9):
        fail_stage(world.run.root, "train", iteration, how="system")
    run_alone(world, 0, share=0.0)
    assert count_iterations(world) == LINKS


def test_the_next_command_goes_on_from_there(folder: Path) -> None:
    world = make_world(folder)
    run_alone(world, 2)
    world.cluster.before = None
    world.shell()
    assert world.finish()
    world.check()
