"""The critic's loss, one number a trained token. Legend: N trained tokens laid end to end."""

from __future__ import annotations

from typing import NamedTuple

import torch

from slurm_rl.algorithms.numerics import as_float, gradient_where_finite


class ValueLoss(NamedTuple):
    """float[N] each. clipped_N: 1 where the clip took effect (it removed the gradient)."""

    loss_N: torch.Tensor
    clipped_N: torch.Tensor


def value_loss(
    values_N: torch.Tensor,
    *,
    proximal_values_N: torch.Tensor,
    returns_N: torch.Tensor,
    eps_clip: float | None,
) -> ValueLoss:
    """1/2 max((V - R)², (clip(V, V_old - eps_clip, V_old + eps_clip) - R)²).

    V_old (`proximal_values_N`) is what the critic said before the first update of this
    iteration, R its target (`gae`). The larger of the two counts: the clip slows a value that
    runs far from V_old towards R, and never hides an error. eps_clip None: 1/2 (V - R)².
    No denominator: aggregate with `token_weights`.

    Source: Schulman et al.'s PPO code; described in Engstrom et al. (arXiv 2005.12729, section 3).
    """
    values_N = gradient_where_finite(as_float(values_N), proximal_values_N, returns_N)
    proximal_values_N = as_float(proximal_values_N).to(values_N.dtype)
    plain_N = (values_N - returns_N) ** 2
    if eps_clip is None:
        return ValueLoss(0.5 * plain_N, torch.zeros_like(plain_N.detach()))
    # Clamped as it is, not as a difference: within the bounds it stays the same to the last bit.
    held_N = torch.clamp(values_N, proximal_values_N - eps_clip, proximal_values_N + eps_clip)
    bounded_N = (held_N - returns_N) ** 2
    clipped_N = (bounded_N > plain_N).to(plain_N.dtype)
    return ValueLoss(0.5 * torch.maximum(plain_N, bounded_N), clipped_N)
