"""The same iterations in one process that never exits: the oracle of the equality test.

Init once; then one engine and one trainer, used over and over, with no checkpoint loaded after the
first. It writes commits with the same content as a chain's, so that their digests can be compared.

    python single_process.py CONFIG FOLDER      prints {"i0000.rollout": digest, …} as JSON
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from slurm_rl.chain.graph import Graph, build_graph
from slurm_rl.config.load import load_config
from slurm_rl.config.schema import Settings
from slurm_rl.config.shaping import settings_digest
from slurm_rl.rollout.embedded import EmbeddedEngine
from slurm_rl.stages.init import run_init
from slurm_rl.stages.rollout import run_rollout
from slurm_rl.stages.train import open_trainer, train_iteration
from slurm_rl.storage.commits import make_content, publish_commit, read_commit, resolve_input
from slurm_rl.storage.rundir import RunDir
from slurm_rl.types import Input, Order, Result, Slot, StageRef


class OneProcess:
    """The stages of a run, one after the other, with what they hold kept in memory."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self.run = RunDir(folder)
        self.graph: Graph = build_graph(settings)
        self.digests: dict[str, str] = {}
        self._engine: Any = None
        self._trainer: Any = None

    def work(self) -> dict[str, str]:
        """Every stage of every iteration; their content digests."""
        for iteration in range(self.graph.num_iterations):
            for node in self.graph.stages(iteration):
                self._run_stage(StageRef(iteration, node.kind))
        return self.digests

    def _run_stage(self, ref: StageRef) -> None:
        slot = Slot(ref.iteration, ref.kind, 0)
        attempt = self.run.slot_dir(slot) / "attempt"
        attempt.mkdir(parents=True)
        inputs = {role: self._resolve(role, r) for role, r in self.graph.parents(ref).items()}
        order = Order(
            run_dir=str(self.run.root),
            run_id="one-process",
            kind=ref.kind,
            iteration=ref.iteration,
            timeline=0,
            attempt_dir=str(attempt),
            settings_path="",
            code_dir="",
            inputs=inputs,
        )
        content = make_content(
            slot,
            self._execute(order),
            parents={role: entry.digest for role, entry in inputs.items()},
            settings_digest=settings_digest(self.settings),
        )
        assert publish_commit(self.run, slot, content=content, provenance={"attempt": "attempt"})
        commit = read_commit(self.run, slot)
        assert commit is not None
        self.digests[str(ref)] = commit.digest

    def _execute(self, order: Order) -> Result:
        if order.kind == "init":
            return run_init(order, self.settings)
        if order.kind == "rollout":
            return run_rollout(order, self.settings, engine=self._started_engine(order))
        if self._trainer is None:
            self._trainer = open_trainer(order, self.settings)
        return train_iteration(self._trainer, order)

    def _started_engine(self, order: Order) -> Any:
        if self._engine is None:
            from transformers import AutoTokenizer

            weights = Path(order.input("weights").path) / "weights"
            tokenizer = AutoTokenizer.from_pretrained(weights, local_files_only=True)
            threads = self.settings.rollout.embedded_threads
            self._engine = EmbeddedEngine(tokenizer, num_threads=threads)
        return self._engine

    def _resolve(self, role: str, ref: StageRef) -> Input:
        slot = Slot(ref.iteration, ref.kind, 0)
        commit = read_commit(self.run, slot)
        assert commit is not None
        return resolve_input(self.run, role, ref, slot, commit)


def main() -> None:
    settings = load_config(Path(sys.argv[1])).settings
    print(json.dumps(OneProcess(settings, Path(sys.argv[2])).work()))


if __name__ == "__main__":
    main()
