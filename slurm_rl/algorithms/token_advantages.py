"""Advantages of every response token of a rollout, from rewards and values.

A masked token (tool output, a template's words) is skipped as if it were not there: what
follows a trained token is the next *trained* token of its sample, nothing that a masked token
holds is used, and its advantage is 0. Nothing here carries a gradient.

Legend: B samples, R response tokens of all of them laid end to end, sum(lengths_B) = R.
"""

from __future__ import annotations

import torch

from slurm_rl.algorithms.advantages import centred_rewards
from slurm_rl.algorithms.numerics import as_float, sequence_of_tokens, sequence_sums

#: Added to the variance before its root is taken, so that equal values divide by no zero.
VARIANCE_EPSILON = 1e-8


def token_rewards(
    rewards_B: torch.Tensor,
    *,
    lengths_B: torch.Tensor,
    mask_R: torch.Tensor,
    kl_R: torch.Tensor | None = None,
    kl_coef: float = 0.0,
) -> torch.Tensor:
    """A sample's reward at its last trained token, less kl_coef × kl_R at each trained token.

    rewards_B float, lengths_B and mask_R integer, kl_R float (`kl_estimate`); returns float[R],
    0 where masked. The reward of a sample without a trained token is nowhere.

    Source: InstructGPT (arXiv 2203.02155, eq. 2) with its penalty taken token by token.
    """
    rewards_B = as_float(rewards_B.detach())
    trained_R = mask_R != 0
    sample_R = sequence_of_tokens(lengths_B, num_tokens=len(mask_R))
    counts_B = sequence_sums(trained_R, sequence_N=sample_R, num_sequences=len(lengths_B))
    # Trained tokens up to here, in all samples; and up to the end of this token's sample.
    last_R = trained_R & (trained_R.cumsum(0) == counts_B.cumsum(0)[sample_R])
    out_R = torch.where(last_R, rewards_B[sample_R], 0.0)
    if kl_R is not None:
        out_R = out_R - kl_coef * _where_trained(kl_R, trained_R)
    return out_R


def reinforce_plus_plus(
    token_rewards_R: torch.Tensor,
    *,
    lengths_B: torch.Tensor,
    mask_R: torch.Tensor,
    gamma: float = 1.0,
) -> torch.Tensor:
    """REINFORCE++: the discounted return from each token on, whitened over the rollout.

    Returns float[R], 0 where masked. G_t = r_t + gamma × G_next; the denominator is the standard
    deviation of all trained tokens (`whiten`), not of a group.

    Source: REINFORCE++ (arXiv 2501.03262).
    """
    trained_R = mask_R != 0
    rewards_R = _where_trained(token_rewards_R, trained_R)
    last_R = _ends(lengths_B, like_R=mask_R)
    returns_R = _scan(rewards_R, decay_R=_decay(trained_R, last_R, gamma, rewards_R.dtype))
    return whiten(returns_R, mask_R=mask_R)


def reinforce_plus_plus_baseline(
    rewards_B: torch.Tensor,
    *,
    group_index_B: torch.Tensor,
    lengths_B: torch.Tensor,
    mask_R: torch.Tensor,
) -> torch.Tensor:
    """REINFORCE++ with baseline: the reward less its group's mean, whitened over the rollout.

    Every trained token of a sample has the same value before whitening, so longer samples count
    more in the mean and the deviation. Returns float[R], 0 where masked. A group of one sample
    is its own mean and counts 0. Source: REINFORCE++ (arXiv 2501.03262).
    """
    centred_B = centred_rewards(rewards_B, group_index_B=group_index_B)
    sample_R = sequence_of_tokens(lengths_B, num_tokens=len(mask_R))
    return whiten(centred_B[sample_R], mask_R=mask_R)


