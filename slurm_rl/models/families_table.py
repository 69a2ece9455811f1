"""The model families, one entry each: this is the file in which a family is added.

An entry says three things of a `model_type`: what differs from a Llama in its architecture, what
its `config.json` leaves unsaid, and what its tensors are called. From it follow the geometry
(`geometry.py`), the fields for Megatron, the rules for weights (`tensors.py`), loading, export,
critics and `slurm-rl convert`.

To add one:

1. Read the family's modeling code in transformers next to Llama's, and write its entry.
2. In `must_be` name every setting of its config that the entry does not cover, with the values
   under which it has no effect. What is in neither would be computed silently wrong.
3. Add a tiny config of it to `tests/parity/family_models.py`, with every feature on, and one to
   `tests/unit/train/test_shards.py`. The tests then compare logits, names and shapes with
   transformers', and the bytes of an exported model with the original's.

What an entry can say: biases of the queries, keys and values; a norm of queries and keys; norms
after attention and MLP; rotary embeddings of a part of each head, and of neighbouring pairs;
experts and shared experts; latent attention. Another thing needs a module of its own, as
`post_norms.py`. The file imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slurm_rl.models.shapes import MlaGeometry, MoeGeometry

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Names:
    """What the tensors of a decoder layer are called on the hub, without `model.layers.N.`.

    Modules, as a rule without `.weight`; `{e}` is an expert's number. gate, up, down are those of
    a dense layer; `gate_up` is one tensor in place of the first two.
    """

    pre_mlp_norm: str = "post_attention_layernorm"
    post_attention_norm: str = ""
    post_mlp_norm: str = ""
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    gate_up: str = ""
    router: str = "mlp.gate"
    router_bias: str = "mlp.gate.e_score_correction_bias"
    expert_gate: str = "mlp.experts.{e}.gate_proj"
    expert_up: str = "mlp.experts.{e}.up_proj"
    expert_down: str = "mlp.experts.{e}.down_proj"
    shared: str = "mlp.shared_experts"
    shared_gate: str = "mlp.shared_expert_gate"


@dataclass(frozen=True, slots=True)
class Family:
    """One family. `defaults` are what its config class takes for keys that a file leaves out.

    qkv_bias, qk_norm: always, never, or as the named key of the config says.
    must_be: key -> the values under which the key has no effect, the usual one first.
    moe, mla: read that part of a config; None if the family has none.
    check: what else is wrong with a config, as one clause; "" if nothing.
    """

    qkv_bias: bool | str = False
    qk_norm: bool | str = False
    post_norms: bool = False
    rotary_interleaved: bool = False
    defaults: Config = field(default_factory=dict)
    must_be: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    names: Names = field(default_factory=Names)
    moe: Callable[[Config], MoeGeometry] | None = None
    mla: Callable[[Config], MlaGeometry] | None = None
    check: Callable[[Config], str] = lambda config: ""


#: Of every family, unless its entry says otherwise.
MUST_BE: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
    "attention_dropout": (0, 0.0, None),
}


def _num_experts(config: Config, default: int) -> int:
    # transformers 4 and 5 write different names.
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    return int(next((config[key] for key in keys if config.get(key) is not None), default))


def _qwen_dense_layers(config: Config) -> tuple[int, ...]:
    step = int(config.get("decoder_sparse_step", 1))
    dense = set(config.get("mlp_only_layers") or [])
    layers = range(int(config["num_hidden_layers"]))
    return tuple(i for i in layers if i in dense or (i + 1) % step)


def _qwen2_moe(config: Config) -> MoeGeometry:
    return MoeGeometry(
        num_experts=_num_experts(config, 60),
        top_k=int(config.get("num_experts_per_tok", 4)),
        expert_ffn_size=int(config.get("moe_intermediate_size", 1408)),
        shared_ffn_size=int(config.get("shared_expert_intermediate_size", 5632)),
        shared_gate=True,
        norm_topk_prob=bool(config.get("norm_topk_prob", False)),
        dense_layers=_qwen_dense_layers(config),
    )


def _qwen3_moe(config: Config) -> MoeGeometry:
    return MoeGeometry(
        num_experts=_num_experts(config, 128),
        top_k=int(config.get("num_experts_per_tok", 8)),
        expert_ffn_size=int(config.get("moe_intermediate_size", 768)),
        norm_topk_prob=bool(config.get("norm_topk_prob", False)),
        dense_layers=_qwen_dense_layers(config),
    )


def _mixtral(config: Config) -> MoeGeometry:
    return MoeGeometry(
        num_experts=_num_experts(config, 8),
        top_k=int(config.get("num_experts_per_tok", 2)),
        expert_ffn_size=int(config["intermediate_size"]),
    )


def _deepseek_moe(config: Config) -> MoeGeometry:
    num_groups, group_top_k = int(config.get("n_group") or 1), int(config.get("topk_group") or 1)
    all_groups = num_groups == group_top_k
    width = int(config.get("moe_intermediate_size", 2048))
    return MoeGeometry(
        num_experts=_num_experts(config, 256),
        top_k=int(config.get("num_experts_per_tok", 8)),
        expert_ffn_size=width,
        shared_ffn_size=width * int(config.get("n_shared_experts", 1)),
        norm_topk_prob=bool(config.get("norm_topk_prob", True)),
        scoring="sigmoid",
        scaling_factor=float(config.get("routed_scaling_factor", 2.5)),
        expert_bias=True,
        num_groups=None if all_groups else num_groups,
        group_top_k=None if all_groups else group_top_k,
        dense_layers=tuple(range(int(config.get("first_k_dense_replace", 3)))),
    )


def _deepseek_mla(config: Config) -> MlaGeometry:
    rank = config.get("q_lora_rank", 1536)
    return MlaGeometry(
        q_lora_rank=None if rank is None else int(rank),
        kv_lora_rank=int(config.get("kv_lora_rank", 512)),
        qk_nope_head_dim=int(config.get("qk_nope_head_dim", 128)),
        qk_rope_head_dim=int(config.get("qk_rope_head_dim", 64)),
        v_head_dim=int(config.get("v_head_dim", 128)),
    )


def _check_deepseek(config: Config) -> str:
    # The norms of the latents have this one whatever the config says.
    if config.get("rms_norm_eps", 1e-6) != 1e-6:
        return f"rms_norm_eps = {config['rms_norm_eps']!r} is not supported; only 1e-06 is"
    return ""


FAMILIES = {
    "llama": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True, defaults={"head_dim": 128}),
    "qwen2_moe": Family(
        qkv_bias="qkv_bias",
        moe=_qwen2_moe,
        defaults={"qkv_bias": True},
        names=Names(shared="mlp.shared_expert"),
    ),
    "qwen3_moe": Family(qk_norm=True, moe=_qwen3_moe),
    "mixtral": Family(
        moe=_mixtral,
        defaults={"rope_theta": 1e6, "rms_norm_eps": 1e-5},
        must_be={"sliding_window": (None,), "router_jitter_noise": (0, 0.0, None)},
        names=Names(
            router="block_sparse_moe.gate",
            expert_gate="block_sparse_moe.experts.{e}.w1",
            expert_up="block_sparse_moe.experts.{e}.w3",
            expert_down="block_sparse_moe.experts.{e}.w2",
        ),
    ),
    "glm4": Family(
        qkv_bias="attention_bias",
        post_norms=True,
        rotary_interleaved=True,
        defaults={
            "attention_bias": True,
            "head_dim": 128,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1.5625e-7,
        },
        must_be={"attention_bias": (True, False)},
        names=Names(
            post_attention_norm="post_self_attn_layernorm",
            post_mlp_norm="post_mlp_layernorm",
            gate_up="mlp.gate_up_proj",
        ),
    ),
    "glm4_moe": Family(
        qkv_bias="attention_bias",
        qk_norm="use_qk_norm",
        moe=_deepseek_moe,
        defaults={
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
            "moe_intermediate_size": 1408,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 1,
        },
        must_be={"attention_bias": (True, False)},
    ),
    "deepseek_v3": Family(
        moe=_deepseek_moe,
        mla=_deepseek_mla,
        must_be={
            "rope_interleave": (True,),
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
            "moe_layer_freq": (1,),
        },
        check=_check_deepseek,
    ),
}
