"""Learning curves of every algorithm on the quickstart's task, and the page that shows them.

    python tools/learning_curves.py [NAME …]     runs what docs/learning.json does not have yet
    python tools/learning_curves.py --plot       docs/learning.svg, and the table of docs/learning.md
    python tools/learning_curves.py --list       the algorithms with their settings

A run is the quickstart with other settings: the stages of its graph, one after the other in this
one process, in a directory that is deleted afterwards. It ends as soon as a rollout's mean reward
is at the target, or with its budget. Each reward is written down as it comes; a tool that was
killed leaves out the runs that had ended and begins the one that had not again, which gives the
same rewards, since all runs are deterministic.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from slurm_rl.chain.graph import Graph, build_graph
from slurm_rl.config.load import load_settings
from slurm_rl.config.schema import Settings
from slurm_rl.config.shaping import settings_digest
from slurm_rl.storage.commits import make_content, publish_commit, read_commit, resolve_input
from slurm_rl.storage.durable import write_file
from slurm_rl.storage.rundir import RunDir
from slurm_rl.types import Input, Order, Result, Slot, StageRef

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "quickstart.yaml"
RESULTS, PLOT, PAGE = (ROOT / "docs" / f"learning.{kind}" for kind in ("json", "svg", "md"))

TARGET = 0.9
TEACHER = ROOT / "runs" / "learning-teacher"
TEACHER_TARGET = 0.97
SEEDS = (1, 2, 3)
#: What all runs have in place of the quickstart's: an iteration of a quarter of the samples.
SHARED = (
    "rollout.rollout_batch_size=64",
    "rollout.n_samples_per_prompt=8",
    "train.global_batch_size=64",
)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """settings: what differs from the shared ones, as for `slurm-rl submit --set`; in them
    `{teacher}` stands for a model that was trained before. budget: updates in which the target is
    to be reached. why: what the settings are owed to."""

    name: str
    settings: tuple[str, ...] = ()
    budget: int = 30
    why: str = ""

    def overrides(self, *, seed: int, folder: Path, teacher: Path) -> list[str]:
        """All settings of a run in `folder`. One rollout more than updates: it shows the last."""
        own = [item.replace("{teacher}", str(teacher)) for item in self.settings]
        run = [f"seed={seed}", f"run.dir={folder}", f"num_rollout={self.budget + 1}"]
        return [*SHARED, *own, *run]

    def recorded(self) -> list[str]:
        """What a run's rewards depend on besides its seed."""
        return [*SHARED, *self.settings]

    @property
    def has_teacher(self) -> bool:
        return any("{teacher}" in item for item in self.settings)


_CRITIC = (
    "train.advantage_estimator=gae",
    "train.lambd=0.95",
    "train.normalize_advantages=true",
    "critic.global_batch_size=64",
    "critic.micro_batch_size=64",
    "critic.megatron.lr=5e-3",
    "critic.megatron.clip_grad=1.0",
)
_DISTILLATION = ("teacher.hf_checkpoint={teacher}", "teacher.use_rewards=false")

#: The first is also what the teacher of the distillations is trained by.
ALGORITHMS = (
    Algorithm("grpo"),
    Algorithm(
        "dr_grpo",
        (
            "train.normalize_advantages_std=false",
            "train.loss_aggregation=constant",
            "train.loss_constant_length=2",
        ),
    ),
    Algorithm(
        "dapo",
        (
            "train.loss_aggregation=token",
            "train.eps_clip_high=0.28",
            "rollout.dynamic_sampling_filter_path=nonzero_std",
        ),
        why="clip as in the paper; the reward is that of all groups, dropped ones too",
    ),
    Algorithm("rloo", ("train.advantage_estimator=rloo",)),
    Algorithm("reinforce_plus_plus", ("train.advantage_estimator=reinforce_plus_plus",)),
    Algorithm(
        "reinforce_plus_plus_baseline",
        ("train.advantage_estimator=reinforce_plus_plus_baseline",),
    ),
    Algorithm(
        "gspo", ("train.policy_loss=gspo", "train.eps_clip=3e-4", "train.eps_clip_high=4e-4")
    ),
    Algorithm(
        "cispo", ("train.policy_loss=cispo", "train.eps_clip=1.0", "train.eps_clip_high=3.0")
    ),
    Algorithm("pg", ("train.policy_loss=pg",)),
    Algorithm("ppo", _CRITIC),
    Algorithm("ppo_kl_reward", (*_CRITIC, "train.kl_coef=0.01")),
    Algorithm("grpo_kl_loss", ("train.use_kl_loss=true", "train.kl_loss_coef=0.01")),
    Algorithm("distillation", _DISTILLATION),
    Algorithm("distillation_top_k", (*_DISTILLATION, "teacher.top_logprobs_num=4")),
    Algorithm("lag_tis", ("chain.lag=1", "train.use_tis=true")),
    Algorithm(
        "epochs",
        ("train.global_batch_size=null", "train.minibatches=4", "train.epochs=2"),
    ),
)
NAMES = tuple(algorithm.name for algorithm in ALGORITHMS)


