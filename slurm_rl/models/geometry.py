"""A model's shape, read from a Hugging Face `config.json`; and what Megatron calls it.

It refuses, by name, every variation that the trainer would silently get wrong (another
activation, sliding windows, biases, rope scalings). What differs between families is
`families_table.py`'s. It imports neither torch nor Megatron.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_rl.errors import ModelError
from slurm_rl.models.families_table import FAMILIES, MUST_BE, Family
from slurm_rl.models.shapes import MlaGeometry, MoeGeometry, YarnGeometry
from slurm_rl.models.sizes import problem_of_numbers, problem_of_shape

__all__ = [
    "FAMILIES",
    "MODEL_FIELDS",
    "Family",
    "Geometry",
    "MlaGeometry",
    "MoeGeometry",
    "YarnGeometry",
    "gpt_fields",
    "megatron_fields",
    "parse_model_config",
    "read_geometry",
]

#: Llama 3's rope scaling as Megatron-core has it built in; only `factor` may vary.
_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
#: Ends the name of a class that gives each token `num_labels` numbers.
_VALUE_MODEL = "ForTokenClassification"


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of a decoder. `dtype` is what its weights are stored as.

    ffn_hidden_size: of the dense layers. rotary_percent: the part of each head that is rotated;
    rotary_interleaved: neighbours are its pairs, not halves. post_norms: attention and MLP are
    normed once more before they are added. value_head: instead of logits one number a token.
    With `mla`, num_groups and head_dim say nothing.
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_groups: int
    head_dim: int
    vocab_size: int
    tied: bool
    norm_epsilon: float
    rope_theta: float
    rope_factor: float | None
    max_positions: int
    dtype: str
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    yarn: YarnGeometry | None = None
    moe: MoeGeometry | None = None
    mla: MlaGeometry | None = None
    value_head: bool = False

    def is_moe_layer(self, layer: int) -> bool:
        """Whether decoder layer `layer` (from 0) has experts."""
        return self.moe is not None and layer not in self.moe.dense_layers

    def padded_vocab(self, tp_size: int) -> int:
        """Rows of the embedding in Megatron: a multiple of 64 whatever the layout, so that a
        checkpoint can be loaded into another one; and of the tensor-parallel size."""
        unit = math.lcm(64, tp_size)
        return -(-self.vocab_size // unit) * unit


def megatron_fields(geometry: Geometry) -> dict[str, Any]:
    """Fields of Megatron's TransformerConfig (with `mla`: MLATransformerConfig) that the model
    decides. Without the activation, which is SiLU's function."""
    g = geometry
    fields: dict[str, Any] = {
        "num_layers": g.num_layers,
        "hidden_size": g.hidden_size,
        "ffn_hidden_size": g.ffn_hidden_size,
        "num_attention_heads": g.num_heads,
        "num_query_groups": g.num_groups,
        "kv_channels": g.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": g.norm_epsilon,
        "qk_layernorm": g.qk_norm,
        "add_qkv_bias": g.qkv_bias,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "rotary_interleaved": g.rotary_interleaved,
    }
    return fields | _moe_fields(g) | _mla_fields(g)


def _moe_fields(geometry: Geometry) -> dict[str, Any]:
    moe = geometry.moe
    if moe is None:
        return {}
    return {
        "num_moe_experts": moe.num_experts,
        "moe_ffn_hidden_size": moe.expert_ffn_size,
        "moe_layer_freq": [int(geometry.is_moe_layer(i)) for i in range(geometry.num_layers)],
        "moe_router_topk": moe.top_k,
        "moe_router_score_function": moe.scoring,
        # A softmax over the chosen logits alone is one over all of them, made to sum to one.
        "moe_router_pre_softmax": moe.scoring == "softmax" and not moe.norm_topk_prob,
        "moe_router_topk_scaling_factor": moe.scaling_factor,
        "moe_router_enable_expert_bias": moe.expert_bias,
        "moe_router_num_groups": moe.num_groups,
        "moe_router_group_topk": moe.group_top_k,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_size,
        "moe_shared_expert_gate": moe.shared_gate,
    }


