"""A teacher that a real SGLang serves: its log-probs are those of transformers, at temperature 1."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from toy.batches import batch_of
from toy.roles import make_teacher
from toy.sglang_cpu import CPU_ARGUMENTS, CPU_ENVIRONMENT

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parity"))

import trains

from slurm_rl.config.schema import Settings
from slurm_rl.stages.signals import SIGNALS_NAME
from slurm_rl.stages.teacher import run_teacher
from slurm_rl.storage.durable import seal_files
from slurm_rl.types import Input, Result

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(400)]

NUM = 3


def teacher_input(root: Path) -> Input:
    folder = root / "init"
    make_teacher(folder / "teacher")
    # Of the policy only its vocabulary is looked at.
    (folder / "weights").mkdir()
    config = json.loads((folder / "teacher" / "config.json").read_text())
    size = {"vocab_size": config["vocab_size"]}
    (folder / "weights" / "config.json").write_text(json.dumps(size))
    names = [f"teacher/{path.name}" for path in (folder / "teacher").iterdir()]
    result = Result(files=seal_files(folder, names), content={"teacher": {"digest": "xxh3:t"}})
    return trains.as_input("teacher", 0, "init", folder, result)


def test_sampled_and_likeliest_tokens(sglang_python: str, tmp_path: Path) -> None:
    value: dict[str, Any] = trains.tiny_settings(tmp_path).model_dump()
    value["rollout"] |= {
        "rollout_temperature": 1.0,
        "sglang_python": sglang_python,
        "sglang_env": CPU_ENVIRONMENT,
        "server_start_timeout_s": 280,
    }
    value["teacher"] = {
        "hf_checkpoint": "unused",
        "backend": "sglang",
        "sglang": CPU_ARGUMENTS,
        "top_logprobs_num": NUM,
    }
    source = teacher_input(tmp_path)
    samples = dataclasses.replace(
        batch_of([4, 1, 7, 3], loss_mask=[1, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0]),
    )
    rollout = trains.make_rollout(tmp_path, {"version": 0, "digest": "xxh3:p"}, samples=samples)
    order = trains.make_order(tmp_path, "teacher", 0, {"rollout": rollout, "teacher": source}, "t")
    result = run_teacher(order, Settings.model_validate(value))
    assert result.content["teacher"] == {"digest": "xxh3:t"}
    found = load_file(Path(order.attempt_dir) / SIGNALS_NAME)

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(f"{source.path}/teacher", dtype=torch.float32)
    parts, targets = [], []
    for i in range(len(samples.rewards)):
        tokens = torch.from_numpy(samples.sample_tokens(i)).long()
        start = int(samples.prompt_lengths[i])
        with torch.no_grad():
            parts.append(model(tokens[None]).logits[0, start - 1 : -1].log_softmax(-1))
        targets.append(tokens[start:])
    expected, targets = torch.cat(parts), torch.cat(targets)
    trained = torch.from_numpy(samples.loss_mask) != 0
    sampled = expected.gather(1, targets[:, None])[:, 0] * trained
    assert torch.allclose(found["teacher"], sampled, atol=2e-3)
    assert float(sampled.abs().max()) > 0.1
    best = expected.topk(NUM).values[trained]
    assert torch.allclose(found["top_logprobs"][trained], best, atol=2e-3)
    at_ids = expected.gather(1, found["top_ids"])[trained]
    assert torch.allclose(at_ids, best, atol=2e-3)
    # At another temperature they would be far from these.
    assert not torch.allclose(
        (expected / 0.9).log_softmax(-1).topk(NUM).values[trained], best, atol=2e-3
    )
