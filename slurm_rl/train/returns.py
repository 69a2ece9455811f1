"""Advantages of a whole rollout, one for each response token.

Owns the way from rewards, and from what other stages computed, to the arrays that the loss reads.
Every rank computes them for the whole rollout: whitening and group statistics know no layout.
Samples that are parts of one conversation (`rollout_index`) count as one in their group.

Legend: B samples, U conversations, R response tokens of all samples.
"""

from __future__ import annotations

import numpy as np
import torch

from slurm_rl.algorithms.advantages import group_advantages
from slurm_rl.train.batch import Samples, conversation_sizes


def sample_advantages(samples: Samples, *, divide_by_std: bool) -> torch.Tensor:
    """GRPO's advantage of every sample, float32[B] (`group_advantages`).

    A conversation counts once in its group, with the mean of its samples' rewards; all of its
    samples have its advantage.
    """
    sizes_U = conversation_sizes(samples)
    starts_U = np.cumsum(sizes_U) - sizes_U
    rewards_U = np.add.reduceat(samples.rewards, starts_U) / sizes_U.astype(np.float32)
    advantages_U = group_advantages(
        torch.from_numpy(rewards_U),
        group_index_B=torch.from_numpy(samples.group_index[starts_U]),
        divide_by_std=divide_by_std,
    )
    return advantages_U.repeat_interleave(torch.from_numpy(sizes_U))


def spread(values_B: torch.Tensor, samples: Samples) -> torch.Tensor:
    """One value a sample as one a response token, [R]."""
    return values_B.repeat_interleave(torch.from_numpy(samples.response_lengths.astype(np.int64)))
