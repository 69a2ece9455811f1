"""Numeric ground rules of the algorithms: precision, bounded ratios, sums over sequences.

Legend: N tokens laid end to end, S the sequences (samples, conversations, groups) they are of,
R response tokens of a whole rollout.
"""

from __future__ import annotations

import torch

#: A log-ratio of two policies is held within ± this before its exponential is taken (485 million
#: and its inverse). Beyond it the ratio is constant and its gradient 0: no finite log-probability
#: overflows. No healthy run comes near it; a clip range ends at a log-ratio of about 0.3.
LOG_RATIO_BOUND = 20.0


def as_float(values: torch.Tensor) -> torch.Tensor:
    """The values in float32, or in float64 if they are float64: nothing is cast down."""
    return values if values.dtype == torch.float64 else values.to(torch.float32)


def log_ratio(logprobs_N: torch.Tensor, *, other_logprobs_N: torch.Tensor) -> torch.Tensor:
    """logprobs - other, without a bound."""
    return as_float(logprobs_N) - as_float(other_logprobs_N)


def bounded_exp(log_ratio_N: torch.Tensor) -> torch.Tensor:
    """exp of a log-ratio within ± LOG_RATIO_BOUND; NaN stays NaN, so that a check can see it."""
    return torch.exp(torch.clamp(log_ratio_N, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def importance_ratio(
    logprobs_N: torch.Tensor, *, proximal_logprobs_N: torch.Tensor
) -> torch.Tensor:
    """exp(logprobs - proximal), bounded, and differentiable in `logprobs_N`."""
    return bounded_exp(log_ratio(logprobs_N, other_logprobs_N=proximal_logprobs_N))


def gradient_where_finite(logprobs_N: torch.Tensor, *others_N: torch.Tensor) -> torch.Tensor:
    """The same values; no gradient where they, or any of the others, are not finite.

    0 × NaN is NaN, also in a backward pass. With this a token that counts nothing (weight 0)
    gives nothing to the gradient whatever it holds, and one that counts shows in the loss.
    """
    usable_N = torch.isfinite(logprobs_N)
    for values_N in others_N:
        usable_N = usable_N & torch.isfinite(values_N)
    return torch.where(usable_N, logprobs_N, logprobs_N.detach())


def sequence_of_tokens(lengths_S: torch.Tensor, *, num_tokens: int) -> torch.Tensor:
    """The number of the sequence that each token is of, int64[R], where sum(lengths_S) = R.

    `num_tokens` is R: given, no device has to be waited for.
    """
    numbers_S = torch.arange(len(lengths_S), device=lengths_S.device)
    return torch.repeat_interleave(numbers_S, lengths_S.long(), output_size=num_tokens)


def sequence_sums(
    values_N: torch.Tensor, *, sequence_N: torch.Tensor, num_sequences: int
) -> torch.Tensor:
    """Sum of each sequence's values, [S]: added in float64, integers in int64.

    One after the other on a CPU. On a GPU the order is fixed where torch is asked to be
    deterministic; without, an order can change no more than the last bit of a float64.
    """
    wide = torch.float64 if values_N.is_floating_point() else torch.int64
    sums_S = torch.zeros(num_sequences, dtype=wide, device=values_N.device)
    return sums_S.index_add_(0, sequence_N, values_N.to(wide))


def sequence_means(
    values_N: torch.Tensor, *, sequence_N: torch.Tensor, num_sequences: int
) -> torch.Tensor:
    """Mean of each sequence's values, in their own precision; 0 for a sequence without any."""
    sums_S = sequence_sums(values_N, sequence_N=sequence_N, num_sequences=num_sequences)
    ones_N = torch.ones_like(values_N, dtype=torch.int64)
    counts_S = sequence_sums(ones_N, sequence_N=sequence_N, num_sequences=num_sequences)
    return (sums_S / counts_S.clamp(min=1)).to(values_N.dtype)
