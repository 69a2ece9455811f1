"""Weights for tokens that another policy than the proximal one sampled.

The engine samples with other kernels, other precision and, when a rollout lags, other weights
than the trainer. What corrects for it is a ratio of two fixed policies, the proximal one (the
trainer's, before the update) over the rollout's (the engine's): known before training starts,
without a gradient, multiplied onto each token's loss.

Rejecting a token sets its weight to 0 and changes no denominator: a rejected sequence counts as
one that has nothing to teach, and the step is that much smaller. verl instead takes rejected
tokens out of the response mask, and its means are over what is left: a step of the same size
from fewer samples.

Legend: N trained tokens laid end to end, S the sequences they are of.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch

from slurm_rl.algorithms.numerics import (
    as_float,
    bounded_exp,
    log_ratio,
    sequence_means,
    sequence_sums,
)

Level = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True, slots=True)
class ImportanceRule:
    """Weigh by the ratio, where it is within [low, high].

    outside "truncate": beyond a bound the weight is the bound (truncated importance sampling);
    outside "mask": it is 0 (masked importance sampling). Example:
    ImportanceRule(level="token", outside="truncate", low=0.0, high=2.0).
    """

    level: Level
    outside: Literal["truncate", "mask"]
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class RejectionRule:
    """Drop what has a ratio out of [low, high]: tokens at level "token", else whole sequences.

    Example: RejectionRule(level="geometric", low=0.99, high=1.01).
    """

    level: Level
    low: float
    high: float


class Correction(NamedTuple):
    """Detached. weights_N float[N], 0 where not kept; kept_N bool[N].

    The rest are scalars for metrics, over the tokens given: sums that micro-batches and ranks
    add up, and one maximum. num_outside: tokens whose ratio was out of the importance rule's
    range (truncated or masked); num_rejected: tokens not kept, for either reason; weight_sum
    and weight_max: of the final weights. Divide by the number of tokens.
    """

    weights_N: torch.Tensor
    kept_N: torch.Tensor
    num_outside: torch.Tensor
    num_rejected: torch.Tensor
    weight_sum: torch.Tensor
    weight_max: torch.Tensor


def off_policy_ratio(
    proximal_logprobs_N: torch.Tensor,
    *,
    rollout_logprobs_N: torch.Tensor,
    sequence_N: torch.Tensor,
    num_sequences: int,
    level: Level,
) -> torch.Tensor:
    """Proximal over rollout policy, float[N], within exp(± LOG_RATIO_BOUND), without a gradient.

    With d = proximal - rollout log-probability:
        token      exp(d)
        sequence   exp(sum of d over its sequence): unbiased, its variance grows with length
        geometric  exp(mean of d over its sequence): biased, of the size of a token's ratio
    Sequence levels give all tokens of a sequence the same ratio. A sequence must be given whole.
    """
    d_N = log_ratio(proximal_logprobs_N.detach(), other_logprobs_N=rollout_logprobs_N.detach())
    if level != "token":
        reduce = sequence_sums if level == "sequence" else sequence_means
        d_S = reduce(d_N, sequence_N=sequence_N, num_sequences=num_sequences)
        d_N = d_S.to(d_N.dtype)[sequence_N]
    return bounded_exp(d_N)


def off_policy_correction(
    proximal_logprobs_N: torch.Tensor,
    *,
    rollout_logprobs_N: torch.Tensor,
    sequence_N: torch.Tensor,
    num_sequences: int,
    importance: ImportanceRule | None = None,
    rejection: RejectionRule | None = None,
) -> Correction:
    """The weight of each token, to be multiplied onto its loss. No rule: all weights are 1.

    A ratio of NaN is not kept by a mask or a rejection; truncated, the loss shows it.

    Source: truncated importance sampling, Ionides (2008) and Yao et al., "Your efficient RL
    framework secretly brings you off-policy RL training" (2025); masking and rejection of
    sequences by their geometric mean, Li et al., "When speed kills stability" (2025).
    """
    ratio = partial(
        off_policy_ratio,
        proximal_logprobs_N,
        rollout_logprobs_N=rollout_logprobs_N,
        sequence_N=sequence_N,
        num_sequences=num_sequences,
    )
    weights_N = torch.ones_like(as_float(proximal_logprobs_N.detach()))
    kept_N = torch.ones_like(weights_N, dtype=torch.bool)
    outside_N = ~kept_N
    if importance is not None:
        ratio_N = ratio(level=importance.level)
        weights_N = torch.clamp(ratio_N, importance.low, importance.high)
        outside_N = ~_within(ratio_N, importance)
        if importance.outside == "mask":
            kept_N = ~outside_N
    if rejection is not None:
        kept_N = kept_N & _within(ratio(level=rejection.level), rejection)
    weights_N = torch.where(kept_N, weights_N, 0.0)
    most = weights_N.amax() if len(weights_N) else weights_N.new_zeros(())
    return Correction(
        weights_N, kept_N, outside_N.sum(), (~kept_N).sum(), weights_N.double().sum(), most
    )


def _within(ratio_N: torch.Tensor, rule: ImportanceRule | RejectionRule) -> torch.Tensor:
    return (ratio_N >= rule.low) & (ratio_N <= rule.high)