def _mla_fields(geometry: Geometry) -> dict[str, Any]:
    mla, yarn = geometry.mla, geometry.yarn
    if mla is None:
        return {}
    fields: dict[str, Any] = {
        "multi_latent_attention": True,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        # Here it is the latents that are normed.
        "qk_layernorm": True,
        "rope_type": "rope" if yarn is None else "yarn",
        "rotary_base": geometry.rope_theta,
        # Without YaRN too: the scale of the softmax is made from it.
        "rotary_scaling_factor": 1.0 if yarn is None else yarn.factor,
    }
    if yarn is not None:
        fields |= {
            "original_max_position_embeddings": yarn.original_max_positions,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "mscale": yarn.mscale,
            "mscale_all_dim": yarn.mscale_all_dim,
        }
    return fields


def gpt_fields(geometry: Geometry) -> dict[str, Any]:
    """Arguments of Megatron's GPTModel that the model decides, but for its vocabulary."""
    return {
        "max_sequence_length": geometry.max_positions,
        "share_embeddings_and_output_weights": geometry.tied,
        "position_embedding_type": "rope",
        "rotary_percent": geometry.rotary_percent,
        "rotary_base": geometry.rope_theta,
        "rope_scaling": geometry.rope_factor is not None,
        "rope_scaling_factor": geometry.rope_factor or 8.0,
    }


#: Every field that `megatron_fields` may decide: a user may set none of them.
MODEL_FIELDS = (
    "activation_func",
    *megatron_fields(
        Geometry(
            *("", 1, 1, 1, 1, 1, 1, 1, False, 1.0, 1.0, None, 1, ""),
            yarn=YarnGeometry(1.0, 1),
            moe=MoeGeometry(1, 1, 1),
            mla=MlaGeometry(None, 1, 1, 1, 1),
        )
    ),
)


def read_geometry(folder: Path) -> Geometry:
    """The geometry in `folder/config.json`; ModelError if it cannot be read."""
    return parse_model_config(read_model_config(folder), where=str(folder / "config.json"))


def read_model_config(folder: Path) -> dict[str, Any]:
    """`folder/config.json` as it is; ModelError if it cannot be read."""
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(f"{path}: there is no such file") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON ({error})") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path}: not an object, but a {type(config).__name__}")
    return config


def parse_model_config(config: dict[str, Any], *, where: str) -> Geometry:
    """The geometry in a `config.json`; `where` names the file in errors (ModelError)."""
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ModelError(
            f"{where}: model_type {name!r} is not supported",
            hint=f"supported are {', '.join(sorted(FAMILIES))}",
        )
    try:
        return _parse(config, FAMILIES[name], where=where)
    except KeyError as error:
        raise ModelError(f"{where}: {error.args[0]} is missing") from error
    except (TypeError, ValueError, AttributeError, OverflowError, ZeroDivisionError) as error:
        raise ModelError(f"{where}: a value in it is none of its kind ({error})") from error


def _parse(config: dict[str, Any], family: Family, *, where: str) -> Geometry:
    """May raise whatever a value of another kind than its key's makes Python raise."""
    _refuse_variations(config, family, where=where)
    unsaid = {k: v for k, v in family.defaults.items() if config.get(k) is None}
    config = {**config, **unsaid}
    if problem := problem_of_numbers(config):
        raise ModelError(f"{where}: {problem}")
    geometry = _geometry(config, family, where=where)
    problem = (
        family.check(config)
        or _problem_of_experts(geometry.moe)
        or problem_of_shape(geometry, has_head_dim=config.get("head_dim") is not None)
    )
    if problem:
        raise ModelError(f"{where}: {problem}")
    return geometry


