"""Counts from a config are those of the model that transformers makes of it, but for norms."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_rl.config.model_size import count_from_config

BASE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "glm4": {"head_dim": 8},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "decoder_sparse_step": 2,
    },
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16, "mlp_only_layers": [0]},
    "deepseek_v3": {
        "q_lora_rank": 24,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
    },
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_count_is_that_of_the_tables(kind: str) -> None:
    import torch
    import transformers

    fields = BASE | MODELS[kind]
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(kind, **fields)
        model = transformers.AutoModelForCausalLM.from_config(config)
    expected = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    # The gate of Qwen2's shared experts is as small as a norm.
    gates = sum(p.numel() for n, p in model.named_parameters() if "shared_expert_gate" in n)
    assert count_from_config(fields, 0) == expected - gates
