"""Losses per token, and how they become one number.

Every loss here is `float32[N]`, one value a response token; `token_weights` holds what each
counts, so that masked tokens, denominators and micro-batches are decided in one place.

Legend: B samples, N response tokens of several samples laid end to end.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch


class PolicyLoss(NamedTuple):
    """loss_N: what to minimise; ratio_N: policy over proximal policy; clipped_N: 1 where
    the clip took effect (it removed the token's gradient)."""

    loss_N: torch.Tensor
    ratio_N: torch.Tensor
    clipped_N: torch.Tensor


def ppo_clip_loss(
    logprobs_N: torch.Tensor,
    *,
    proximal_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate: max(-A r, -A clip(r, 1 - eps_clip, 1 + eps_clip_high)).

    All tensors float32[N]; the gradient flows through `logprobs_N` alone. The proximal
    policy is the model as it was before the first update of this iteration, in the
    trainer's numbers, not the engine's. No denominator: aggregate with `token_weights`.

    Source: PPO (arXiv 1707.06347, eq. 7); an upper clip of its own is DAPO's "clip-higher"
    (arXiv 2503.14476, eq. 10).
    """
    high = eps_clip if eps_clip_high is None else eps_clip_high
    ratio_N = torch.exp(logprobs_N - proximal_logprobs_N)
    plain_N = -advantages_N * ratio_N
    bounded_N = -advantages_N * torch.clamp(ratio_N, 1.0 - eps_clip, 1.0 + high)
    loss_N = torch.maximum(plain_N, bounded_N)
    return PolicyLoss(loss_N, ratio_N.detach(), (bounded_N > plain_N).to(loss_N.dtype))


def kl_estimate(
    logprobs_N: torch.Tensor,
    *,
    reference_logprobs_N: torch.Tensor,
    kind: Literal["k1", "k2", "k3"] = "k3",
) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference) from tokens that the policy sampled.

    With d = log policy - log reference, all float32[N]:
        k1 = d                  unbiased, high variance, may be negative
        k2 = d² / 2             biased, low variance
        k3 = exp(-d) - 1 + d    unbiased, never negative
    No denominator. Source: J. Schulman, "Approximating KL Divergence" (2020); k3 is GRPO's.
    """
    difference_N = logprobs_N.float() - reference_logprobs_N.float()
    if kind == "k1":
        return difference_N
    if kind == "k2":
        return 0.5 * difference_N**2
    return torch.exp(-difference_N) - 1.0 + difference_N


def token_weights(
    mask_N: torch.Tensor, *, lengths_B: torch.Tensor, per_token: bool = False
) -> torch.Tensor:
    """What each token counts in `sum(weights_N * loss_N) / denominator`.

    mask_N is 1 where a token is trained on; lengths_B are the samples' response lengths,
    sum(lengths_B) = N. Returns float32[N], 0 where masked. A sample's own denominator is the
    mask sum of its *whole* response, clamped to 1, whatever micro-batch it is in.

    per_token=False: mask / mask sum of its sample. The denominator is the number of samples
        of the optimizer step: a mean over samples of means over tokens (GRPO,
        arXiv 2402.03300, eq. 3).
    per_token=True: the mask itself. The denominator is the mask sum of the optimizer step,
        clamped to 1 (DAPO's token-level loss, arXiv 2503.14476, eq. 8).
    """
    mask = mask_N.to(torch.float32)
    if per_token:
        return mask
    sample_N = torch.repeat_interleave(torch.arange(len(lengths_B)), lengths_B)
    # index_add_ in a fixed order: a scatter's order is not promised on every device.
    sums_B = torch.zeros(len(lengths_B)).index_add_(0, sample_N, mask)
    return mask / sums_B.clamp(min=1.0)[sample_N]


def weighted_sum(values_N: torch.Tensor, *, weights_N: torch.Tensor) -> torch.Tensor:
    """sum(weights_N * values_N), where a weight of 0 drops the value even if it is not finite.

    A plain product would turn 0 × inf of a masked token into NaN. Both float32[N].
    """
    kept_N = torch.where(weights_N != 0, values_N, torch.zeros_like(values_N))
    return (kept_N * weights_N).sum()
