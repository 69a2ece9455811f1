"""Models that are asked and not trained: read from Hugging Face files, and dropped again."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from slurm_rl.errors import ModelError
from slurm_rl.models.geometry import Geometry, read_geometry
from slurm_rl.train.batch import MicroBatch
from slurm_rl.train.forward import Engine, policy_logprobs
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
    options: MegatronOptions,
    max_tokens: int | None = None,
) -> list[torch.Tensor]:
    """Of the micro-batches of `engine`, under the model in `folder` (`policy_logprobs`).

    It may be of another family and size; that its tokens are the same, the init stage has seen to.
    Raises ModelError.
    """
    other = read_geometry(folder)
    deterministic = bool(engine.model.config.deterministic_mode)
    model = load_other(folder, geometry=other, options=options, deterministic=deterministic)
    asked = dataclasses.replace(engine, model=model, vocab_size=other.vocab_size)
    return policy_logprobs(asked, microbatches, max_tokens=max_tokens)
