"""Whole chains on one GPU: SGLang servers and Megatron-core with NCCL, in turn on the same card.

What stands alone in `tests/parity` (round trips, logits, resume) runs on a GPU as it is:
`python -m pytest tests/parity`.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from gpu.chains import PROGRAM, ROOT, read_commits, run_chain, write_config

pytestmark = pytest.mark.timeout(580)


def used_memory_mb() -> int:
    """Memory in use on the first GPU, by all processes."""
    argv = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[0])


def test_sglang_and_megatron_take_turns_on_one_gpu(tmp_path: Path, device_name: str) -> None:
    before_mb = used_memory_mb()
    config = write_config(tmp_path)
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    root = tmp_path / "gpu"
    began = time.monotonic()
    assert run_chain(config, root, env) == 0
    print(f"two iterations in {time.monotonic() - began:.0f} s on {device_name}")

    commits = read_commits(root)
    assert len(commits) == 5
    for name, commit in commits.items():
        metrics = commit["provenance"]["metrics"]
        shown = {k: round(v, 5) for k, v in metrics.items()}
        print(name, json.dumps(shown))
    train = [commits[f"{i:06d}/train.t0"] for i in range(2)]
    assert len({t["content"]["weights"]["digest"] for t in train}) == 2
    for commit in train:
        assert commit["provenance"]["device"] == device_name
        gap = commit["provenance"]["metrics"]["train/train_rollout_logprob_abs_diff"]
        assert gap < 0.1, "the engine's and the trainer's log-probs are too far apart"
    checked = subprocess.run([*PROGRAM, "verify", str(root)], env=env, capture_output=True)
    assert checked.returncode == 0
    time.sleep(3)
    assert used_memory_mb() <= before_mb + 50, "something still holds GPU memory"
