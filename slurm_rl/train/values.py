"""A critic's values of trained tokens. Legend: N trained tokens, [b, S] positions of a pass."""

from __future__ import annotations

from typing import Any

import torch

from slurm_rl.train.batch import MicroBatch
from slurm_rl.train.context import gather_tokens, own_tokens
from slurm_rl.train.forward import Engine, count, run_microbatches


def predict_values(batch: MicroBatch, out_bS1: torch.Tensor) -> torch.Tensor:
    """The value before each trained token, float32[N], with gradient.

    It stands where the logits that predict the token would: the state in which the token is chosen.
    """
    position_n, own_n = own_tokens(batch)
    values_n = out_bS1.flatten().float().index_select(0, position_n)
    (values_N,) = gather_tokens((values_n,), own_n, num=len(batch.targets_N))
    return values_N


def critic_values(engine: Engine, microbatches: list[MicroBatch]) -> list[torch.Tensor]:
    """Values of each micro-batch, without gradient; empty except on the last pipeline rank."""

    def report(batch: MicroBatch, out_bS1: torch.Tensor) -> Any:
        values_N = predict_values(batch, out_bS1)
        return values_N.sum(), count(0, out_bS1), {"values": values_N}

    with torch.no_grad():
        parts = run_microbatches(engine.model, microbatches, report, forward_only=True)
    return [part["values"] for part in parts]
