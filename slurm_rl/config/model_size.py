"""How many parameters a model has, without loading it.

Counts what the headers of its weights say, or from the config of a random model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurm_rl.config.schema import Settings
from slurm_rl.errors import ModelError
from slurm_rl.models.headers import read_headers


def count_parameters(settings: Settings) -> int | None:
    """Parameters of the model that the run starts from; None if its files cannot be read."""
    if settings.init_model is not None:
        return count_from_config(settings.init_model.config, len(settings.init_model.characters))
    try:
        shapes = read_headers(Path(settings.hf_checkpoint or "")).shapes
    except ModelError:
        return None
    return sum(math.prod(shape) for shape in shapes.values()) or None


def count_from_config(config: dict[str, Any], num_characters: int) -> int:
    """Parameters of a decoder of any family, every expert counted; norms and biases left out."""
    hidden = int(config.get("hidden_size", 64))
    layers = int(config.get("num_hidden_layers", 2))
    vocabulary = int(config.get("vocab_size", num_characters + 3)) * hidden
    tied = bool(config.get("tie_word_embeddings", True))
    num_dense = len(dense_layers(config, layers))
    mlps = num_dense * 3 * hidden * int(config.get("intermediate_size", 4 * hidden))
    mlps += (layers - num_dense) * _count_experts(config, hidden)
    return layers * _count_attention(config, hidden) + mlps + vocabulary * (1 if tied else 2)


def _count_attention(config: dict[str, Any], hidden: int) -> int:
    heads = int(config.get("num_attention_heads", 4))
    if "kv_lora_rank" not in config:
        head_dim = int(config.get("head_dim") or hidden // heads)
        kv_heads = int(config.get("num_key_value_heads") or heads)
        return hidden * head_dim * (2 * heads + 2 * kv_heads)
    rope, nope = (int(config.get(f"qk_{x}_head_dim", n)) for x, n in (("rope", 64), ("nope", 128)))
    value = int(config.get("v_head_dim", 128))
    rank, query_rank = int(config["kv_lora_rank"]), config.get("q_lora_rank")
    queries = heads * (rope + nope)
    query = hidden * queries if query_rank is None else int(query_rank) * (hidden + queries)
    return query + rank * heads * (nope + value) + hidden * (rank + rope + heads * value)


def num_experts(config: Mapping[str, Any]) -> int:
    """Experts of a layer that has some; 0 for a model without."""
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    return int(next((config[key] for key in keys if config.get(key)), 0))


def dense_layers(config: Mapping[str, Any], layers: int) -> list[int]:
    """Numbers of the layers that have no experts."""
    if not num_experts(config):
        return list(range(layers))
    step = int(config.get("decoder_sparse_step") or 1)
    listed = set(config.get("mlp_only_layers") or [])
    first = int(config.get("first_k_dense_replace") or 0)
    return [i for i in range(layers) if i < first or i in listed or (i + 1) % step]


def _count_experts(config: dict[str, Any], hidden: int) -> int:
    """Of one layer: its experts, those that every token visits, and the router."""
    num = num_experts(config)
    width = int(config.get("moe_intermediate_size") or config.get("intermediate_size", 4 * hidden))
    shared = int(config.get("shared_expert_intermediate_size") or 0)
    shared += width * int(config.get("n_shared_experts") or 0)
    return 3 * hidden * (num * width + shared) + num * hidden
