"""Many runs of one kind, each with its own faults, each compared with the undisturbed one.

As a script, `python -m toy.hunt SUITE`, it is what a mutant of the protocol is hunted with: it ends
with 1 as soon as a run breaks a rule, and with 0 if none does.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import logging
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_rl.launch.memory import Habits, MemoryCluster
from slurm_rl.launch.memory_process import Effect, Process
from slurm_rl.storage.fs import Fs
from toy import faults
from toy.faults import At, Fault, first_of_each
from toy.faulty_fs import WRITES, FaultyFs, StorageFault
from toy.judge import Judge, find_losses
from toy.mirror_fs import MirrorFs
from toy.program import set_service
from toy.world import HABITS, World, make_settings, record_effects


@dataclass
class StorageView:
    """What processes see of the file system: `faults` strike them."""

    faults: list[StorageFault] = field(default_factory=list)

    def __call__(self, process: Process, fs: Fs) -> Fs:
        return FaultyFs(fs, self.faults, process.node)


@dataclass(frozen=True)
class Bounds:
    """What a run with one fault may cost at most."""

    submissions: int = 1
    claims: int = 1
    cancelled: int = 0
    limit_s: float = 5_000.0
    may_fail: bool = False


@dataclass
class Arena:
    """Ground for runs that are the same but for their faults."""

    folder: Path
    changes: dict[str, Any]
    habits: Habits = HABITS

    def new_world(self) -> World:
        """A fresh run in a fresh directory; the one before is gone."""
        root = self.folder / "run"
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        fs = MirrorFs()
        world = World(root, make_settings(root, **self.changes), habits=self.habits, fs=fs)
        fs.clock = world.cluster.clock
        world.cluster.view = StorageView()
        world.on_step = Judge(world, max_submissions=20, max_ticks=4).look
        return world

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

    def effects_of(self, program: str, *, but_first: bool = False) -> list[int]:
        """Every effect of the jobs that run `program` (`link` or `tick`)."""
        numbered = list(enumerate(self.undisturbed[0], 1))
        found = [(n, p) for n, (p, _) in numbered if p.command[:1] == (program,)]
        return [n for n, p in found if not (but_first and p is found[0][1])]

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
            world.check(may_fail=bounds.may_fail)
            assert world.digests() == self.undisturbed[1], "other content than undisturbed"
            world.on_step()
            assert not find_losses(world), find_losses(world)
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


def storage_error(cluster: MemoryCluster, process: Process) -> None:
    """This operation fails, once."""
    assert isinstance(cluster.view, StorageView)
    cluster.view.faults.append(StorageFault(errno.EIO, ops=WRITES, node=process.node))


def service_down(cluster: MemoryCluster, process: Process) -> None:
    """The service that scores and evaluations ask is down for a quarter of an hour."""
    run_dir = Path(process.command[1])
    set_service(run_dir, is_down=True)
    cluster.at(900.0, lambda: set_service(run_dir, is_down=False))


def lose_tick_and_links(cluster: MemoryCluster, process: Process) -> None:
    """This tick dies, and all links are gone: what is left is the other tick."""
    for job in [job for job in cluster.live_jobs() if not job.is_tick]:
        faults.kill_life(cluster, job)
        cluster.jobs.remove(job)
    faults.kill(cluster, process)


#: name -> (fault, bounds, whether it matters at reads too)
FAULTS: dict[str, tuple[Fault, Bounds, bool]] = {
    "kill": (faults.kill, Bounds(2, 2), False),
    "kill and requeue": (faults.kill_and_requeue, Bounds(2, 2), False),
    "preempt": (faults.preempt, Bounds(1, 2), False),
    "preempt, and no way back": (faults.preempt, Bounds(2, 2), False),
    "split brain, the old one goes on": (faults.split_brain(0.0), Bounds(2, 2, cancelled=1), False),
    "split brain, the old one wakes late": (faults.split_brain(60.0), Bounds(2, 2), True),
    "node failed, the old one wakes late": (
        faults.split_brain(60.0, requeue=False),
        Bounds(2, 2),
        True,
    ),
    "node failed, the old one goes on": (
        faults.split_brain(0.0, requeue=False),
        Bounds(2, 1, cancelled=1),
        False,
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
    "a storage error": (storage_error, Bounds(3, 3, cancelled=9, may_fail=True), False),
    "pending jobs held": (faults.hold_pending, Bounds(2, cancelled=3), False),
}

#: Those, and what makes sense for some programs only.
HUNTED = FAULTS | {
    "the last tick but one": (lose_tick_and_links, Bounds(3, 3, cancelled=9), True),
    "a stall": (faults.stall(60.0), Bounds(2, 2), True),
    "the service is down": (service_down, Bounds(9, 9), True),
}


@dataclass(frozen=True)
class Suite:
    """What a mutant is hunted with: runs of a kind, each with one of the faults at one effect.

    program: whose every effect is tried; without one, one effect for each place in the code.
    but_first: leaves the first job of the program alone.
    target: only effects in whose target this regular expression is found.
    """

    faults: tuple[str, ...]
    changes: dict[str, Any] = field(default_factory=dict)
    program: str = ""
    habits: Habits = HABITS
    but_first: bool = False
    target: str = ""

    def effects(self, arena: Arena, *, reads: bool) -> list[int]:
        """Numbers of the effects to try."""
        numbers = arena.sites(reads=reads)
        if self.program:
            numbers = arena.effects_of(self.program, but_first=self.but_first)
        effects = arena.undisturbed[0]
        return [n for n in numbers if re.search(self.target, effects[n - 1][1].target)]


EVALS = {"judged": {"prompt_data": "none", "interval": 1}}

SUITES = {
    "late": Suite(("split brain, the old one wakes late",)),
    "late commits": Suite(("split brain, the old one wakes late",), target="COMMIT"),
    "lease": Suite(("node failed, the old one goes on",), {"retry_delay_s": 0.0}),
    "ticks": Suite(("a short stall",), {"tick_s": 7.0, "shards": 2}, "tick", target="/train.t0"),
    "plain ticks": Suite(("a short stall",), {"tick_s": 7.0, "retry_delay_s": 0.0}, "tick"),
    "last tick": Suite(
        ("the last tick but one",),
        {"tick_s": 30.0, "rollout_batch_size": 40},
        "tick",
        but_first=True,
    ),
    "tidy ticks": Suite(
        ("a stall",),
        {"tick_s": 7.0, "retention": {"keep_last": 2, "gc_grace_s": 1.0}},
        target="/a0001-",
    ),
    "advances": Suite(("another advance", "a long stall")),
    "reissued": Suite(("ids reissued to a stranger",)),
    "silent": Suite(("controller is silent",)),
    "forgets": Suite(("controller forgets", "submission lost")),
    "made": Suite(("submission made, but timed out",)),
    "signals": Suite(
        ("preempt, and no way back",),
        habits=dataclasses.replace(HABITS, user_signal=True, can_requeue=False),
    ),
    "storage": Suite(("a storage error",), program="link", target=r"\.t0$"),
    "evals": Suite(("kill",), {"eval": EVALS}),
    "outages": Suite(("the service is down",), {"score": {"enabled": True}}, "link"),
    "tidy evals": Suite(
        ("the service is down",),
        {
            "eval": EVALS,
            "num_rollout": 6,
            "tick_s": 30.0,
            "retention": {"keep_last": 2, "gc_grace_s": 1.0},
        },
        "link",
    ),
}


def hunt(folder: Path, name: str, *, report: Callable[[str], object] = print) -> bool:
    """Whether some run of the suite breaks a rule."""
    suite = SUITES[name]
    try:
        for fault_name in suite.faults:
            fault, bounds, reads = HUNTED[fault_name]
            arena = Arena(folder, suite.changes, suite.habits)
            arena.try_all(suite.effects(arena, reads=reads), fault, bounds)
    except AssertionError as error:
        report(f"broken: {error}")
        return True
    return False


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    sys.exit(hunt(Path(tempfile.mkdtemp(dir=sys.argv[2])), sys.argv[1]))
