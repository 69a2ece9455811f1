"""A run with toy stages on an in-memory cluster, and what must hold of it in the end."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_rl.chain.advance import Ask, Chain, advance
from slurm_rl.chain.evals import Evals, read_evals
from slurm_rl.chain.gc import Keeper, collect_quietly
from slurm_rl.chain.graph import Graph, build_graph
from slurm_rl.chain.observe import read_current
from slurm_rl.chain.view import Spec
from slurm_rl.config.schema import Settings
from slurm_rl.errors import SlurmRlError, StorageError
from slurm_rl.launch.build import make_spec
from slurm_rl.launch.duty import Timing
from slurm_rl.launch.job import make_job
from slurm_rl.launch.memory import Habits, MemoryCluster
from slurm_rl.launch.memory_process import Effect, Process
from slurm_rl.launch.stage_settings import StageSettings
from slurm_rl.launch.supervisor import Supervisor
from slurm_rl.launch.tick import tick_life
from slurm_rl.storage.control import Control, read_control
from slurm_rl.storage.evals import read_given_up
from slurm_rl.storage.fs import Fs, PosixFs
from slurm_rl.storage.rundir import RunDir, RunIdentity, create_run, filesystem_now
from slurm_rl.types import Commit, Slot, StageRef
from toy.kept_path import KeptPath
from toy.runner import ToyRunner

DEADLINE_S = 90.0
TIMING = Timing(
    lease_s=20.0, heartbeat_s=5.0, poll_s=1.0, wait_s=200.0, stop_grace_s=10.0, visible_s=45.0
)
HABITS = Habits(requeue_delay_s=30.0, min_job_age_s=60.0, grace_s=10.0)


class FastFs(PosixFs):
    """The real file system without fsync: here nobody pulls the plug."""

    def fsync(self, path: Path) -> None:
        if not path.exists():
            raise FileNotFoundError(path)

    def fsync_dir(self, path: Path) -> None:
        self.fsync(path)


@dataclass(frozen=True)
class WorldFs(FastFs):
    """As the one before, with the cluster's clock for its own."""

    clock: Callable[[], float]

    def now(self, folder: Path) -> float:
        if not folder.exists():
            raise FileNotFoundError(folder)
        return self.clock()


def make_settings(root: Path, **changes: object) -> Settings:
    """Settings of a small toy run. `shards`, `pack`, … are named as in the sections."""
    chain_names = (
        "pack", "lag", "window", "max_attempts", "max_stops", "tick_s", "retry_delay_s", "exclude_s",
        "budget",
    )  # fmt: skip
    chain = {name: changes.pop(name) for name in chain_names if name in changes}
    rollout_names = ("shards", "pools", "rollout_batch_size")
    rollout = {name: changes.pop(name) for name in rollout_names if name in changes}
    if changes.pop("decides", False):
        rollout["env"] = {"TOY_DECIDES": 1}
    return Settings.model_validate(
        {
            "run": {"name": "toy", "dir": str(root)},
            "num_rollout": 2,
            "hf_checkpoint": "none",
            "deterministic": True,
            "chain": {"tick_s": 300.0, "submit_deadline_s": DEADLINE_S, **chain},
            "rollout": {
                "prompt_data": "none",
                "rollout_batch_size": 2,
                "n_samples_per_prompt": 2,
                **rollout,
            },
            "train": {"global_batch_size": 4},
            **changes,
        }
    )


#: Changes of `make_settings` that give a run every role.
ROLES: dict[str, Any] = {
    "train": {"global_batch_size": 4, "advantage_estimator": "gae", "kl_coef": 0.1},
    "critic": {},
    "reference": {"ema": 0.5},
    "teacher": {"hf_checkpoint": "none"},
}


