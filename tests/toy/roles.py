"""A small run with every role: policy, moving reference, teacher, critic with a warm-up.

The stages are real: Megatron-core, the embedded engine, the quickstart's task.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
NUM_ITERATIONS = 2
KINDS = ("rollout", "reference", "teacher", "critic", "train")
STAGES = ["i0000.init"] + [f"i{i:04d}.{kind}" for i in range(NUM_ITERATIONS) for kind in KINDS]


def roles_config(folder: Path, teacher: Path, **changes: Any) -> dict[str, Any]:
    """The configuration of a run `roles` in `folder`."""
    value: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    value["run"] = {"name": "roles", "dir": str(folder)}
    value["num_rollout"] = NUM_ITERATIONS
    value["rollout"] |= {
        "prompt_data": str(ROOT / "configs" / "data" / "quickstart.jsonl"),
        "rollout_batch_size": 8,
        "n_samples_per_prompt": 4,
        "rollout_temperature": 0.9,
    }
    value["train"] |= {
        "advantage_estimator": "gae",
        "lambd": 0.9,
        "normalize_advantages": True,
        "kl_coef": 0.05,
        "use_kl_loss": True,
        "kl_loss_coef": 0.01,
        "use_tis": True,
        "global_batch_size": 16,
        "micro_batch_size": 8,
        "epochs": 2,
        "max_tokens_per_gpu": 64,
    }
    value["reference"] = {"ema": 0.5}
    value["teacher"] = {"hf_checkpoint": str(teacher), "coef": 0.1}
    value["critic"] = {
        "warmup_iterations": 1,
        "minibatches": 2,
        "epochs": 2,
        "save_steps": 1,
        "megatron": {"lr": 1e-3, "clip_grad": 1.0},
    }
    return value | changes


def make_teacher(folder: Path) -> Path:
    """A wider model of the same characters."""
    from slurm_rl.config.schema import InitModel
    from slurm_rl.stages.init import make_model

    quickstart = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    model = quickstart["init_model"]
    model["config"] |= {"hidden_size": 96, "num_hidden_layers": 2}
    folder.mkdir(parents=True)
    make_model(InitModel.model_validate(model), folder, seed=7)
    return folder
