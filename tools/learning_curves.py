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
import dataclasses
import importlib
import json
import os
import platform
import re
import sys
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
from slurm_rl.storage.durable import publish
from slurm_rl.storage.rundir import RunDir
from slurm_rl.types import Input, Order, Result, Slot, StageRef

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "quickstart.yaml"
RESULTS, PLOT, PAGE = (ROOT / "docs" / f"learning.{kind}" for kind in ("json", "svg", "md"))

TARGET = 0.9
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


ALGORITHMS = (
    Algorithm("grpo"),
)


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
            inputs={role: self._resolve(role, parent) for role, parent in parents.items()},
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

    def _resolve(self, role: str, ref: StageRef) -> Input:
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


if __name__ == "__main__":
    a = ALGORITHMS[0]
    with tempfile.TemporaryDirectory() as t:
        s = load_settings(CONFIG, a.overrides(seed=1, folder=Path(t), teacher=Path(t)) + sys.argv[1:])
        r = Run(s, Path(t) / "run")
        t0 = time.monotonic(); c0 = time.process_time()
        for i, x in enumerate(r.rewards()):
            print(i, round(x, 4), round(time.monotonic() - t0, 1), round(time.process_time()-c0,1), {k: round(v, 2) for k, v in r.timings.items()}, flush=True)
            if x > TARGET: break
