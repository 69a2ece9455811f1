"""Advantages from rewards. It knows nothing of tokens: one number a sample.

Legend: B samples.
"""

from __future__ import annotations

import torch

#: Added to the standard deviation, so that a group of equal rewards divides by no zero.
STD_EPSILON = 1e-6


def group_advantages(
    rewards_B: torch.Tensor, *, group_index_B: torch.Tensor, divide_by_std: bool = True
) -> torch.Tensor:
    """GRPO: each reward less its group's mean, over its group's standard deviation.

    rewards_B float, group_index_B integer; returns float32[B]. The denominator is the
    group's unbiased standard deviation + 1e-6; a group of one sample is only centred (its
    advantage is 0), since one sample has no deviation. Groups may have unequal sizes.

    Source: DeepSeekMath (arXiv 2402.03300, eq. of section 4.1.2). Without the division it is
    Dr. GRPO's (arXiv 2503.20783), which removes the bias towards questions of low variance.

    Example: rewards 1, 0 in one group give ±0.5, or ±0.7071 divided by their deviation.
    """
    rewards = rewards_B.to(torch.float32)
    advantages_B = torch.zeros_like(rewards)
    for group in torch.unique(group_index_B):
        members = group_index_B == group
        values = rewards[members]
        centred = values - values.mean()
        if divide_by_std and len(values) > 1:
            centred = centred / (values.std(unbiased=True) + STD_EPSILON)
        advantages_B[members] = centred
    return advantages_B
