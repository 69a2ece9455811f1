"""Routing replay on one GPU: SGLang says which experts it chose, and training takes them.

Whether the trainer sends tokens there is what tests/parity/test_routing_replay.py shows.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from gpu.chains import ROOT, read_commits, run_chain, write_config

from slurm_rl.rollout.samples import SampleBatch, read_samples

pytestmark = pytest.mark.timeout(580)

LAYERS, EXPERTS, TOP_K = 4, 16, 4


def write_moe_config(folder: Path) -> Path:
    """The chain's configuration, one iteration, with experts in every layer."""
    path = write_config(folder)
    value: dict[str, Any] = yaml.safe_load(path.read_text())
    value["num_rollout"] = 1
    value["init_model"]["config"] |= {
        "model_type": "qwen3_moe",
        "num_hidden_layers": LAYERS,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    value["rollout"]["use_rollout_routing_replay"] = True
    path.write_text(yaml.safe_dump(value))
    return path


def own_choices(folder: Path, samples: SampleBatch) -> dict[int, np.ndarray]:
    """Of each layer with experts: what transformers' routers choose for all tokens, [T, K]."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda()
    said: dict[int, list[np.ndarray]] = {}
    for number, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(
                lambda module, inputs, output, n=number: said.setdefault(n, []).append(
                    output[2].cpu().numpy()
                )
            )
    ends = np.cumsum(samples.prompt_lengths.astype(int) + samples.response_lengths)
    with torch.no_grad():
        for start, end in zip(np.append(0, ends[:-1]), ends, strict=True):
            model(torch.from_numpy(samples.tokens[start:end]).long().cuda()[None])
    return {number: np.concatenate(parts) for number, parts in said.items()}


def test_the_engines_experts_are_trained_through(tmp_path: Path, device_name: str) -> None:
    config = write_moe_config(tmp_path)
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    root = tmp_path / "gpu"
    began = time.monotonic()
    assert run_chain(config, root, env) == 0
    print(f"one iteration in {time.monotonic() - began:.0f} s on {device_name}")

    commits = read_commits(root)
    metrics = commits["000000/train.t0"]["provenance"]["metrics"]
    (path,) = (root / "iterations" / "000000").rglob("samples.safetensors")
    samples = read_samples([path])
    routed = samples.routed_experts
    assert routed is not None and routed.shape == (len(samples.tokens), LAYERS, TOP_K)
    (weights,) = {p.parent for p in root.rglob("init.t0/**/weights/config.json")}
    lengths = samples.prompt_lengths.astype(int) + samples.response_lengths
    is_fed = np.ones(len(samples.tokens), bool)
    is_fed[np.cumsum(lengths) - 1] = False
    for number, theirs in own_choices(weights, samples).items():
        ours = np.sort(routed[is_fed, number].astype(int), -1)
        same = (ours == np.sort(theirs[is_fed], -1)).all(-1).mean()
        print(f"layer {number}: {same:.4f} of the tokens go to the same experts by transformers")
        assert same > 0.9
    assert metrics["train/first_ratio_diff_max"] == 0.0
    name = "train/train_rollout_logprob_abs_diff"
    print(f"{name} {metrics[name]:.5f} (max {metrics[f'{name}_max']:.5f})")
    assert metrics[name] < 0.02
