"""How far the engine's log-probabilities lie from the trainer's, and when that is too far.

Measured before the first optimizer step, over the trained tokens that are of the weights which the
rollout served: tokens that a partial rollout brought along are of an older policy, and differ
rightly. With `chain.lag: 1` the gap holds one update as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from slurm_rl.config.train_schema import Train
from slurm_rl.errors import NumericsError
from slurm_rl.train.batch import Samples

NAME = "train/train_rollout_logprob_abs_diff"
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


def measure_gap(samples: Samples, proximal_R: torch.Tensor) -> Gap | None:
    """The gap over the whole rollout; None if no token is to be compared.

    proximal_R: the policy's log-probabilities of the response tokens, float32[R]. The 99th
    percentile is the value below or at which at least 99 % lie.
    """
    served_R = samples.token_versions == np.repeat(
        samples.weights_version, samples.response_lengths.astype(np.int64)
    )
    counts_R = torch.from_numpy((samples.loss_mask != 0) & served_R)
    rollout_R = torch.from_numpy(samples.rollout_logprobs)
    values = (proximal_R - rollout_R).abs()[counts_R].double()
    number = len(values)
    if number == 0:
        return None
    p99 = values.kthvalue(math.ceil(0.99 * number)).values
    return Gap(float(values.mean()), float(p99), float(values.max()), number)


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