class Run:
    """The stages of one run, with what is the same in all of them kept in memory: the engine, and
    the policy's trainer where it is the only model that Megatron holds."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self.run = RunDir(folder)
        self.graph: Graph = build_graph(settings)
        self.timings: dict[str, float] = {}
        self._engine: Any = None
        self._trainer: Any = None
        kinds = {node.kind for node in self.graph.nodes}
        self._keeps_trainer = kinds == {"rollout", "train"}

    def rewards(self) -> Iterator[float]:
        """The mean reward of each rollout, which the caller takes as many of as it wants."""
        try:
            for iteration in range(self.graph.num_iterations):
                for node in self.graph.stages(iteration):
                    result = self._work(StageRef(iteration, node.kind))
                    if node.kind == "rollout":
                        yield mean_reward(result)
        finally:
            if self._trainer is not None:
                self._trainer.close()

    def _work(self, ref: StageRef) -> Result:
        slot = Slot(ref.iteration, ref.kind, 0)
        attempt = self.run.slot_dir(slot) / "attempt"
        attempt.mkdir(parents=True)
        parents = self.graph.parents(ref)
        order = Order(
            run_dir=str(self.run.root),
            run_id="learning-curves",
            kind=ref.kind,
            iteration=ref.iteration,
            timeline=0,
            attempt_dir=str(attempt),
            settings_path="",
            code_dir="",
            inputs={role: self.resolve(role, parent) for role, parent in parents.items()},
        )
        began = time.monotonic()
        result = self._execute(order)
        self.timings[ref.kind] = self.timings.get(ref.kind, 0.0) + time.monotonic() - began
        content = make_content(
            slot,
            result,
            parents={role: entry.digest for role, entry in order.inputs.items()},
            settings_digest=settings_digest(self.settings),
        )
        assert publish_commit(self.run, slot, content=content, provenance={"attempt": "attempt"})
        return result

    def _execute(self, order: Order) -> Result:
        from slurm_rl.stages.__main__ import PROGRAMS

        module, name = PROGRAMS[order.kind]
        program: Callable[..., Result] = getattr(importlib.import_module(module), name)
        if order.kind == "rollout":
            return program(order, self.settings, engine=self._started_engine(order))
        if order.kind != "train" or not self._keeps_trainer:
            return program(order, self.settings)
        from slurm_rl.stages.train import open_trainer, train_iteration

        if self._trainer is None:
            self._trainer = open_trainer(order, self.settings)
        return train_iteration(self._trainer, order)

    def _started_engine(self, order: Order) -> Any:
        if self._engine is None:
            from transformers import AutoTokenizer

            from slurm_rl.rollout.embedded import EmbeddedEngine

            weights = Path(order.input("weights").path) / "weights"
            tokenizer = AutoTokenizer.from_pretrained(weights, local_files_only=True)
            self._engine = EmbeddedEngine(tokenizer, num_threads=1)
        return self._engine

    def resolve(self, role: str, ref: StageRef) -> Input:
        slot = Slot(ref.iteration, ref.kind, 0)
        commit = read_commit(self.run, slot)
        assert commit is not None
        return resolve_input(self.run, role, ref, slot, commit)


def mean_reward(result: Result) -> float:
    """The mean over all groups that were made, also those that a filter dropped since all their
    rewards were the same: it names that reward."""
    kept = float(result.content["num_groups"])
    total = result.metrics["rollout/raw_reward"] * kept
    number = kept
    for reason, count in result.content["dropped"].items():
        total += float(reason.removeprefix("zero_std_")) * count
        number += count
    return total / number


@dataclass(frozen=True, slots=True)
class Curve:
    """What is known of one run: the settings that it was made with, the mean reward of each of its
    rollouts, the first from before any update, and the CPU time that it took."""

    settings: list[str]
    rewards: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    made_on: str = ""

    def updates(self) -> int | None:
        """Updates after which the mean reward was at the target; None if it never was."""
        return next((i for i, reward in enumerate(self.rewards) if reward >= TARGET), None)

    def is_over(self, algorithm: Algorithm) -> bool:
        """Whether the run is of these settings, and reached the target or the budget's end."""
        is_whole = self.updates() is not None or len(self.rewards) > algorithm.budget
        return is_whole and self.settings == algorithm.recorded()


