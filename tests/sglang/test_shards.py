"""Two shards with a real SGLang server each, one of which is killed half way.

Each shard is a process of its own, as a Slurm array task starts it. The one that is killed loses its
server too; the other does what it left; its next attempt finds all of it in the journals and starts
no server. The samples are those of one undisturbed shard.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from toy.orders import weights_input
from toy.sglang_cpu import CPU_ARGUMENTS, CPU_ENVIRONMENT

from slurm_rl.config.schema import Settings
from slurm_rl.rollout.samples import SampleBatch, read_samples
from slurm_rl.storage.commits import assemble
from slurm_rl.storage.durable import write_file
from slurm_rl.types import JOURNAL_NAME, Commit, Order, Result, dump_record, parse_result

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(580)]

NUM_PROMPTS, NUM_SAMPLES = 24, 3


class Stage:
    """A rollout stage in a directory of its own."""

    def __init__(self, root: Path, settings: Settings, weights: Path, *, num_shards: int) -> None:
        self.root = root
        self.num_shards = num_shards
        root.mkdir()
        self._settings_path = root / "resolved.json"
        self._settings_path.write_text(settings.model_dump_json())
        self._weights = weights_input(weights, root / "init")

    def start(self, shard: int, *, attempt: int, earlier: list[Path] | None = None):  # type: ignore[no-untyped-def]
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
            earlier_attempts=[str(path) for path in earlier or []],
        )
        write_file(folder / "order.json", dump_record(order))
        with open(folder / "rank-0.log", "wb") as log:
            command = [sys.executable, "-m", "slurm_rl.stages", str(folder / "order.json")]
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "RANK": "0"}
            )
        return folder, process


def finish(folder: Path, process: subprocess.Popen[bytes]) -> Result:
    assert process.wait(timeout=500) == 0, (folder / "rank-0.log").read_text()[-3000:]
    return parse_result((folder / "result.json").read_bytes())


def read_batch(*folders: Path) -> SampleBatch:
    return read_samples([folder / "samples.safetensors" for folder in folders])


def wait_for_lines(folder: Path, num: int, *processes: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline:
        journal = folder / JOURNAL_NAME
        if journal.exists() and journal.read_bytes().count(b"\n") >= num:
            return
        assert all(process.poll() is None for process in processes), folder
        time.sleep(0.02)
    raise AssertionError(f"{folder}: no {num} groups in time")


@pytest.fixture
def settings(tmp_path, sglang_python) -> Settings:  # type: ignore[no-untyped-def]
    prompts = tmp_path / "prompts.jsonl"
    words = [chr(97 + i % 26) * (1 + i % 3) + "=" for i in range(NUM_PROMPTS)]
    prompts.write_text("\n".join(json.dumps({"prompt": word, "label": word}) for word in words))
    return Settings.model_validate(
        {
            "run": {"name": "run", "dir": str(tmp_path)},
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
                "sglang_python": sglang_python,
                "server_start_timeout_s": 400.0,
            },
            "train": {"global_batch_size": 24},
        }
    )


def test_one_of_two_shards_is_killed_half_way(settings, all_weights, tmp_path) -> None:  # type: ignore[no-untyped-def]
    alone = Stage(tmp_path / "alone", settings, all_weights[0].path, num_shards=1)
    whole, process = alone.start(0, attempt=1)
    expected = finish(whole, process)

    stage = Stage(tmp_path / "run", settings, all_weights[0].path, num_shards=2)
    (first, victim), (second, other) = (stage.start(k, attempt=1) for k in range(2))
    wait_for_lines(first, 3, victim, other)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert (first / JOURNAL_NAME).read_bytes().count(b"\n") < NUM_PROMPTS // 2, "killed too late"
    results = [None, finish(second, other)]

    again, process = stage.start(0, attempt=2, earlier=[first])
    results[0] = finish(again, process)
    assert not (again / "sglang.log").exists(), "it started a server though nothing was left"

    commits = [
        Commit(
            {**result.content, "files": [dataclasses.asdict(e) for e in result.files]},
            {"attempt": folder.name, "metrics": result.metrics},
            f"xxh3:{k}",
        )
        for k, (result, folder) in enumerate(zip(results, (again, second), strict=True))
    ]
    content, _ = assemble(commits)
    assert content["num_groups"] == NUM_PROMPTS
    assert content["cursor"] == expected.content["cursor"]

    found, wanted = read_batch(again, second), read_batch(whole)
    pairs = list(zip(found.group_index.tolist(), found.sample_index.tolist(), strict=True))
    assert pairs == [(g, k) for g in range(NUM_PROMPTS) for k in range(NUM_SAMPLES)]
    for name in ("tokens", "prompt_lengths", "response_lengths", "rewards", "truncated"):
        assert np.array_equal(getattr(found, name), getattr(wanted, name)), name
    assert np.allclose(found.rollout_logprobs, wanted.rollout_logprobs, atol=1e-5)
    assert len(set(found.response_lengths.tolist())) > 1
