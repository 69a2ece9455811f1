"""How many parameters a model has, without loading it.

Reads safetensors headers (a length and a JSON table) or counts from the config of a random model.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from slurm_rl.config.schema import Settings
from slurm_rl.errors import ModelError

#: A header larger than this is damage, not a model.
_MAX_HEADER_BYTES = 100 << 20


def count_parameters(settings: Settings) -> int | None:
    """Parameters of the model that the run starts from; None if its files cannot be read."""
    if settings.init_model is not None:
        return count_from_config(settings.init_model.config, len(settings.init_model.characters))
    try:
        files = sorted(Path(settings.hf_checkpoint or "").glob("*.safetensors"))
        tensors = [table for file in files for table in read_header(file).values()]
    except (OSError, ModelError):
        return None
    return sum(math.prod(entry["shape"]) for entry in tensors) or None


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Tensor name -> {dtype, shape, data_offsets}. Raises ModelError if the file is cut short."""
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size, _MAX_HEADER_BYTES):
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: not a safetensors file ({error})") from error
    if size != 8 + length + end:
        raise ModelError(
            f"{path}: {size} bytes, but its header describes {8 + length + end}",
            hint="the file is cut short or damaged; copy it again",
        )
    return header  # type: ignore[no-any-return]


def count_from_config(config: dict[str, Any], num_characters: int) -> int:
    """Parameters of a dense decoder (Llama, Qwen2, Qwen3), norms and biases left out."""
    hidden = int(config.get("hidden_size", 64))
    heads = int(config.get("num_attention_heads", 4))
    head_dim = int(config.get("head_dim", hidden // heads))
    kv_heads = int(config.get("num_key_value_heads", heads))
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    mlp = 3 * hidden * int(config.get("intermediate_size", 4 * hidden))
    vocabulary = int(config.get("vocab_size", num_characters + 3)) * hidden
    tied = bool(config.get("tie_word_embeddings", True))
    layers = int(config.get("num_hidden_layers", 2))
    return layers * (attention + mlp) + vocabulary * (1 if tied else 2)