def gae(
    token_rewards_R: torch.Tensor,
    *,
    values_R: torch.Tensor,
    lengths_B: torch.Tensor,
    mask_R: torch.Tensor,
    gamma: float = 1.0,
    lambd: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation: (advantages_R, returns_R), both 0 where masked.

    delta_t = r_t + gamma × V_next - V_t;  A_t = delta_t + gamma × lambd × A_next;
    return_t = A_t + V_t, the critic's target. `next` is the next trained token of the sample;
    after the last both V and A are 0: a response is an episode that ends. No denominator: the
    advantages are not whitened (`whiten`). Source: GAE (arXiv 1506.02438, eq. 16).
    """
    trained_R = mask_R != 0
    rewards_R = _where_trained(token_rewards_R, trained_R)
    values_R = _where_trained(values_R, trained_R)
    last_R = _ends(lengths_B, like_R=mask_R)
    # The value of this token if it is trained, else of the next one that is.
    onwards_R = _scan(values_R, decay_R=(~trained_R & ~last_R).to(values_R.dtype))
    next_R = torch.where(last_R, 0.0, _shift(onwards_R, 1))
    delta_R = torch.where(trained_R, rewards_R + gamma * next_R - values_R, 0.0)
    decay_R = _decay(trained_R, last_R, gamma * lambd, delta_R.dtype)
    advantages_R = torch.where(trained_R, _scan(delta_R, decay_R=decay_R), 0.0)
    return advantages_R, advantages_R + values_R


def whiten(
    values_R: torch.Tensor, *, mask_R: torch.Tensor, shift_mean: bool = True
) -> torch.Tensor:
    """Values of trained tokens with variance 1, and mean 0 if `shift_mean`; 0 where masked.

    (x - mean) / sqrt(variance + 1e-8), where mean and unbiased variance are over the trained
    tokens of all samples given: call it on the whole rollout, not on a rank's share of it.
    shift_mean=False adds the mean back. With fewer than two trained tokens there is no variance:
    the value is only centred (0), or left as it is.
    """
    trained_R = mask_R != 0
    wide_R = _where_trained(values_R, trained_R).double()
    count = trained_R.sum()
    mean = wide_R.sum() / count.clamp(min=1)
    centred_R = torch.where(trained_R, wide_R - mean, 0.0)
    variance = (centred_R**2).sum() / (count - 1).clamp(min=1)
    scale = torch.where(count > 1, torch.rsqrt(variance + VARIANCE_EPSILON), 1.0)
    scaled_R = centred_R * scale + (0.0 if shift_mean else mean)
    return torch.where(trained_R, scaled_R, 0.0).to(as_float(values_R).dtype)


def _where_trained(values_R: torch.Tensor, trained_R: torch.Tensor) -> torch.Tensor:
    return torch.where(trained_R, as_float(values_R.detach()), 0.0)


def _ends(lengths_B: torch.Tensor, *, like_R: torch.Tensor) -> torch.Tensor:
    """bool[R]: whether a token, trained or not, is the last of its sample."""
    sample_R = sequence_of_tokens(lengths_B, num_tokens=len(like_R))
    return torch.cat([sample_R[1:] != sample_R[:-1], sample_R.new_ones(len(sample_R[:1])) != 0])


def _decay(
    trained_R: torch.Tensor, last_R: torch.Tensor, factor: float, dtype: torch.dtype
) -> torch.Tensor:
    """What the next token's sum counts for: `factor`; all of it to skip a token; 0 at an end."""
    decay_R = torch.full(trained_R.shape, factor, dtype=dtype, device=trained_R.device)
    return torch.where(last_R, 0.0, torch.where(trained_R, decay_R, 1.0))


def _scan(values_R: torch.Tensor, *, decay_R: torch.Tensor) -> torch.Tensor:
    """y_t = values_t + decay_t × y_{t+1}, by doubling: log2(R) steps instead of R."""
    reach = 1
    while reach < len(values_R):
        values_R = values_R + decay_R * _shift(values_R, reach)
        decay_R = decay_R * _shift(decay_R, reach)
        reach *= 2
    return values_R


def _shift(values_R: torch.Tensor, by: int) -> torch.Tensor:
    """values_{t + by}, and 0 past the end."""
    return torch.nn.functional.pad(values_R[by:], (0, min(by, len(values_R))))
