"""Garbage collection beside a chain that goes on: killed before each of its effects, and stalled.

Its ticks mark and delete while rollouts and updates run; in the end the history is the undisturbed
one, the rules of retention hold, and everything missing was pruned on purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from toy import faults
from toy.faults import At, Fault, site
from toy.hunt import Arena
from toy.world import World

from slurm_rl.chain.gc import collect
from slurm_rl.chain.needs import find_pruned_from
from slurm_rl.chain.observe import find_head
from slurm_rl.launch.memory_process import Effect, Process
from slurm_rl.storage.commits import find_damage, read_commit
from slurm_rl.storage.control import read_control, start_timeline
from slurm_rl.storage.prune import find_unwhole
from slurm_rl.storage.rundir import RunDir
from slurm_rl.storage.tombstones import is_condemned, is_pruned, publish_tombstone
from slurm_rl.types import Slot, StageRef

pytestmark = pytest.mark.slow

CHANGES = {
    "num_rollout": 5,
    "tick_s": 7.0,
    "retention": {"keep_last": 2, "gc_grace_s": 20.0, "keep_samples": False},
}


@pytest.fixture
def tidy(arena: Callable[..., Arena]) -> Arena:
    return arena(**CHANGES)


def pruned(world: World) -> set[str]:
    """Stages whose files are gone; those that are damaged fail the test."""
    gone = set()
    control = read_control(world.run)
    for ref in world.stages():
        slot = Slot(ref.iteration, ref.kind, control.timeline_of(ref))
        commit = read_commit(world.run, slot)
        assert commit is not None, f"{ref}: its COMMIT is gone"
        assert find_damage(world.run, slot, commit) == []
        if find_unwhole(world.run, slot, commit):
            assert is_pruned(world.run, slot)
            gone.add(str(ref))
    return gone


def is_of_gc(effect: Effect) -> bool:
    """Changes that only a pass makes, and reads on which it decides."""
    names = ("TOMBSTONE", "PRUNED", "settled", "leases", "/checkpoint", "/weights", "/samples")
    return effect.op == "rmdir" or any(name in effect.target for name in names)


def places(tidy: Arena) -> list[int]:
    """One effect for each place in the code of a pass."""
    seen, numbers = set(), []
    for number, (process, effect) in enumerate(tidy.undisturbed[0], 1):
        where = site(process, effect)
        if process.command[:1] == ("tick",) and is_of_gc(effect) and where not in seen:
            seen.add(where)
            numbers.append(number)
    return numbers


def run_with(tidy: Arena, number: int, fault: Fault) -> World:
    world = tidy.new_world()
    at = At({number: fault})
    world.cluster.before = at
    world.shell()
    assert world.finish(), at.log
    world.check()
    assert world.digests() == tidy.undisturbed[1], at.log
    return world


def finish_by_hand(world: World) -> set[str]:
    """A person types `gc` until nothing is left to do; what is gone then."""
    shell = Process(world.cluster, name="person")
    for _ in range(4):
        report = collect(world.keeper(shell))
        assert report.problems == []
        world.cluster.run_for(5_000.0)  # the grace, and the leases of those that died
    return pruned(world)


GONE = {f"i{i:04d}.{kind}" for i in range(3) for kind in ("rollout", "train")}


def test_ticks_tidy_behind_a_chain_that_goes_on(tidy: Arena) -> None:
    world = tidy.new_world()
    world.shell()
    assert world.finish()
    world.check()
    assert {"i0000.train", "i0001.train"} <= pruned(world) <= GONE
    assert finish_by_hand(world) == GONE


def test_a_pass_killed_anywhere_is_gone_on_with(tidy: Arena) -> None:
    numbers = places(tidy)
    assert len(numbers) > 20, numbers
    for number in numbers:
        world = run_with(tidy, number, faults.kill)
        assert pruned(world) <= GONE
        assert finish_by_hand(world) == GONE


def test_a_pass_that_hangs_anywhere_deletes_nothing_that_is_needed(tidy: Arena) -> None:
    """It wakes up when the chain has moved on, and another pass has done its work."""
    for number in places(tidy)[::2]:
        world = run_with(tidy, number, faults.stall(60.0))
        assert finish_by_hand(world) == GONE


def test_a_rewind_while_a_pass_hangs_finds_its_inputs(tidy: Arena, folder: Path) -> None:
    """The chain is set back by one iteration in the middle of a pass."""

    def rewind(cluster: object, process: Process) -> None:
        run = RunDir(world.run.root, world.run.fs)
        control = read_control(run)
        to = max(0, find_head(run, world.graph, control) - 1)
        if not find_pruned_from(run, world.graph, control, to):
            start_timeline(run, StageRef(to, "rollout"), after=0, reason="why")

    for number in places(tidy)[::3]:
        world = tidy.new_world()
        at = At({number: rewind})
        world.cluster.before = at
        world.shell()
        assert world.finish(), at.log
        for process, error in world.cluster.crashes:
            raise AssertionError(f"{process.name} crashed; {at.log}") from error
        assert read_control(world.run).halt is None, at.log
        assert world.digests() == tidy.undisturbed[1], at.log
        pruned(world)


def run_again_from(world: World, iteration: int) -> None:
    """A new timeline, without the look that `rewind` takes before."""
    assert start_timeline(world.run, StageRef(iteration, "rollout"), after=0, reason="why")
    world.shell()


def test_a_stage_whose_input_is_gone_halts_and_says_so(tidy: Arena) -> None:
    world = tidy.new_world()
    world.shell()
    assert world.finish()
    assert finish_by_hand(world) == GONE
    run_again_from(world, 2)
    assert not world.finish()
    halt = read_control(world.run).halt
    assert halt is not None and "i0001.train.t0: pruned by retention" in halt.reason
    assert world.num_claims() == 1, "it is not tried again in vain"


def test_a_mark_on_an_input_is_taken_back_and_the_stage_tried_again(tidy: Arena) -> None:
    world = tidy.new_world()
    world.shell()
    assert world.finish()
    slot = Slot(3, "train", 0)
    publish_tombstone(world.run, slot, clock=world.cluster.clock)
    run_again_from(world, 4)
    assert world.finish()
    assert world.digests() == tidy.undisturbed[1]
    assert not is_condemned(world.run, slot)
