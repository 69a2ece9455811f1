"""Whole chains on one GPU: their configuration, how they are run, and what they committed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]

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