class World:
    """One run, its cluster, and the processes that a person starts."""

    def __init__(
        self,
        root: Path,
        settings: Settings,
        *,
        habits: Habits = HABITS,
        fits: Callable[[str, str], bool] = lambda have, need: True,
        supervisor_class: type[Supervisor] = Supervisor,
        fs: Fs | None = None,
    ) -> None:
        self.settings = settings
        self.fits = fits
        self.supervisor_class = supervisor_class
        self.cluster = MemoryCluster(self._program, habits=habits)
        self.cluster.fs = fs or WorldFs(self.cluster.clock)
        self.run = RunDir(KeptPath(root / "toy"), fs or FastFs())
        identity = RunIdentity(
            run_id="abcdef0123456789",
            name="toy",
            created=0.0,
            owner="me",
            code_version="0",
            settings=settings.model_dump(mode="json"),
            config_text="",
        )
        create_run(self.run, identity)
        self.graph: Graph = build_graph(settings)
        self.spec: Spec = make_spec(settings, identity.short_id)
        self.shells: list[Process] = []
        self.deadlines: dict[str, float] = {}
        self.num_plans = 0
        self.asks: dict[str, Ask] = {}
        self.on_step: Callable[[], object] = lambda: None
        self.check_space: Callable[[RunDir, Slot, Control], None] = lambda run, slot, control: None
        self.skew_s: dict[str, float] = {}  # node -> how far its clock is ahead
        self.last_words: list[str] = []  # what processes that failed said, a line each

    # -- processes ----------------------------------------------------------------------------

    def chain(self, process: Process) -> Chain:
        """The chain as a process sees it."""
        run = RunDir(self.run.root, process.fs())
        scheduler = process.scheduler("toy")
        may_submit = process.node == "login" or self.spec.submits
        return Chain(
            run,
            self.graph,
            self.spec,
            scheduler,
            clock=functools.partial(filesystem_now, run),
            exact_clock=functools.partial(run.fs.now, run.control_dir),
            may_submit=may_submit,
            asks=self.asks,
        )

    def keeper(self, process: Process) -> Keeper:
        """What garbage collection in a process works with."""
        return Keeper(
            run=RunDir(self.run.root, process.fs()),
            graph=self.graph,
            rules=self.settings.retention,
            window=self.spec.window,
            clock=self.cluster.clock,
        )

    def shell(self, name: str = "submit") -> Process:
        """A process on the login node that advances once."""
        process = Process(self.cluster, name=name)
        self.shells.append(process)
        self.cluster.start_process(process, self._program(process))
        return process

    def start_visitor(self, name: str) -> None:
        """Somebody else advances once, and does not come back if that fails."""
        process = Process(self.cluster, name=name)
        self.cluster.start_process(process, self._program(process))

    def later(self, delay_s: float, action: Callable[[], object]) -> None:
        """What a person means to do in a while; the run is not over before."""

        def act() -> None:
            self.num_plans -= 1
            action()

        self.num_plans += 1
        self.cluster.at(delay_s, act)

    def _advance_once(self, process: Process) -> Generator[float, None, int]:
        outcome = advance(self.chain(process))
        return 0 if outcome.is_settled else 1
        yield 0.0

    def _program(self, process: Process) -> Generator[float, None, int]:
        """A process as its entry point makes it: an error is one line and an exit status."""
        try:
            return (yield from self._life(process))
        except SlurmRlError as error:
            self.last_words.append(f"{process.name}: {error}")
            return error.exit_code
        except OSError as error:
            self.last_words.append(f"{process.name}: {error}")
            return StorageError.exit_code

    def _life(self, process: Process) -> Generator[float, None, int]:
        if not process.command:
            return self._advance_once(process)
        if process.command[0] == "tick":
            collect = functools.partial(collect_quietly, self.keeper(process))
            return tick_life(self.chain(process), process.name, collect=collect)
        return self._link(process)

    def _link(self, process: Process) -> Generator[float, None, int]:
        supervisor = self._make_supervisor(process)
        return (yield from supervisor.run())

    def _make_supervisor(self, process: Process) -> Supervisor:
        env = {"SLURM_JOB_ID": process.job_id}
        if process.task is not None:
            env["SLURM_ARRAY_JOB_ID"] = process.job_id.partition("_")[0]
            env["SLURM_ARRAY_TASK_ID"] = str(process.task)
        intent = self.run.root / process.command[2]
        job = make_job(self.graph, intent, process.name, env)
        job.node = process.node

        def stop(reason: str) -> None:
            job.stop = job.stop or reason

        process.on_stop = stop
        chain = self.chain(process)
        run = chain.run
        return self.supervisor_class(
            chain=chain,
            job=job,
            intent=intent,
            runner=ToyRunner(process),
            run_id="abcdef0123456789",
            settle=lambda control, ref: StageSettings(str(self.run.settings_path), "xxh3:toy"),
            timing=TIMING,
            check_space=functools.partial(self.check_space, run),
            monotonic=lambda: self.cluster.now + self.skew_s.get(process.node, 0.0),
            deadlines=self.deadlines,
            fits=lambda kind: self.fits(job.link.job_kind, kind),
        )

    # -- driving ------------------------------------------------------------------------------

    def finish(self, *, limit_s: float = 20_000.0) -> bool:
        """Let the cluster go on until nothing is left to do; whether the run is complete.

        A person whose command was killed, or failed, types it again.
        """
        deadline = self.cluster.now + limit_s
        self.cluster.run_until(self.is_over, limit_s=limit_s)
        while self.shells[-1].exit_code != 0 and self.cluster.now < deadline:
            self.cluster.run_for(30.0)
            self.shell()
            self.cluster.run_until(self.is_over, limit_s=deadline - self.cluster.now)
        return self.is_complete()

    def is_over(self) -> bool:
        """Nothing left to do, or jobs without end. Asked after every step of the cluster."""
        self.on_step()
        return self.is_idle() or len(self.cluster.history) > 150

    def is_idle(self) -> bool:
        ours = [job for job in self.cluster.live_jobs() if job.request.command]
        return not ours and not self.cluster.has_work() and not self.num_plans

    def is_complete(self) -> bool:
        evals = self.evals()
        return self.is_trained() and all(evals.is_settled(ref) for ref in self.wanted_evals())

    def is_trained(self) -> bool:
        return all(self.commit(ref) is not None for ref in self.stages())

    def evals(self) -> Evals:
        control = read_control(self.run)
        return read_evals(self.run, self.graph, control, head=self.graph.num_iterations)

    def wanted_evals(self) -> list[StageRef]:
        """Every evaluation that is due in the end, or was wished for."""
        return list(self.evals().wanted(0, self.graph.num_iterations))

    def given_up(self) -> dict[str, str]:
        """Evaluations that were given up, and why."""
        evals = self.evals()
        found = {
            str(ref): read_given_up(self.run, evals.control, evals.slot(ref))
            for ref in self.wanted_evals()
        }
        return {name: gone.reason for name, gone in found.items() if gone is not None}

    def stages(self) -> list[StageRef]:
        return [
            StageRef(i, node.kind)
            for i in range(self.graph.num_iterations)
            for node in self.graph.stages(i)
        ]

    def commit(self, ref: StageRef) -> Commit | None:
        return read_current(self.run, self.graph, read_control(self.run), ref)

    def digests(self) -> dict[str, str]:
        """Content digest of every stage on the current timelines, evaluations included."""
        refs = [*self.stages(), *self.wanted_evals()]
        commits = {str(ref): self.commit(ref) for ref in refs}
        return {name: commit.digest for name, commit in commits.items() if commit is not None}

    # -- what must hold -----------------------------------------------------------------------

    def check(self, *, may_fail: bool = False) -> None:
        """Nothing crashed, halted or (unless it may) failed; every slot, intent and job is sound."""
        for process, error in self.cluster.crashes:
            raise AssertionError(f"{process.name} crashed") from error
        assert read_control(self.run).halt is None
        self._check_slots(may_fail)
        self._check_jobs()

    def _check_slots(self, may_fail: bool) -> None:
        """Who says that he committed did, and nobody else."""
        for end in self.run.root.glob("iterations/**/ended.json"):
            said = json.loads(end.read_bytes())
            assert may_fail or said["outcome"] != "failed", said
            names = [path.read_bytes() for path in end.parent.parent.glob("claim.*")]
            token = end.parent.name.partition("-")[2].encode()
            assert any(token in name for name in names), f"{end}: an attempt without its claim"
            if said["outcome"] == "committed":
                commit = json.loads((end.parent.parent / "COMMIT").read_bytes())
                assert commit["provenance"]["attempt"] == end.parent.name, f"{end}: did not win"

    def _check_jobs(self) -> None:
        """Every job has its intent, each intent one job at most, and 0 means a commit."""
        tokens = [
            json.loads(path.read_bytes())["token"]
            for path in self.run.root.glob("iterations/*/**/submit.*")
            if re.fullmatch(r"submit\.\d+", path.name)
        ]
        links = [job for job in self.cluster.history if job.request.stages]
        names = {(job.request.name.rpartition(".")[2], job.task) for job in links}
        assert len(names) == len(links), "a token was submitted twice"
        assert {token for token, _ in names} <= set(tokens), "a job without its intent"
        for job in links:
            if job.exit_code == 0:
                commits = [self.commit(ref) for ref in job.request.stages]
                assert None not in commits or job.task is not None, f"{job.request.name} lied"

    def num_claims(self) -> int:
        """The most claims that any slot has."""
        folders = Counter(path.parent for path in self.run.root.glob("iterations/**/claim.*"))
        return max(folders.values())

    def num_cancelled(self) -> int:
        """Link jobs that the chain cancelled."""
        jobs = self.cluster.history
        return sum(job.raw == "CANCELLED" for job in jobs if job.request.stages)

    def num_submissions(self) -> Counter[str]:
        """Submissions of each link, by the numbers of their intents."""
        found: Counter[str] = Counter()
        for path in self.run.root.glob("iterations/*/**/submit.*"):
            if re.fullmatch(r"submit\.\d+", path.name):
                found[str(path.parent.relative_to(self.run.root / "iterations"))] += 1
        return found


def with_spec(world: World, **changes: object) -> World:
    """`world` with another planning spec."""
    world.spec = dataclasses.replace(world.spec, **changes)  # type: ignore[arg-type]
    return world


def record_effects(world: World) -> list[tuple[Process, Effect]]:
    """Every effect from now on, as it happens."""
    seen: list[tuple[Process, Effect]] = []
    world.cluster.before = lambda process, effect: seen.append((process, effect))
    return seen