def _geometry(config: dict[str, Any], family: Family, *, where: str) -> Geometry:
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    head_dim = int(config.get("head_dim") or hidden // heads)
    mla = family.mla(config) if family.mla else None
    value_head = _has_value_head(config, where=where)
    return Geometry(
        family=config["model_type"],
        num_layers=int(config["num_hidden_layers"]),
        hidden_size=hidden,
        ffn_hidden_size=int(config["intermediate_size"]),
        num_heads=heads,
        num_groups=heads if mla else int(config.get("num_key_value_heads") or heads),
        head_dim=mla.qk_head_dim if mla else head_dim,
        vocab_size=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", False)) and not value_head,
        norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=_rope_theta(config),
        rope_factor=_rope_factor(config, allow_yarn=mla is not None, where=where),
        max_positions=int(config.get("max_position_embeddings", 32768)),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        qkv_bias=_asked(config, family.qkv_bias),
        qk_norm=_asked(config, family.qk_norm),
        post_norms=family.post_norms,
        rotary_percent=_rotary_percent(config),
        rotary_interleaved=family.rotary_interleaved,
        yarn=_yarn(config, where=where) if mla else None,
        moe=family.moe(config) if family.moe else None,
        mla=mla,
        value_head=value_head,
    )


def _asked(config: dict[str, Any], answer: bool | str) -> bool:
    return bool(config.get(answer, False)) if isinstance(answer, str) else answer


def _refuse_variations(config: dict[str, Any], family: Family, *, where: str) -> None:
    for key, accepted in {**MUST_BE, **family.must_be}.items():
        if key in config and config[key] not in accepted:
            raise ModelError(
                f"{where}: {key} = {config[key]!r} is not supported",
                hint=f"only {key} = {accepted[0]!r} is",
            )
    kinds = set(config.get("layer_types") or []) - {"full_attention"}
    if kinds:
        raise ModelError(f"{where}: layer_types {sorted(kinds)} are not supported")


def _problem_of_experts(moe: MoeGeometry | None) -> str:
    """What Megatron's router does otherwise than transformers'; "" if nothing."""
    if moe is None:
        return ""
    if moe.top_k == 1 and moe.norm_topk_prob:
        return "num_experts_per_tok = 1 with norm_topk_prob is not supported"
    if moe.scoring == "sigmoid" and not moe.norm_topk_prob:
        return "norm_topk_prob = False is not supported; only True is"
    # transformers ranks a group by its two best experts, Megatron by top_k / group_top_k of them.
    if moe.group_top_k is not None and moe.top_k // moe.group_top_k != 2:
        return (
            f"topk_group = {moe.group_top_k} with num_experts_per_tok = {moe.top_k} is not "
            "supported; only the half of it is"
        )
    return ""


def _has_value_head(config: dict[str, Any], *, where: str) -> bool:
    names = [str(name) for name in config.get("architectures") or []]
    if not any(name.endswith(_VALUE_MODEL) for name in names):
        return False
    labels = len(config.get("id2label") or {}) or int(config.get("num_labels", 2))
    if labels != 1:
        raise ModelError(
            f"{where}: {names[0]} has {labels} labels; a value head has one",
            hint="id2label must name one label",
        )
    return True


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    # transformers 5 writes `rope_parameters`; 4 wrote `rope_theta` and `rope_scaling`.
    return dict(config.get("rope_parameters") or config.get("rope_scaling") or {})


def _rope_theta(config: dict[str, Any]) -> float:
    return float(_rope(config).get("rope_theta") or config.get("rope_theta") or 10000.0)


def _rotary_percent(config: dict[str, Any]) -> float:
    own = _rope(config).get("partial_rotary_factor")
    return float(config.get("partial_rotary_factor", 1.0) if own is None else own)


def _rope_type(rope: dict[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _rope_factor(config: dict[str, Any], *, allow_yarn: bool, where: str) -> float | None:
    rope = _rope(config)
    kind = _rope_type(rope)
    if kind == "default" or (kind == "yarn" and allow_yarn):
        return None
    differing = [key for key, value in _LLAMA3_ROPE.items() if rope.get(key, value) != value]
    if kind != "llama3" or differing or allow_yarn:
        raise ModelError(
            f"{where}: rope scaling {kind!r} {differing or ''} is not supported".replace("  ", " "),
            hint=f"'default' is, and 'llama3' with {_LLAMA3_ROPE}",
        )
    return float(rope["factor"])


def _yarn(config: dict[str, Any], *, where: str) -> YarnGeometry | None:
    rope = _rope(config)
    if _rope_type(rope) != "yarn":
        return None
    for key, accepted in (("attention_factor", (None,)), ("truncate", (True, None))):
        if rope.get(key) not in accepted:
            raise ModelError(f"{where}: rope scaling 'yarn' with {key} is not supported")
    mscale, all_dim = rope.get("mscale") or 0.0, rope.get("mscale_all_dim") or 0.0
    if all_dim and not mscale:
        raise ModelError(f"{where}: rope scaling 'yarn' has mscale_all_dim, but no mscale")
    try:
        factor, original = rope["factor"], rope["original_max_position_embeddings"]
    except KeyError as error:
        raise ModelError(f"{where}: rope scaling 'yarn' has no {error.args[0]}") from error
    # transformers takes the two only together.
    both = bool(mscale and all_dim)
    return YarnGeometry(
        factor=float(factor),
        original_max_positions=int(original),
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        mscale=float(mscale) if both else 1.0,
        mscale_all_dim=float(all_dim) if both else 0.0,
    )
