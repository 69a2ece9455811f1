"""Whole chains on one GPU: SGLang servers and Megatron-core with NCCL, in turn on the same card.

What stands alone in `tests/parity` (round trips, logits, resume) runs on a GPU as it is:
`python -m pytest tests/parity`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.timeout(580)

PROGRAM = [sys.executable, "-c", "from slurm_rl.cli.main import entry; entry()"]
#: Twice what a chain takes here; one that hangs is to leave its logs.
WAIT_S = 450


def write_config(folder: Path) -> Path:
    """The quickstart with a larger random model, SGLang, and bf16 training."""
    value: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    value["run"] = {"name": "gpu", "dir": str(folder)}
    value["num_rollout"] = 2
    value["init_model"]["config"] |= {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "dtype": "bfloat16",
    }
    server_path = os.environ.get("SLURM_RL_SGLANG_PYTHONPATH")
    environment = {"SGLANG_IS_FLASHINFER_AVAILABLE": "false", "HF_HUB_OFFLINE": "1"}
    for name in ("TVM_FFI_CACHE_DIR",):
        if name in os.environ:
            environment[name] = os.environ[name]
    value["rollout"] |= {
        "engine": "sglang",
        "prompt_data": str(ROOT / "configs" / "data" / "quickstart.jsonl"),
        "rollout_batch_size": 32,
        "n_samples_per_prompt": 8,
        "sglang_python": os.environ.get("SLURM_RL_SGLANG_PYTHON", sys.executable),
        "sglang_env": environment | ({"PYTHONPATH": server_path} if server_path else {}),
        "sglang": {
            "attention_backend": "triton",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "disable_cuda_graph": True,
            "skip_server_warmup": True,
            "mem_fraction_static": 0.3,
            "enable_deterministic_inference": True,
        },
    }
    value["train"] |= {"global_batch_size": 64, "micro_batch_size": 32}
    value["train"]["megatron"] |= {"lr": 1e-3, "bf16": True}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(value))
    return path


def read_commits(root: Path) -> dict[str, dict[str, Any]]:
    return {
        f"{path.parents[1].name}/{path.parent.name}": json.loads(path.read_bytes())
        for path in sorted((root / "iterations").glob("*/*.t0/COMMIT"))
    }


def used_memory_mb() -> int:
    """Memory in use on the first GPU, by all processes."""
    argv = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[0])


def run_chain(config: Path, root: Path, env: dict[str, str]) -> int | None:
    """Its exit code; None, and the run is cancelled, if it is not over after WAIT_S."""
    said = config.with_suffix(".out")
    try:
        with said.open("wb") as out:
            done = subprocess.run(
                [*PROGRAM, "submit", str(config), "--wait"],
                env=env,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=WAIT_S,
            )
        code = done.returncode
    except subprocess.TimeoutExpired:
        code = None
        subprocess.run([*PROGRAM, "cancel", str(root)], env=env, timeout=60)
    print(said.read_text(errors="replace")[-6000:])
    if code != 0:
        for log in sorted(root.rglob("*.log")):
            print(f"==> {log.relative_to(root)}\n{log.read_text(errors='replace')[-3000:]}")
    return code


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
