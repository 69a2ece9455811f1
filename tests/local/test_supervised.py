"""A warm start: the first iterations learn the labels, the ones behind them sample."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = str(Path(sys.executable).with_name("slurm-rl"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    value = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    value["run"] = {"name": "sft", "dir": str(folder)}
    value["num_rollout"] = 3
    value["rollout"] |= {
        "prompt_data": str(ROOT / "configs" / "data" / "quickstart.jsonl"),
        "rollout_batch_size": 256,
        "n_samples_per_prompt": 2,
        # The end of the sequence is learnt too.
        "rollout_max_response_len": 3,
        "dynamic_sampling_filter_path": "nonzero_std",
        "on_exhausted": "train",
        "max_groups": 300,
    }
    value["train"] |= {
        "sft_iterations": 2,
        "global_batch_size": 32,
        "micro_batch_size": 32,
        "epochs": 4,
    }
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(value))
    done = subprocess.run(
        [PROGRAM, "submit", str(config), "--wait"], capture_output=True, text=True, timeout=380
    )
    assert done.returncode == 0, done.stderr
    return folder / "sft"


def commit(run: Path, iteration: int, kind: str) -> dict[str, Any]:
    path = run / "iterations" / f"{iteration:06d}" / f"{kind}.t0" / "COMMIT"
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


def test_labels_are_the_answers_and_are_learnt(run: Path) -> None:
    lines = []
    for path in (run / "iterations" / "000000" / "rollout.t0").glob("a*/samples.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 256, "one sample a prompt"
    assert all(line["response"] == line["label"] == line["prompt"][:-1][::-1] for line in lines)
    losses = [commit(run, i, "train")["provenance"]["metrics"]["train/loss"] for i in range(2)]
    assert losses[1] < losses[0] / 2, losses


def test_then_it_samples_behind_the_last_label(run: Path) -> None:
    cursors = [commit(run, i, "rollout")["content"]["cursor"]["visits"] for i in range(3)]
    assert cursors[0] < cursors[1] < cursors[2]
    rollout = commit(run, 2, "rollout")["provenance"]["metrics"]
    assert rollout["rollout/raw_reward"] > 0.3, "chance is 0.05"
    trained = commit(run, 2, "train")["provenance"]["metrics"]
    assert trained["train/train_rollout_logprob_abs_diff"] < 0.01
    first = commit(run, 0, "train")["content"]
    assert first["logprob_gap_first"] is None
