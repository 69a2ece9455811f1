"""A critic's values of trained tokens. Legend: N trained tokens, n of this context rank."""

from __future__ import annotations

import torch

from slurm_rl.train.batch import MicroBatch
from slurm_rl.train.context import gather_tokens, own_tokens
from slurm_rl.train.forward import Engine, ask_model


def predict_values(batch: MicroBatch, out_1n1: torch.Tensor) -> torch.Tensor:
    """The value before each trained token, float32[N], with gradient.

    It stands where the logits that predict the token would: the state in which the token is chosen.
    """
    _, own_n = own_tokens(batch)
    (values_N,) = gather_tokens((out_1n1.flatten().float(),), own_n, num=len(batch.targets_N))
    return values_N


def critic_values(
    engine: Engine, microbatches: list[MicroBatch], *, max_tokens: int | None = None
) -> list[torch.Tensor]:
    """Values of each micro-batch, without gradient (`ask_model`)."""
    return ask_model(engine, microbatches, predict_values, max_tokens=max_tokens)
