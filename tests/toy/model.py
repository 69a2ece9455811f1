"""A Hugging Face directory of the smallest Llama, written without torch: all weights are zero."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from slurm_rl.models.geometry import parse_model_config
from slurm_rl.models.headers import SINGLE
from slurm_rl.models.tensors import hf_shapes

SMALLEST: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4,
    "intermediate_size": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 8,
    "max_position_embeddings": 64,
}


def write_model(folder: Path, **changes: Any) -> Path:
    """The model of `SMALLEST` and `changes`, with something in place of a tokenizer."""
    folder.mkdir(exist_ok=True)
    config = SMALLEST | changes
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    table, end = {}, 0
    for name, shape in hf_shapes(parse_model_config(config, where="config.json")).items():
        start, end = end, end + 2 * math.prod(shape)
        table[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps(table).encode()
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(header)) + header + bytes(end))
    return folder
