"""A run's stages in one process: what the chain would start as jobs, called one after the other.

Owns orders and commits of that; what a stage does is its own.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slurm_rl.chain.graph import Graph, build_graph
from slurm_rl.config.schema import Settings
from slurm_rl.config.shaping import settings_digest
from slurm_rl.storage.commits import make_content, publish_commit, read_commit, resolve_input
from slurm_rl.storage.rundir import RunDir
from slurm_rl.types import Input, Order, Result, Slot, StageRef


class Run:
    """The stages of one run, with what is the same in all of them kept in memory: the engine, and
    the policy's trainer where it is the only model that Megatron holds."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self.run = RunDir(folder)
        self.graph: Graph = build_graph(settings)
        self._engine: Any = None
        self._trainer: Any = None
        kinds = {node.kind for node in self.graph.nodes}
        self._keeps_trainer = kinds == {"rollout", "train"}

    def rewards(self) -> Iterator[float]:
        """The mean reward of each rollout, which the caller takes as many of as it wants."""
        for iteration in range(self.graph.num_iterations):
            for node in self.graph.stages(iteration):
                result = self._work(StageRef(iteration, node.kind))
                if node.kind == "rollout":
                    yield mean_reward(result)

    def close(self) -> None:
        """Give up the trainer, so that there can be another one in this process."""
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None
            # It lies in circles, with its threads; a rollout would freeze them for ever.
            gc.collect()

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
        result = self._execute(order)
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
            result = program(order, self.settings)
            gc.collect()  # as in `close`
            return result
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
        """A committed stage as an input."""
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
    return round(total / number, 6)
