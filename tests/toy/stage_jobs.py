"""Rollout stages as processes of their own, as a Slurm job starts them, with a real SGLang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from slurm_rl.config.schema import Settings
from slurm_rl.rollout.samples import SampleBatch, read_samples
from slurm_rl.storage.durable import write_file
from slurm_rl.types import Order, Result, dump_record, parse_result
from toy.orders import weights_input
from toy.sglang_cpu import CPU_ARGUMENTS, CPU_ENVIRONMENT

NUM_PROMPTS, NUM_SAMPLES = 24, 3


def make_settings(folder: Path, python: str) -> Settings:
    """24 prompts of letters, three answers each; a copied first letter is rewarded."""
    prompts = folder / "prompts.jsonl"
    words = [chr(97 + i % 26) * (1 + i % 3) + "=" for i in range(NUM_PROMPTS)]
    prompts.write_text("\n".join(json.dumps({"prompt": word, "label": word}) for word in words))
    return Settings.model_validate(
        {
            "run": {"name": "run", "dir": str(folder)},
            "hf_checkpoint": "unused",
            "num_rollout": 1,
            "deterministic": True,
            "launcher": "local",
            "rollout": {
                "prompt_data": str(prompts),
                "label_key": "label",
                "rollout_batch_size": NUM_PROMPTS,
                "n_samples_per_prompt": NUM_SAMPLES,
                "rollout_max_response_len": 48,
                "rm_type": "prefix_match",
                "concurrency": NUM_SAMPLES,
                "sglang": {**CPU_ARGUMENTS, "enable_deterministic_inference": True},
                "sglang_env": CPU_ENVIRONMENT,
                "sglang_python": python,
                "server_start_timeout_s": 400.0,
            },
            "train": {"global_batch_size": 24},
        }
    )


class Stage:
    """A rollout stage in a directory of its own."""

    def __init__(self, root: Path, settings: Settings, weights: Path, *, num_shards: int) -> None:
        self.root = root
        self.num_shards = num_shards
        root.mkdir()
        self._settings_path = root / "resolved.json"
        self._settings_path.write_text(settings.model_dump_json())
        self._weights = weights_input(weights, root / "init")

    def start(
        self, shard: int, *, attempt: int, earlier: Sequence[Path] = ()
    ) -> tuple[Path, subprocess.Popen[bytes]]:
        """Start a shard's program; its folder and its process."""
        slot = self.root / "rollout.t0"
        if self.num_shards > 1:
            slot = slot / f"shard-{shard:04d}"
        folder = slot / f"a{attempt:04d}-{shard}"
        folder.mkdir(parents=True)
        order = Order(
            run_dir=str(self.root),
            run_id="run",
            kind="rollout",
            iteration=0,
            timeline=0,
            attempt_dir=str(folder),
            settings_path=str(self._settings_path),
            code_dir="",
            inputs={"weights": self._weights},
            shard=shard,
            num_shards=self.num_shards,
            earlier_attempts=[str(path) for path in earlier],
        )
        write_file(folder / "order.json", dump_record(order))
        return folder, start_rank(folder, 0)


def start_rank(folder: Path, rank: int) -> subprocess.Popen[bytes]:
    """One process of the job whose order lies in `folder`."""
    with open(folder / f"rank-{rank}.log", "wb") as log:
        command = [sys.executable, "-m", "slurm_rl.stages", str(folder / "order.json")]
        return subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, "RANK": str(rank)}
        )


def finish(folder: Path, process: subprocess.Popen[bytes]) -> Result:
    assert process.wait(timeout=500) == 0, (folder / "rank-0.log").read_text()[-3000:]
    return parse_result((folder / "result.json").read_bytes())


def read_batch(*folders: Path) -> SampleBatch:
    return read_samples([folder / "samples.safetensors" for folder in folders])
