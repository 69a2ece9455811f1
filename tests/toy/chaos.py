"""Runs under a schedule of faults: each drawn, each judged at every step, each reproducible.

    run_schedule(Schedule(Ground(lag=1), (Blow(at=120, kind="kill"),)), folder)

A person is there too, as on a real cluster: types a command again that failed, resumes a run that
was paused by a `scancel` or halted, and, where jobs cannot submit jobs, looks in now and then.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from slurm_rl.chain.observe import link_folder
from slurm_rl.chain.plan_ticks import TICK_SPACING_S
from slurm_rl.chain.scheduler import JobState
from slurm_rl.config.schema import Retention
from slurm_rl.launch.memory import MemoryJob
from slurm_rl.launch.memory_process import Effect, Process
from slurm_rl.storage.claims import read_claims
from slurm_rl.storage.control import clear_stops, read_control, write_budget
from slurm_rl.storage.intents import read_intents
from toy.faulty_fs import FaultyFs, StorageFault
from toy.hunt import describe
from toy.judge import Breach, Judge, slots_now
from toy.mirror_fs import MirrorFs, RecordsFs
from toy.strikes import HONEST, STRIKES, Scene
from toy.world import HABITS, ROLES, World, make_settings, record_effects

#: Virtual seconds after the last fault within which a run must be complete.
PATIENCE_S = 6_000.0
_VISIT_S = 150.0
#: One of every version, which asks a service, and one at both ends.
EVALS = {"judged": {"prompt_data": "none", "interval": 1}, "plain": {"prompt_data": "none"}}
#: How often a service that is down for half an hour is asked.
_LOOKS = 8
#: What a halt may say, if faults of such a kind struck.
_HALTS = {
    "attempts ended without a commit": 3,
    "jobs ended before they could look for work": 3,
    r"told to fail \(user\)": 1,
    "was cancelled by hand": 1,
}


@dataclass(frozen=True)
class Ground:
    """A kind of run. site: 0 plain; 1 with `preempt_send_user_signal`; 2 cannot tell a cancelled
    job from a preempted one; 3 cannot requeue. pools: the last shard has an array of its own.
    roles: there are a critic, a reference that moves and a teacher."""

    lag: int = 0
    shards: int = 1
    window: int = 3
    pack: str = "stage"
    login: bool = False
    site: int = 0
    num_iterations: int = 2
    score: bool = False
    evals: bool = False
    pools: bool = False
    roles: bool = False

    def make_world(self, folder: Path, fs: MirrorFs) -> World:
        shutil.rmtree(folder / "run", ignore_errors=True)
        (folder / "run").mkdir(parents=True)
        settings = make_settings(
            folder / "run",
            lag=self.lag,
            shards=self.shards,
            pools=self._pools(),
            decides=self.pools,
            rollout_batch_size=max(2, self.shards),
            window=self.window,
            pack=self.pack,
            submit_from="login" if self.login else "anywhere",
            num_rollout=self.num_iterations,
            max_attempts=4,
            retry_delay_s=5.0,
            retention=Retention(keep_last=2, gc_grace_s=30.0),
            score={"enabled": self.score},
            eval=EVALS if self.evals else {},
            **(ROLES if self.roles else {}),
        )
        habits = dataclasses.replace(
            HABITS,
            user_signal=self.site == 1,
            tells_cancel=self.site != 2,
            can_requeue=self.site != 3,
        )
        world = World(folder / "run", settings, habits=habits, fs=fs)
        fs.clock = world.cluster.clock
        return world

    def _pools(self) -> dict[str, dict[str, int]]:
        if not self.pools or self.shards == 1 or self.pack == "iteration":
            return {}
        return {"fixed": {"shards": self.shards - 1}, "spot": {"shards": 1}}


@dataclass(frozen=True)
class Blow:
    """A fault just before an effect. at: in thousandths of an undisturbed run and a half."""

    at: int = 0
    kind: str = "kill"
    size: int = 0


@dataclass(frozen=True)
class Schedule:
    ground: Ground = Ground()
    blows: tuple[Blow, ...] = ()

    def count(self, *kinds: str) -> int:
        return sum(blow.kind in kinds for blow in self.blows)


@dataclass
class Story:
    """What came of a run, for counting and for those who look for a fault."""

    lines: list[str] = field(default_factory=list)
    struck: list[str] = field(default_factory=list)
    halts: list[str] = field(default_factory=list)
    num_visits: int = 0
    ended_s: float = 0.0


class Chaos:
    """One run under one schedule."""

    def __init__(self, schedule: Schedule, folder: Path) -> None:
        self.schedule, self.story = schedule, Story()
        self.world = world = schedule.ground.make_world(folder, RecordsFs())
        num = len(schedule.blows)
        self.judge = Judge(
            world,
            max_submissions=2 + num + _LOOKS * schedule.count("outage"),
            max_ticks=2 + num,
            is_honest=lambda: set(self.story.struck) <= HONEST,
        )
        self.storage: list[StorageFault] = []
        if any(blow.kind.startswith("storage") for blow in schedule.blows):
            world.cluster.view = lambda process, fs: FaultyFs(fs, self.storage, process.node)
        total = num_effects(schedule.ground)
        self.due: dict[int, list[Blow]] = {}
        for blow in schedule.blows:
            self.due.setdefault(1 + blow.at * total * 3 // 2000, []).append(blow)
        self.num_effects = 0
        self.last_blow = self.start = world.cluster.now
        self.is_help_coming = False

    def run(self) -> Story:
        """To the end; raises Breach with the whole story if a rule is broken."""
        world = self.world
        world.cluster.before = self._on_effect
        world.shell()
        if self.schedule.ground.login:
            world.cluster.at(_VISIT_S, self._visit)
        try:
            while not self._is_over():
                self.judge.look()
                self._be_a_person()
                if world.cluster.now > max(self.last_blow, self.start) + PATIENCE_S:
                    raise Breach("not complete in time")
                if len(world.cluster.history) > 250:
                    raise Breach("jobs without end")
                if not world.cluster.step() and not self.is_help_coming:
                    raise Breach("nothing will ever happen again")
            self.judge.look()
            self.judge.check_end(undisturbed(self.schedule.ground))
            for reason in self.world.given_up().values():
                self._check_reason(reason, f"given up for no reason: {reason}")
        except AssertionError as error:
            raise Breach(self._tell(error)) from error
        self.story.ended_s = world.cluster.now - self.start
        return self.story

    def _is_over(self) -> bool:
        """Complete, and nothing left that moves; a held job may be left, if nobody looked since."""
        if not self.judge.is_complete() or self.is_help_coming or self.world.num_plans:
            return False
        return self.world.is_idle() or self.judge.is_stranded()

    def _on_effect(self, process: Process, effect: Effect) -> None:
        self.num_effects += 1
        for blow in self.due.pop(self.num_effects, ()):
            now = self.world.cluster.now
            where = f"{process.name} on {process.node}, before {effect.op} {effect.target[-60:]}"
            self.story.lines.append(f"{now - self.start:.0f} s: {blow.kind} {blow.size}: {where}")
            self.story.struck.append(blow.kind)
            self.last_blow = max(self.last_blow, now)
            STRIKES[blow.kind](Scene(self.world, process, blow.size, self.storage))
            self.last_blow = max(self.last_blow, self.world.cluster.now)

    # -- a person -----------------------------------------------------------------------------

    def _be_a_person(self) -> None:
        if self.is_help_coming or self.world.num_plans:
            return
        control, shell = self.judge.control_now(), self.world.shells[-1]
        if control.halt is not None:
            self._note_halt(control.halt.reason, control.halt.hint)
            self._help(60.0, self._resume)
        elif control.paused is not None:
            self._rule("by hand" in control.paused, f"paused: {control.paused}")
            self._help(60.0, self._resume)
        elif self.judge.is_complete():
            return
        elif not shell.alive and shell.exit_code != 0:
            self._help(30.0, self.world.shell)
        elif self.judge.is_stranded() and not self.schedule.ground.login:
            self._rule(self._may_strand(), "nothing leads on: no tick, no link, no process")
            self.story.num_visits += 1
            self._help(60.0, self.world.shell)

    def _visit(self) -> None:
        """Somebody, or cron, looks in; also after the end, when held jobs are still there."""
        if not self._is_over():
            if not self.judge.control_now().stopped:
                self.world.shell("visit")
            self.world.cluster.at(_VISIT_S, self._visit)

    def _help(self, delay_s: float, act: object) -> None:
        self.is_help_coming = True

        def arrive() -> None:
            self.is_help_coming = False
            act()  # type: ignore[operator]

        self.world.cluster.at(delay_s, arrive)

    def _resume(self) -> None:
        """`slurm-rl resume`: the cause is mended, every attempt counts anew."""
        world, control = self.world, read_control(self.world.run)
        forgiven = {}
        for name, slot in slots_now(world).items():
            claims = read_claims(world.run, slot)
            forgiven[name] = claims[-1].epoch if claims else 0
        for i in range(world.graph.num_iterations):
            for link in world.graph.links(i):
                intents = read_intents(world.run, link_folder(world.run, control, link))
                number = intents[-1].number if intents else 0
                name = str(link)
                forgiven[name] = max(number, forgiven.get(name, 0))
        write_budget(world.run, forgiven)
        clear_stops(world.run)
        world.shell("resume")

    def _note_halt(self, reason: str, hint: str) -> None:
        self.story.halts.append(reason)
        self._rule(bool(hint), f"a halt without a hint: {reason}")
        self._check_reason(reason, f"halted for no reason: {reason}")

    def _check_reason(self, reason: str, words: str) -> None:
        blows = len(self.story.struck)
        known = [n for pattern, n in _HALTS.items() if re.search(pattern, reason)]
        self._rule(bool(known) and blows >= known[0], words)

    def _may_strand(self) -> bool:
        """A run survives the loss of a tick; a schedule may take two, or the first one after a
        command while the second, which is submitted well apart by the next advance, is not there
        yet."""
        ticks = [j for j in self.world.cluster.history if j.is_tick and j.request.command]
        lost = [job for job in ticks if self._is_lost(job)]
        ages = [self.world.cluster.now - job.submitted for job in lost]
        is_first = len(ticks) == 1 or min(ages, default=1e9) <= TICK_SPACING_S + 2.0
        return len(lost) >= 2 or (len(lost) == 1 and is_first)

    def _is_lost(self, job: MemoryJob) -> bool:
        """Whether a fault took it: it was forgotten, held, or ended before it had done its work."""
        return job.exit_code != 0 and (
            job.state in (JobState.HELD, JobState.ENDED) or job not in self.world.cluster.jobs
        )

    def _rule(self, holds: bool, words: str) -> None:
        if not holds:
            raise Breach(words)

    def _tell(self, error: AssertionError) -> str:
        lines = [str(error), f"run_schedule({self.schedule})", *self.story.lines]
        return "\n".join([*lines, *self.world.last_words, describe(self.world)])


def run_schedule(schedule: Schedule, folder: Path) -> Story:
    """The run that a schedule says, from its beginning to its end."""
    return Chaos(schedule, folder).run()


def undisturbed(ground: Ground) -> dict[str, str]:
    """Digests of a run where nothing goes wrong: the same for every packing and site."""
    plain = Ground(
        lag=ground.lag,
        shards=ground.shards,
        num_iterations=ground.num_iterations,
        score=ground.score,
        evals=ground.evals,
        roles=ground.roles,
    )
    return _run_undisturbed(plain)[0]


def num_effects(ground: Ground) -> int:
    """Of an undisturbed run; about, since what changes few of them is left out of account."""
    alike = dataclasses.replace(ground, site=0, window=3, login=False, pools=False)
    return _run_undisturbed(alike)[1]


@functools.cache
def _run_undisturbed(ground: Ground) -> tuple[dict[str, str], int]:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    world = ground.make_world(folder, MirrorFs())  # `World.check` looks at real files
    effects = record_effects(world)
    world.shell()
    assert world.finish()
    world.check()
    shutil.rmtree(folder)
    return world.digests(), len(effects)
