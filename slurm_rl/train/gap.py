"""How far the engine's log-probabilities lie from the trainer's, and when that is too far.

Measured before the first optimizer step, over the trained tokens that are of the weights which the
rollout served: tokens that a partial rollout brought along are of an older policy, and differ
rightly. With `chain.lag: 1` the gap holds one update as well.

Mean and maximum are exact. The 99th percentile is read from a histogram that all ranks add up, so
that no rank has to hold the tokens of all; it is the upper edge of a bin, at most 0.6 % too high.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from slurm_rl.config.schema import Train
from slurm_rl.errors import NumericsError
from slurm_rl.train.batch import MicroBatch

NAME = "train/train_rollout_logprob_abs_diff"
#: Bins of equal width in log10, from 1e-8 to 1e3, and one below them for everything smaller.
_PER_DECADE, _LOWEST, _NUM_DECADES = 400, -8, 11
_NUM_BINS = _NUM_DECADES * _PER_DECADE + 1
#: A first gap below it counts as this: an engine that agrees exactly must not be divided by.
FLOOR = 1e-6
_HINT = (
    "the engine and the trainer do not compute the same model: look for quantized or stale weights "
    "in the engine, another attention or sampling setting (top_k, top_p, penalties), a chat "
    "template or tokenizer that re-tokenizes, or bfloat16 where the other has float32"
)


@dataclass(frozen=True, slots=True)
class Gap:
    """|trainer - rollout log-prob| over `num_tokens` tokens."""

    mean: float
    p99: float
    largest: float
    num_tokens: int

    def metrics(self) -> dict[str, float]:
        return {NAME: self.mean, f"{NAME}_p99": self.p99, f"{NAME}_max": self.largest}


def measure_gap(microbatches: Sequence[MicroBatch]) -> Gap | None:
    """The gap over all ranks, equal on each; None if no token is to be compared.

    The micro-batches hold the policy's log-probabilities (`proximal_N`) on the last pipeline rank.
    """
    device = torch.cuda.current_device()
    counts = torch.zeros(_NUM_BINS, dtype=torch.int64)
    total = torch.zeros(2, dtype=torch.float64)
    # Tensor ranks hold the same numbers.
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        own = [
            (batch.proximal_N - batch.rollout_N).abs()[batch.served_N].double().cpu()
            for batch in microbatches
            if batch.proximal_N is not None
        ]
        values = torch.cat([*own, torch.zeros(0, dtype=torch.float64)])
        counts = count_bins(values)
        total[0] = values.sum()
        total[1] = values.max() if len(values) else 0.0
    counts, total = counts.to(device), total.to(device)
    dist.all_reduce(counts)
    dist.all_reduce(total[:1])
    dist.all_reduce(total[1:], op=dist.ReduceOp.MAX)
    num_tokens = int(counts.sum())
    if num_tokens == 0:
        return None
    largest = float(total[1])
    p99 = min(percentile(counts.cpu(), 0.99), largest)
    return Gap(float(total[0]) / num_tokens, p99, largest, num_tokens)


def check_gap(gap: Gap | None, *, train: Train, first: float | None) -> None:
    """Raises NumericsError if the mean is above `train.max_logprob_gap`, or too many times the
    run's first.

    first: the mean of the run's first iteration; None if this is the first.
    """
    if gap is None:
        return
    # Written so that NaN fails too.
    if train.max_logprob_gap is not None and not gap.mean <= train.max_logprob_gap:
        raise NumericsError(
            f"the mean gap between the log-probs of trainer and rollout is {gap.mean:.4g}, "
            f"train.max_logprob_gap allows {train.max_logprob_gap:.4g} "
            f"(p99 {gap.p99:.4g}, max {gap.largest:.4g}); no optimizer step was taken",
            hint=_HINT,
        )
    if train.max_logprob_gap_drift is None or first is None:
        return
    factor = gap.mean / max(first, FLOOR)
    if not factor <= train.max_logprob_gap_drift:
        raise NumericsError(
            f"the mean gap between the log-probs of trainer and rollout is {gap.mean:.4g}, "
            f"{factor:.3g} times the run's first ({first:.4g}); train.max_logprob_gap_drift allows "
            f"{train.max_logprob_gap_drift:.3g}; no optimizer step was taken",
            hint=_HINT,
        )


def count_bins(values: torch.Tensor) -> torch.Tensor:
    """How many of `values` (float64, not negative) are in each bin, int64."""
    place = torch.floor((values.log10() - _LOWEST) * _PER_DECADE) + 1
    place = place.nan_to_num(nan=math.inf).clamp(0, _NUM_BINS - 1).long()
    return torch.bincount(place, minlength=_NUM_BINS)


def percentile(counts: torch.Tensor, share: float) -> float:
    """The upper edge of the bin that holds the value below which `share` of all lie."""
    wanted = math.ceil(share * int(counts.sum()))
    place = int(torch.searchsorted(counts.cumsum(0), wanted))
    return float(10.0 ** (_LOWEST + place / _PER_DECADE))
