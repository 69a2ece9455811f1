"""A real SGLang says which experts it sent tokens to: those that transformers' routers choose."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slurm_rl.config.schema import InitModel
from slurm_rl.rollout.engine import Completion, Request, Sampling, Weights
from slurm_rl.rollout.routing import read_routed
from slurm_rl.rollout.sglang import SglangEngine
from slurm_rl.stages.init import make_model
from slurm_rl.storage.digest import digest_entries
from slurm_rl.storage.durable import list_files, seal_files

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(560)]

LAYERS, EXPERTS, TOP_K = 3, 8, 2
MODEL = InitModel(
    characters="abcdefghijklmnopqrstuvwxyz=",
    config={
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        "dtype": "float32",
    },
)
PROMPTS = [(1, 2, 3, 4), (5,), (6, 7, 8, 9, 10, 11, 12)]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    path = tmp_path_factory.mktemp("moe") / "v0"
    path.mkdir()
    make_model(MODEL, path, seed=1)
    digest = digest_entries(seal_files(path, list_files(path)))
    return Weights(path, 0, digest, f"run/v0/{digest}")


@pytest.fixture(scope="module")
def engine(make_options: Any, weights: Weights, tmp_path_factory: Any) -> Iterator[SglangEngine]:
    log = tmp_path_factory.mktemp("server") / "sglang.log"
    engine = SglangEngine(make_options(log, routed=True))
    try:
        engine.start(weights)
        yield engine
    finally:
        engine.stop()


def own_choices(model: Any, tokens: tuple[int, ...]) -> dict[int, np.ndarray]:  # type: ignore[type-arg]
    """By layer: the experts of each token, [T, K], by transformers."""
    said: dict[int, np.ndarray] = {}  # type: ignore[type-arg]
    hooks = [
        layer.mlp.gate.register_forward_hook(
            lambda module, inputs, output, n=number: said.update({n: output[2].numpy()})
        )
        for number, layer in enumerate(model.model.layers)
        if hasattr(layer.mlp, "gate")
    ]
    with torch.no_grad():
        model(torch.tensor(tokens)[None])
    for hook in hooks:
        hook.remove()
    return said


def test_every_tokens_experts(engine: SglangEngine, weights: Weights) -> None:
    """Twice: the second time the prompts come from the server's cache."""
    model = AutoModelForCausalLM.from_pretrained(weights.path, dtype=torch.float32)

    async def ask(seed: int) -> list[list[Completion]]:
        requests = [
            Request(g, prompt, tuple(seed + 10 * g + k for k in range(3)))
            for g, prompt in enumerate(PROMPTS)
        ]
        sampling = Sampling(max_new_tokens=12)
        return await asyncio.gather(*(engine.generate(r, sampling) for r in requests))

    chosen = set()
    for seed in (0, 1000):
        for prompt, group in zip(PROMPTS, asyncio.run(ask(seed)), strict=True):
            for answer in group:
                tokens = prompt + answer.tokens
                routed = read_routed(answer.routed_experts)
                assert routed.shape == (len(tokens), LAYERS, TOP_K) and routed.dtype == np.uint8
                for number, theirs in own_choices(model, tokens).items():
                    mine = np.sort(routed[:-1, number].astype(int), -1)
                    assert (mine == np.sort(theirs[:-1], -1)).all(), number
                    chosen |= {(number, int(e)) for e in mine.flatten()}
    assert len(chosen) > EXPERTS * LAYERS / 2, "the routers of so few tokens say too little"
