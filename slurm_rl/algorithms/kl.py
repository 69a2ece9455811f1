"""Estimates of KL(policy || reference) from tokens that the policy sampled, one a token.

Legend: N tokens laid end to end.
"""

from __future__ import annotations

from typing import Literal

import torch

from slurm_rl.algorithms.numerics import LOG_RATIO_BOUND, as_float, gradient_where_finite

KlKind = Literal["k1", "k2", "k3", "low_var_kl"]

#: `low_var_kl` is k3 up to this, and constant beyond.
LOW_VAR_BOUND = 10.0


def kl_estimate(
    logprobs_N: torch.Tensor,
    *,
    reference_logprobs_N: torch.Tensor,
    kind: KlKind = "k3",
    importance_ratio_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference), float[N]. No denominator.

    With d = log policy - log reference:
        k1 = d                       unbiased, high variance, may be negative
        k2 = d² / 2                  biased, low variance; its gradient as a loss is unbiased
        k3 = exp(-d) - 1 + d         unbiased, never negative
        low_var_kl = min(k3, 10)     k3 that an outlier cannot take over
    In k3, d is held above -20 (LOG_RATIO_BOUND), for exp(-d) overflows.

    importance_ratio_N: the policy over the policy that sampled, *with* its gradient
    (`numerics.importance_ratio`); the estimate is multiplied by it. Then the value is unbiased
    also after the policy has moved, and the gradient of k1 and k3 is that of the KL itself,
    which without the ratio it is not.

    Source: J. Schulman, "Approximating KL Divergence" (2020); k3 is GRPO's (arXiv 2402.03300,
    eq. 4); the unbiased form is DeepSeek-V3.2's (arXiv 2512.02556, eq. 7).
    """
    others = () if importance_ratio_N is None else (importance_ratio_N,)
    logprobs_N = gradient_where_finite(as_float(logprobs_N), reference_logprobs_N, *others)
    difference_N = logprobs_N - as_float(reference_logprobs_N)
    estimate_N = _estimate(difference_N, kind)
    if importance_ratio_N is None:
        return estimate_N
    return gradient_where_finite(importance_ratio_N, estimate_N) * estimate_N


def _estimate(difference_N: torch.Tensor, kind: KlKind) -> torch.Tensor:
    if kind == "k1":
        return difference_N
    if kind == "k2":
        return 0.5 * difference_N**2
    held_N = torch.clamp(difference_N, min=-LOG_RATIO_BOUND)
    # expm1: near d = 0 the 1 would cancel all digits of d² / 2.
    k3_N = torch.expm1(-held_N) + held_N
    return torch.clamp(k3_N, max=LOW_VAR_BOUND) if kind == "low_var_kl" else k3_N
