"""A model's shape, read from a Hugging Face `config.json`; and which families there are.

It refuses, by name, every variation that the trainer would silently get wrong (another
activation, sliding windows, biases, rope scalings). It imports neither torch nor Megatron.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_rl.errors import ModelError


@dataclass(frozen=True, slots=True)
class Family:
    """What distinguishes a family in Megatron's terms, and its config's defaults."""

    qkv_bias: bool = False
    qk_norm: bool = False
    default_head_dim: int | None = None


FAMILIES = {
    "llama": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True, default_head_dim=128),
}

#: Keys that must have one value, where present: key -> values that are the same as absent.
_MUST_BE: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
    "attention_dropout": (0, 0.0, None),
}
#: Llama 3's rope scaling as Megatron-core has it built in; only `factor` may vary.
_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of a dense decoder. `dtype` is what its weights are stored as."""

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

    @property
    def qkv_bias(self) -> bool:
        return FAMILIES[self.family].qkv_bias

    @property
    def qk_norm(self) -> bool:
        return FAMILIES[self.family].qk_norm

    def padded_vocab(self, tp_size: int) -> int:
        """Rows of the embedding in Megatron: a multiple of 64 whatever the layout, so that a
        checkpoint can be loaded into another one; and of the tensor-parallel size."""
        unit = math.lcm(64, tp_size)
        return -(-self.vocab_size // unit) * unit


def read_geometry(folder: Path) -> Geometry:
    """The geometry in `folder/config.json`; ModelError if it cannot be read."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(f"{path}: there is no such file") from error
    except ValueError as error:
        raise ModelError(f"{path}: not JSON ({error})") from error
    return parse_model_config(config, where=str(path))


def parse_model_config(config: dict[str, Any], *, where: str) -> Geometry:
    """The geometry in a `config.json`; `where` names the file in errors (ModelError)."""
    name = config.get("model_type")
    if name not in FAMILIES:
        raise ModelError(
            f"{where}: model_type {name!r} is not supported",
            hint=f"supported are {', '.join(sorted(FAMILIES))}",
        )
    _refuse_variations(config, where=where)
    try:
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        return Geometry(
            family=name,
            num_layers=int(config["num_hidden_layers"]),
            hidden_size=hidden,
            ffn_hidden_size=int(config["intermediate_size"]),
            num_heads=heads,
            num_groups=int(config.get("num_key_value_heads") or heads),
            head_dim=int(
                config.get("head_dim") or FAMILIES[name].default_head_dim or hidden // heads
            ),
            vocab_size=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=_rope_theta(config),
            rope_factor=_rope_factor(config, where=where),
            max_positions=int(config.get("max_position_embeddings", 32768)),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        )
    except KeyError as error:
        raise ModelError(f"{where}: {error.args[0]} is missing") from error


def _refuse_variations(config: dict[str, Any], *, where: str) -> None:
    for key, accepted in _MUST_BE.items():
        if key in config and config[key] not in accepted:
            raise ModelError(
                f"{where}: {key} = {config[key]!r} is not supported",
                hint=f"only {key} = {accepted[0]!r} is",
            )
    kinds = set(config.get("layer_types") or []) - {"full_attention"}
    if kinds:
        raise ModelError(f"{where}: layer_types {sorted(kinds)} are not supported")


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    # transformers 5 writes `rope_parameters`; 4 wrote `rope_theta` and `rope_scaling`.
    return dict(config.get("rope_parameters") or config.get("rope_scaling") or {})


def _rope_theta(config: dict[str, Any]) -> float:
    return float(config.get("rope_theta") or _rope(config).get("rope_theta") or 10000.0)


def _rope_factor(config: dict[str, Any], *, where: str) -> float | None:
    rope = _rope(config)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    differing = [key for key, value in _LLAMA3_ROPE.items() if rope.get(key, value) != value]
    if kind != "llama3" or differing:
        raise ModelError(
            f"{where}: rope scaling {kind!r} {differing or ''} is not supported".replace("  ", " "),
            hint=f"'default' is, and 'llama3' with {_LLAMA3_ROPE}",
        )
    return float(rope["factor"])