#: Name of the algorithm -> seed -> what is known of that run.
Curves = dict[str, dict[int, Curve]]


def parse_curves(text: str) -> Curves:
    """Curves as `render_curves` writes them."""
    return {
        name: {int(seed): Curve(**curve) for seed, curve in seeds.items()}
        for name, seeds in json.loads(text).items()
    }


def render_curves(curves: Curves) -> str:
    """JSON, algorithms in the table's order; those that it does not have any more are left out."""
    kept = {name: curves[name] for name in NAMES if name in curves}
    document = {
        name: {str(seed): dataclasses.asdict(seeds[seed]) for seed in sorted(seeds)}
        for name, seeds in kept.items()
    }
    # A list of numbers is one line.
    text = json.dumps(document, indent=1)
    return re.sub(r"\[[^\[\]]*\]", lambda found: " ".join(found[0].split()), text) + "\n"


def missing_runs(curves: Curves, names: Sequence[str] = NAMES) -> list[tuple[Algorithm, int]]:
    """The runs that are still to be made: not begun, killed, or of other settings."""
    return [
        (algorithm, seed)
        for algorithm in ALGORITHMS
        if algorithm.name in names
        for seed in SEEDS
        if not curves.get(algorithm.name, {}).get(seed, Curve([])).is_over(algorithm)
    ]


def read_curves(path: Path) -> Curves:
    return parse_curves(path.read_text()) if path.exists() else {}


def make_curves(path: Path, names: Sequence[str]) -> None:
    """Make the runs that are missing; `path` has each reward as soon as there is one."""
    curves = read_curves(path)
    for algorithm, seed in missing_runs(curves, names):
        began = time.process_time()
        rewards: list[float] = []
        for reward in train(algorithm, seed=seed):
            rewards.append(round(reward, 6))
            cpu_s = round(time.process_time() - began, 1)
            curve = Curve(algorithm.recorded(), list(rewards), cpu_s, describe_machine())
            curves.setdefault(algorithm.name, {})[seed] = curve
            write_file(path, render_curves(curves).encode())
            print(
                f"{algorithm.name} seed {seed} update {len(rewards) - 1}: {reward:.4f}", flush=True
            )
        print(f"{algorithm.name} seed {seed}: {curve.updates()} updates, {cpu_s:.0f} s of CPU")


def train(algorithm: Algorithm, *, seed: int, until: float = TARGET) -> Iterator[float]:
    """The mean reward of each rollout until one is at `until`, or the budget is used up."""
    teacher = make_teacher() if algorithm.has_teacher else Path()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        overrides = algorithm.overrides(seed=seed, folder=folder, teacher=teacher)
        run = Run(load_settings(CONFIG, overrides), folder / "run")
        with contextlib.closing(run.rewards()) as rewards:
            for reward in rewards:
                yield reward
                if reward >= until:
                    return


def make_teacher() -> Path:
    """A model that was trained with another seed until it was better than the target."""
    if TEACHER.exists():
        return TEACHER
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        overrides = ALGORITHMS[0].overrides(seed=0, folder=folder, teacher=folder)
        run = Run(load_settings(CONFIG, overrides), folder / "run")
        with contextlib.closing(run.rewards()) as rewards:
            best = next(i for i, reward in enumerate(rewards) if reward >= TEACHER_TARGET)
        weights = run.resolve("weights", run.graph.weights(best))
        shutil.copytree(Path(weights.path) / "weights", TEACHER.with_suffix(".new"))
    TEACHER.with_suffix(".new").rename(TEACHER)
    return TEACHER


def describe_machine() -> str:
    """Processor and versions, as the page states them."""
    packages = [f"{name} {metadata.version(name)}" for name in ("torch", "megatron-core")]
    models = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    processor = models[0].strip() if models else platform.machine()
    return ", ".join([processor, f"Python {platform.python_version()}", *packages])


def render_table(curves: Curves) -> str:
    """A row an algorithm: settings, budget, and the updates of each seed."""
    rows = ["| | settings | budget | updates to target |", "|---|---|---|---|"]
    for algorithm in ALGORITHMS:
        seeds = curves.get(algorithm.name, {})
        found = [seeds[seed].updates() if seed in seeds else None for seed in SEEDS]
        updates = ", ".join("–" if number is None else str(number) for number in found)
        settings = "<br>".join(f"`{item}`" for item in algorithm.settings) or "–"
        rows.append(f"| {algorithm.name} | {settings} | {algorithm.budget} | {updates} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    options = parser.parse_args()
    make_curves(RESULTS, options.names or NAMES)


if __name__ == "__main__":
    main()
