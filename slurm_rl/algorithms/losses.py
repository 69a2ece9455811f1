"""Losses of the policy, one number a trained token.

No loss here has a denominator: `aggregation` says what each token counts. All take the
log-probabilities of the model being trained, through which alone the gradient flows, and those
of the proximal policy: the model as it was before the first update of this iteration, in the
trainer's numbers, not the engine's. A token whose inputs are not finite has a loss that is not
finite and a gradient of 0 (`gradient_where_finite`): a weight of 0 drops it altogether.

Legend: N trained tokens of a micro-batch laid end to end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from slurm_rl.algorithms.aggregation import token_weights, weighted_sum
from slurm_rl.algorithms.kl import kl_estimate
from slurm_rl.algorithms.numerics import (
    as_float,
    bounded_exp,
    gradient_where_finite,
    importance_ratio,
    log_ratio,
    sequence_means,
)

__all__ = [
    "PolicyLoss",
    "ppo_clip_loss",
    "gspo_loss",
    "cispo_loss",
    "policy_gradient_loss",
    "kl_estimate",
    "token_weights",
    "weighted_sum",
]


class PolicyLoss(NamedTuple):
    """float[N] each. loss_N: what to minimise; ratio_N: policy over proximal policy, detached,
    within exp(± LOG_RATIO_BOUND); clipped_N: 1 where the clip took effect."""

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
    eps_clip_c: float | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate: max(-A r, -A clip(r, 1 - eps_clip, 1 + eps_clip_high)).

    r = exp(logprobs - proximal). eps_clip_high None: as eps_clip. eps_clip_c > 1 bounds the loss
    of a negative advantage at -A eps_clip_c, where the plain form grows with r (dual clip).
    clipped_N is 1 where a clip removed the token's gradient.

    Source: PPO (arXiv 1707.06347, eq. 7); an upper clip of its own is DAPO's "clip-higher"
    (arXiv 2503.14476, eq. 10); dual clip is Ye et al. (arXiv 1912.09729).
    """
    logprobs_N = gradient_where_finite(logprobs_N, proximal_logprobs_N, advantages_N)
    ratio_N = importance_ratio(logprobs_N, proximal_logprobs_N=proximal_logprobs_N)
    return _clipped_surrogate(ratio_N, advantages_N, eps_clip, eps_clip_high, eps_clip_c)


def gspo_loss(
    logprobs_N: torch.Tensor,
    *,
    proximal_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    sequence_N: torch.Tensor,
    num_sequences: int,
    eps_clip: float,
    eps_clip_high: float | None = None,
) -> PolicyLoss:
    """GSPO: PPO's surrogate with one ratio a sequence, the geometric mean of its tokens' ratios.

    s = exp(mean over the sequence's trained tokens of (logprobs - proximal)). Each token has the
    value of s and the gradient s × grad logprob_t, which averages over the sequence to grad s:
    under `sequence` weights it is the paper's objective, under others its per-token form.
    sequence_N int64: the number of each token's sequence; a sequence must be in one micro-batch
    as a whole. ratio_N is s. Clip ranges are those of s, hundreds of times narrower than PPO's.

    Source: Zheng et al. (arXiv 2507.18071, eq. 5; per token, its GSPO-token).
    """
    difference_N = log_ratio(logprobs_N.detach(), other_logprobs_N=proximal_logprobs_N)
    # The mean is bounded, its tokens are not: one far token moves it as far as it should.
    mean_S = sequence_means(difference_N, sequence_N=sequence_N, num_sequences=num_sequences)
    mean_N = mean_S[sequence_N]
    logprobs_N = gradient_where_finite(as_float(logprobs_N), mean_N, advantages_N)
    # Its value is the mean's exactly; its gradient is that of the token's log-probability.
    ratio_N = bounded_exp(mean_N + (logprobs_N - logprobs_N.detach()))
    return _clipped_surrogate(ratio_N, advantages_N, eps_clip, eps_clip_high, None)


def cispo_loss(
    logprobs_N: torch.Tensor,
    *,
    proximal_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float | None = None,
) -> PolicyLoss:
    """CISPO: -A × clip(r, 1 - eps_clip, 1 + eps_clip_high) × logprob, the clipped ratio constant.

    No token loses its gradient: the clip bounds what it counts. eps_clip >= 1 leaves the ratio
    without a lower bound, as the paper does. clipped_N is 1 where r is out of its bounds.

    Source: MiniMax-M1 (arXiv 2506.13585).
    """
    logprobs_N = gradient_where_finite(as_float(logprobs_N), proximal_logprobs_N, advantages_N)
    ratio_N = importance_ratio(logprobs_N.detach(), proximal_logprobs_N=proximal_logprobs_N)
    bounded_N = torch.clamp(ratio_N, 1.0 - eps_clip, _upper(eps_clip, eps_clip_high))
    loss_N = -as_float(advantages_N) * bounded_N * logprobs_N
    return PolicyLoss(loss_N, ratio_N, (bounded_N != ratio_N).to(loss_N.dtype))


def policy_gradient_loss(
    logprobs_N: torch.Tensor,
    *,
    proximal_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
) -> PolicyLoss:
    """The plain policy gradient: -A × logprob. The proximal policy serves to report the ratio.

    Unbiased for the first update of an iteration only: later ones are off-policy and nothing
    here corrects for it. With advantages of 1 it is the loss of supervised fine-tuning.

    Source: Williams, "Simple statistical gradient-following algorithms" (1992).
    """
    logprobs_N = gradient_where_finite(as_float(logprobs_N), advantages_N)
    ratio_N = importance_ratio(logprobs_N.detach(), proximal_logprobs_N=proximal_logprobs_N)
    loss_N = -as_float(advantages_N) * logprobs_N
    return PolicyLoss(loss_N, ratio_N, torch.zeros_like(loss_N.detach()))


def _clipped_surrogate(
    ratio_N: torch.Tensor,
    advantages_N: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float | None,
    eps_clip_c: float | None,
) -> PolicyLoss:
    advantages_N = as_float(advantages_N)
    plain_N = -advantages_N * ratio_N
    bounded_N = -advantages_N * torch.clamp(
        ratio_N, 1.0 - eps_clip, _upper(eps_clip, eps_clip_high)
    )
    loss_N = torch.maximum(plain_N, bounded_N)
    clipped_N = bounded_N > plain_N
    if eps_clip_c is not None:
        assert eps_clip_c > 1.0, "a dual clip below 1 would bound the loss inside the clip range"
        most_N = -advantages_N * eps_clip_c
        dual_N = (advantages_N < 0) & (loss_N > most_N)
        loss_N = torch.where(dual_N, most_N, loss_N)
        clipped_N = clipped_N | dual_N
    return PolicyLoss(loss_N, ratio_N.detach(), clipped_N.to(loss_N.dtype))


def _upper(eps_clip: float, eps_clip_high: float | None) -> float:
    return 1.0 + (eps_clip if eps_clip_high is None else eps_clip_high)
