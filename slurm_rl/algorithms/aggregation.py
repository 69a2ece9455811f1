"""How the losses of tokens become one number: sum(weights × loss) / denominator.

The weights are made once, from the whole rollout, and travel with their tokens; the denominator
is an integer that micro-batches and ranks add up. So the same loss comes out however the rollout
is cut, packed and spread, and no micro-batch knows another.

    sequence  1 / trained tokens of its sequence: a mean over sequences of means over tokens
              (GRPO, arXiv 2402.03300, eq. 3)
    token     1: a mean over tokens (DAPO, arXiv 2503.14476, eq. 8)
    group     sequences of its group / trained tokens of its group: a mean over groups of means
              over their tokens, where a group counts by its sequences (all the same if groups
              are of one size)
    constant  1 / a constant length: sums over tokens, divided by what no response changes
              (Dr. GRPO, arXiv 2503.20783, section 3.2)

The denominator counts the optimizer step's trained tokens for `token` and its sequences for all
others. Token counts are those of whole sequences and groups, clamped to 1, wherever the rollout
is cut; masked tokens are in none.

Legend: B sequences (conversations: a sample, or the samples that are parts of one), R response
tokens of all of them laid end to end, N those of some of them.
"""

from __future__ import annotations

from typing import Literal

import torch

from slurm_rl.algorithms.numerics import sequence_of_tokens, sequence_sums

Aggregation = Literal["sequence", "token", "group", "constant"]


def token_weights(
    mask_R: torch.Tensor,
    *,
    lengths_B: torch.Tensor,
    aggregation: Aggregation = "sequence",
    group_index_B: torch.Tensor | None = None,
    constant_length: float | None = None,
    per_token: bool = False,
) -> torch.Tensor:
    """What each trained token counts by `aggregation`, float32[R]; 0 where mask_R is 0.

    lengths_B and mask_R integer, sum(lengths_B) = R. `group` needs group_index_B, `constant`
    needs constant_length. per_token=True is the same as aggregation="token".
    """
    mask_R = mask_R != 0
    kind = "token" if per_token else aggregation
    if kind == "token":
        return mask_R.to(torch.float32)
    if kind == "constant":
        assert constant_length is not None and constant_length > 0
        return mask_R / constant_length
    sequence_R = sequence_of_tokens(lengths_B, num_tokens=len(mask_R))
    if kind == "sequence":
        return _means(mask_R, sequence_R, torch.ones_like(lengths_B))
    assert group_index_B is not None
    group_B = torch.unique(group_index_B, return_inverse=True)[1]
    # No more groups than sequences.
    members_G = sequence_sums(
        torch.ones_like(group_B), sequence_N=group_B, num_sequences=len(group_B)
    )
    return _means(mask_R, group_B[sequence_R], members_G)


def _means(mask_R: torch.Tensor, owner_R: torch.Tensor, counts_S: torch.Tensor) -> torch.Tensor:
    """What an owner counts, divided over its trained tokens."""
    tokens_S = sequence_sums(mask_R, sequence_N=owner_R, num_sequences=len(counts_S))
    return mask_R * (counts_S / tokens_S.clamp(min=1)).to(torch.float32)[owner_R]


def weighted_sum(values_N: torch.Tensor, *, weights_N: torch.Tensor) -> torch.Tensor:
    """sum(weights_N * values_N), where a weight of 0 drops the value even if it is not finite.

    A plain product would turn 0 × inf of a masked token into NaN. Both float[N].
    """
    kept_N = torch.where(weights_N != 0, values_N, torch.zeros_like(values_N))
    return (kept_N * weights_N).sum()
