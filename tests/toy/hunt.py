"""Many runs of one kind, each with its own faults, each compared with the undisturbed one.

As a script, `python -m toy.hunt SUITE`, it is what a mutant of the protocol is hunted with: it ends
with 1 as soon as a run breaks a rule, and with 0 if none does.
"""

from __future__ import annotations

import functools
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_rl.launch.memory import MemoryCluster
from slurm_rl.launch.memory_process import Effect, Process
from toy import faults
from toy.faults import At, Fault, first_of_each
from toy.world import World, make_settings, record_effects


@dataclass(frozen=True)
class Bounds:
    """What a run with one fault may cost at most."""

    submissions: int = 1
    claims: int = 1
    cancelled: int = 0
    limit_s: float = 5_000.0


@dataclass
class Arena:
    """Ground for runs that are the same but for their faults."""

    folder: Path
    changes: dict[str, Any]

    def new_world(self) -> World:
        """A fresh run in a fresh directory; the one before is gone."""
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        (self.folder / "run").mkdir(parents=True)
        return World(self.folder / "run", make_settings(self.folder / "run", **self.changes))

    @functools.cached_property
    def undisturbed(self) -> tuple[list[tuple[Process, Effect]], dict[str, str]]:
        """Effects and digests of a run where nothing goes wrong."""
        world = self.new_world()
        effects = record_effects(world)
        world.shell()
        assert world.finish()
        world.check()
        return effects, world.digests()

    def sites(self, *, reads: bool = False) -> list[int]:
        """One effect for each place in the code."""
        return first_of_each(self.undisturbed[0], of=lambda effect: reads or effect.is_write)

    def every_effect(self, *, reads: bool = False) -> list[int]:
        effects = self.undisturbed[0]
        return [n for n, (_, effect) in enumerate(effects, 1) if reads or effect.is_write]

    def effects_of(self, program: str) -> list[int]:
        """Every effect of the jobs that run `program` (`link` or `tick`)."""
        effects = self.undisturbed[0]
        return [n for n, (p, _) in enumerate(effects, 1) if p.command[:1] == (program,)]

    def try_at(self, number: int, fault: Fault, bounds: Bounds) -> None:
        """One run with `fault` before its effect `number`; AssertionError says what broke."""
        world = self.new_world()
        at = At({number: fault})
        world.cluster.before = at
        world.shell()
        self.judge(world, bounds, at.log)

    def judge(self, world: World, bounds: Bounds, story: list[str]) -> None:
        """Let the run end, and hold it against the rules."""
        try:
            assert world.finish(limit_s=bounds.limit_s), "the run did not complete"
            world.check()
            assert world.digests() == self.undisturbed[1], "other content than undisturbed"
            found = (max(world.num_submissions().values()), world.num_claims())
            assert found[0] <= bounds.submissions, f"{found[0]} submissions of one link"
            assert found[1] <= bounds.claims, f"{found[1]} claims of one slot"
            assert world.num_cancelled() <= bounds.cancelled, "a link was cancelled"
        except AssertionError as error:
            raise AssertionError(f"{error}; faults: {story}\n{describe(world)}") from error

    def try_all(self, numbers: Iterable[int], fault: Fault, bounds: Bounds) -> None:
        for number in numbers:
            self.try_at(number, fault, bounds)


def describe(world: World) -> str:
    """What became of the jobs, one line each."""
    start = 1_000_000.0
    return "\n".join(
        f"  {job.job_id} {job.request.name} submitted {job.submitted - start:.0f}"
        f" started {max(0.0, job.started - start):.0f} {job.raw} {job.exit_code}"
        for job in world.cluster.history[:40]
    )


def second_shell(wait_s: float) -> Fault:
    """Somebody else advances just now, and some time goes by."""

    def happen(cluster: MemoryCluster, process: Process) -> None:
        other = Process(cluster, name="another")
        cluster.start_process(other, cluster.program(other))
        cluster.run_for(wait_s)

    return happen


#: name -> (fault, bounds, whether it matters at reads too)
FAULTS: dict[str, tuple[Fault, Bounds, bool]] = {
    "kill": (faults.kill, Bounds(2, 2), False),
    "kill and requeue": (faults.kill_and_requeue, Bounds(2, 2), False),
    "preempt": (faults.preempt, Bounds(1, 2), False),
    "split brain, the old one goes on": (faults.split_brain(0.0), Bounds(2, 2, cancelled=1), False),
    "split brain, the old one wakes late": (faults.split_brain(60.0), Bounds(2, 2), True),
    "node failed, the old one wakes late": (
        faults.split_brain(60.0, requeue=False),
        Bounds(2, 2),
        True,
    ),
    "a short stall": (faults.stall(3.0), Bounds(), True),
    "a long stall": (faults.stall(500.0), Bounds(2, 2), True),
    "another advance": (second_shell(3.0), Bounds(), True),
    "submission refused": (faults.next_submission("refused"), Bounds(2), False),
    "submission lost": (faults.next_submission("lost"), Bounds(2), False),
    "submission made, but timed out": (faults.next_submission("made"), Bounds(), False),
    "controller forgets": (faults.controller_forgets(reissue=False), Bounds(2), False),
    "ids reissued to a stranger": (
        faults.controller_forgets(reissue=True, stranger_s=50_000.0),
        Bounds(2, limit_s=3_000.0),
        False,
    ),
    "controller is silent": (faults.controller_is_silent(100.0), Bounds(2), True),
    "pending jobs held": (faults.hold_pending, Bounds(2, cancelled=3), False),
}

#: What a mutant is hunted with: (settings, names of faults).
#: The program whose every effect is tried; without one, one effect for each place in the code.
SUITES: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "kills": ({}, ("kill", "split brain, the old one wakes late"), ""),
    "ticks": ({"tick_s": 7.0, "shards": 2}, ("a short stall",), "tick"),
    "plain ticks": ({"tick_s": 7.0, "retry_delay_s": 0.0}, ("a short stall",), "tick"),
    "advances": ({}, ("another advance", "a long stall"), ""),
    "controller": ({}, ("ids reissued to a stranger", "controller is silent"), ""),
    "forgets": ({}, ("controller forgets", "submission lost"), ""),
}


def hunt(folder: Path, suite: str, *, report: Callable[[str], object] = print) -> bool:
    """Whether some run of the suite breaks a rule."""
    changes, names, program = SUITES[suite]
    try:
        for name in names:
            fault, bounds, reads = FAULTS[name]
            arena = Arena(folder, changes)
            numbers = arena.effects_of(program) if program else arena.sites(reads=reads)
            arena.try_all(numbers, fault, bounds)
    except AssertionError as error:
        report(f"broken: {error}")
        return True
    return False


if __name__ == "__main__":
    sys.exit(hunt(Path(tempfile.mkdtemp(dir=sys.argv[2])), sys.argv[1]))
