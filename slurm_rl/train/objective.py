"""What one micro-batch adds to the loss, and what is reported of it.

Owns the sum that is differentiated and the sums that are shown. How log-probabilities come about is
`step.py`'s; the formulas are `algorithms/`'s.

Legend: N trained tokens of a micro-batch, V vocabulary columns of this tensor rank.
"""

from __future__ import annotations

from typing import Any

import torch

from slurm_rl.algorithms.losses import kl_estimate, ppo_clip_loss, weighted_sum
from slurm_rl.config.schema import Train
from slurm_rl.train.batch import MicroBatch

#: Sums over trained tokens, each weighted as the loss is; divided by the denominator.
SUMS = ("loss", "pg_loss", "pg_clipfrac", "ppo_kl", "entropy_loss", "kl_loss")


def policy_loss(
    batch: MicroBatch, logprobs_N: torch.Tensor, entropy_N: torch.Tensor, *, train: Train
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The micro-batch's weighted sum of losses, and what to report.

    logprobs_N, entropy_N: of the policy that is trained, with gradient.
    """
    assert batch.proximal_N is not None
    policy = ppo_clip_loss(
        logprobs_N,
        proximal_logprobs_N=batch.proximal_N,
        advantages_N=batch.arrays["advantages"],
        eps_clip=train.eps_clip,
        eps_clip_high=train.eps_clip_high,
    )
    total_N = policy.loss_N - train.entropy_coef * entropy_N
    kl_N = torch.zeros_like(policy.loss_N)
    if batch.reference_N is not None:
        kl_N = kl_estimate(
            logprobs_N, reference_logprobs_N=batch.reference_N, kind=train.kl_loss_type
        )
        total_N = total_N + train.kl_loss_coef * kl_N
    loss = weighted_sum(total_N, weights_N=batch.weights_N)

    with torch.no_grad():
        values = (
            total_N,
            policy.loss_N,
            policy.clipped_N,
            batch.proximal_N - logprobs_N,
            entropy_N,
            kl_N,
        )
        sums = torch.stack([weighted_sum(v, weights_N=batch.weights_N) for v in values])
        ratio = _max((policy.ratio_N - 1.0).abs())
    return loss, {"sums": sums, "ratio": ratio}


def _max(values_N: torch.Tensor) -> torch.Tensor:
    return values_N.max() if len(values_N) else values_N.new_zeros(())
