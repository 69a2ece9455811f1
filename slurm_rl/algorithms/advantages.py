"""Advantages from rewards, one number a sample. It knows nothing of tokens.

A group is the samples of one prompt, named by any integer; groups may interleave and differ in
size. Sums are taken in float64, so that equal rewards give advantages of exactly 0.
Legend: B samples (or conversations, where several samples are parts of one), G groups.
"""

from __future__ import annotations

import torch

from slurm_rl.algorithms.numerics import as_float, sequence_sums

#: Added to the standard deviation, so that a group of equal rewards divides by no zero.
STD_EPSILON = 1e-6


def group_advantages(
    rewards_B: torch.Tensor, *, group_index_B: torch.Tensor, divide_by_std: bool = True
) -> torch.Tensor:
    """GRPO: each reward less its group's mean, over its group's standard deviation.

    rewards_B float, group_index_B integer; returns float32[B] (float64 for float64). The
    denominator is the group's unbiased standard deviation + 1e-6; a group of one sample is only
    centred (its advantage is 0), since one sample has no deviation.

    Source: DeepSeekMath (arXiv 2402.03300, eq. of section 4.1.2). Without the division it is
    Dr. GRPO's (arXiv 2503.20783), which removes the bias towards questions of low variance.

    Example: rewards 1, 0 in one group give ±0.5, or ±0.7071 divided by their deviation.
    """
    centred_B, size_B, group_B = _centre(rewards_B, group_index_B)
    if divide_by_std:
        squares_G = sequence_sums(centred_B**2, sequence_N=group_B, num_sequences=len(group_B))
        deviation_B = (squares_G[group_B] / (size_B - 1).clamp(min=1)).sqrt()
        centred_B = centred_B / (deviation_B + STD_EPSILON)
    return centred_B.to(as_float(rewards_B).dtype)


def rloo_advantages(rewards_B: torch.Tensor, *, group_index_B: torch.Tensor) -> torch.Tensor:
    """RLOO: each reward less the mean reward of the *others* of its group.

    Shapes as in `group_advantages`. The baseline's denominator is the group's size less one:
    r_i - sum_{j != i} r_j / (n - 1), which is n / (n - 1) times the centred reward. A group of
    one sample has no others, and gets 0: it is not trained on.

    Source: Ahmadian et al. (arXiv 2402.14740).

    Example: rewards 1, 0, 0 in one group give 1, -0.5, -0.5.
    """
    centred_B, size_B, _ = _centre(rewards_B, group_index_B)
    advantages_B = centred_B * size_B / (size_B - 1).clamp(min=1)
    return advantages_B.to(as_float(rewards_B).dtype)


def centred_rewards(rewards_B: torch.Tensor, *, group_index_B: torch.Tensor) -> torch.Tensor:
    """Each reward less its group's mean; 0 for a group of one. Shapes as in `group_advantages`."""
    centred_B, _, _ = _centre(rewards_B, group_index_B)
    return centred_B.to(as_float(rewards_B).dtype)


def _centre(
    rewards_B: torch.Tensor, group_index_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float64[B] less the group's mean; int64[B] its group's size; the group's number from 0."""
    rewards_B = rewards_B.detach().double()
    group_B = torch.unique(group_index_B, return_inverse=True)[1]
    # No more groups than samples; those without any are never looked at.
    most = len(group_B)
    ones_B = torch.ones_like(group_B)
    size_B = sequence_sums(ones_B, sequence_N=group_B, num_sequences=most)[group_B]
    sums_G = sequence_sums(rewards_B, sequence_N=group_B, num_sequences=most)
    return rewards_B - sums_G[group_B] / size_B, size_B, group_B
