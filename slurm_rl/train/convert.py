"""Models from one form on disk to another: Hugging Face directories and Megatron checkpoints.

Everything here is one process without a run, on the CPU. Owns what is read and written; what a user
may ask for is `cli/convert.py`'s. Each function makes the folder that it writes, `config.json`
last: without it the folder is no model, if the process dies midway.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from slurm_rl.models.geometry import (
    Geometry,
    parse_model_config,
    read_geometry,
    read_model_config,
)
from slurm_rl.models.tensors import check_tensors, hf_shapes
from slurm_rl.train.solo import alone
from slurm_rl.train.weights import (
    FILE_SIZE_BYTES,
    WeightsLayout,
    WeightsReader,
    plan_layout,
    read_companions,
    read_layout,
    write_weights,
)

CONFIG = "config.json"
DTYPES = ("float32", "bfloat16", "float16")
#: Added to scores in float32, whatever the model's dtype: rounded, it chooses other experts.
_ALWAYS_FLOAT32 = ("e_score_correction_bias",)
#: What a Megatron checkpoint says besides its weights, as Megatron-LM's own do.
_FACTS = {"checkpoint_version": 3.0, "iteration": 0}


def rewrite_weights(
    source: Path, target: Path, *, dtype: str | None = None, file_size_bytes: int | None = None
) -> None:
    """A Hugging Face directory again, of another dtype (None: as it is), in files of at most
    `file_size_bytes` (None: 5 GB). Of any family. Holds no more than one new file in memory.

    Raises ModelError if the source is none, or damaged.
    """
    config, layout = read_model_config(source), read_layout(source)
    names = sorted(layout.shapes, key=_natural)
    kept = {name: layout.dtypes[name] for name in names}
    dtypes = kept if dtype is None else _cast(kept, dtype)
    shapes = {name: layout.shapes[name] for name in names}
    target.mkdir()
    planned = plan_layout(shapes, dtypes, file_size_bytes=file_size_bytes or FILE_SIZE_BYTES)
    with WeightsReader(source, layout) as reader:
        stream = ((name, reader.read(name, None, 0, 0)) for name in names)
        _drain(write_weights(target, stream, layout=planned))
    _write_companions(source, target, _with_dtype(config, dtype))


def hf_to_megatron(source: Path, target: Path) -> None:
    """A Hugging Face directory as a Megatron checkpoint (`torch_dist`) of the weights alone, with
    `config.json` and the tokenizer beside. It loads in any layout.

    Raises ModelError for a model that the trainer does not support.
    """
    config, layout, geometry = read_model_config(source), read_layout(source), read_geometry(source)
    check_tensors(geometry, folder=source, shapes=layout.shapes)
    with alone():
        from slurm_rl.train.checkpoint import save_model
        from slurm_rl.train.loading import load_weights

        model = _build(geometry)
        load_weights(model, geometry=geometry, folder=source, layout=layout)
        target.mkdir()
        save_model(target, model=model, facts=_FACTS)
    _write_companions(source, target, config)


def megatron_to_hf(
    source: Path,
    target: Path,
    *,
    like: Path,
    dtype: str | None = None,
    file_size_bytes: int | None = None,
) -> None:
    """A Megatron checkpoint (`torch_dist`, of a train stage or of the weights alone, saved in any
    layout) as a Hugging Face directory. `like`: where `config.json` and the tokenizer are.

    Raises ModelError for a model that the trainer does not support, CorruptError for a checkpoint
    that cannot be read or is of another model.
    """
    config = _with_dtype(read_model_config(like), dtype)
    geometry = parse_model_config(config, where=str(like / CONFIG))
    with alone():
        from slurm_rl.train.checkpoint import load_model
        from slurm_rl.train.export import export_weights

        model = _build(geometry)
        load_model(source, model=model)
        export_weights(
            target,
            model=model,
            geometry=geometry,
            layout=_plan_for(geometry, file_size_bytes),
            companions={},
        )
    _write_companions(like, target, config)


def _build(geometry: Geometry) -> Any:
    from slurm_rl.train.model import build_model, model_config
    from slurm_rl.train.options import split_megatron

    # A learning rate must be there; nothing here learns.
    options = split_megatron({"lr": 0.0})
    return build_model(geometry, model_config(geometry, options, deterministic=False))


def _plan_for(geometry: Geometry, file_size_bytes: int | None) -> WeightsLayout:
    shapes = hf_shapes(geometry)
    dtypes = _cast(dict.fromkeys(shapes, torch.float32), geometry.dtype)
    return plan_layout(shapes, dtypes, file_size_bytes=file_size_bytes or FILE_SIZE_BYTES)


def _cast(dtypes: dict[str, torch.dtype], dtype: str) -> dict[str, torch.dtype]:
    asked = getattr(torch, dtype)
    return {n: was if n.endswith(_ALWAYS_FLOAT32) else asked for n, was in dtypes.items()}


def _natural(name: str) -> list[Any]:
    """Layer 2 before layer 10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _with_dtype(config: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    if dtype is None:
        return config
    # transformers 4 called it `torch_dtype`.
    key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    return config | {key: dtype}


def _write_companions(source: Path, target: Path, config: dict[str, Any]) -> None:
    others = read_companions(source)
    was = others.pop(CONFIG)
    for name, data in others.items():
        (target / name).write_bytes(data)
    is_same = json.loads(was) == config
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (target / CONFIG).write_bytes(was if is_same else text.encode())


def _drain(names: Iterator[str]) -> None:
    for _ in names:
        pass
