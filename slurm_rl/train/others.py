"""Models that are asked and not trained: read from Hugging Face files, and dropped again."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from slurm_rl.errors import ModelError
from slurm_rl.train.batch import MicroBatch
from slurm_rl.train.forward import Engine, policy_logprobs
from slurm_rl.train.geometry import Geometry, read_geometry
from slurm_rl.train.loading import load_weights
from slurm_rl.train.model import build_model, model_config
from slurm_rl.train.options import MegatronOptions
from slurm_rl.train.weights import read_layout


def load_other(
    folder: Path, *, geometry: Geometry, options: MegatronOptions, deterministic: bool
) -> Any:
    """The model in `folder`, laid out by `options`. Raises ModelError."""
    if geometry.value_head:
        raise ModelError(f"{folder}: it is a critic; it has no log-probabilities")
    config = model_config(geometry, options, deterministic=deterministic)
    model = build_model(geometry, config)
    load_weights(model, geometry=geometry, folder=folder, layout=read_layout(folder))
    model.eval()
    return model


def other_logprobs(
    folder: Path,
    microbatches: list[MicroBatch],
    *,
    engine: Engine,
    geometry: Geometry,
    options: MegatronOptions,
) -> list[torch.Tensor]:
    """Of the micro-batches of `engine`, under the model in `folder` (`policy_logprobs`).

    geometry: of the engine's model; the other's vocabulary and family must be its. Raises
    ModelError if they are not.
    """
    other = read_geometry(folder)
    if (other.vocab_size, other.family) != (geometry.vocab_size, geometry.family):
        raise ModelError(f"{folder}: the reference is of another family or vocabulary")
    deterministic = bool(engine.model.config.deterministic_mode)
    model = load_other(folder, geometry=other, options=options, deterministic=deterministic)
    return policy_logprobs(dataclasses.replace(engine, model=model), microbatches)
