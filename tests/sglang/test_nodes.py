"""A rollout job over two nodes, with one real SGLang server over both: tensor parallelism."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from toy.stage_jobs import (
    NUM_PROMPTS,
    NUM_SAMPLES,
    Stage,
    finish,
    make_settings,
    read_batch,
    start_rank,
)
from transformers import AutoModelForCausalLM

from slurm_rl.config.schema import Settings
from slurm_rl.rollout.engine import Weights

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(580)]


@pytest.fixture
def settings(tmp_path: Path, sglang_python: str) -> Settings:
    """Two ranks on this machine are two nodes to SGLang, each with half of every layer."""
    value = make_settings(tmp_path, sglang_python).model_dump()
    value["rollout"]["engine_nodes"] = 2
    value["rollout"]["sglang"]["tp_size"] = 2
    value["rollout"]["sglang_env"]["SGLANG_CPU_OMP_THREADS_BIND"] = "0|0"
    value["network_interface"] = "lo"
    return Settings.model_validate(value)


def test_two_nodes_serve_as_one(
    settings: Settings, all_weights: list[Weights], tmp_path: Path
) -> None:
    weights = all_weights[0].path
    stage = Stage(tmp_path / "run", settings, weights, num_shards=1)
    folder, leader = stage.start(0, attempt=1)
    follower = start_rank(folder, 1)
    result = finish(folder, leader)
    assert follower.wait(timeout=60) == 0, (folder / "rank-1.log").read_text()[-3000:]
    assert result.content["num_groups"] == NUM_PROMPTS
    assert "TP1" in (folder / "sglang-node1.log").read_text(), "the second node had no part"

    batch = read_batch(folder)
    assert len(batch) == NUM_PROMPTS * NUM_SAMPLES
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    for i in range(0, len(batch), 7):
        tokens = torch.from_numpy(batch.sample_tokens(i)).long()
        with torch.no_grad():
            logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        found = logprobs.gather(1, tokens[1:, None])[int(batch.prompt_lengths[i]) - 1 :, 0]
        wanted = batch.rollout_logprobs[batch.response_slice(i)]
        assert np.abs(found.numpy() - wanted).max() < 1e-4
