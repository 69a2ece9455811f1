"""What must hold before an optimizer takes a step. Each raises NumericsError with its numbers."""

from __future__ import annotations

import math
from typing import Any

import torch

from slurm_rl.errors import CorruptError, NumericsError
from slurm_rl.train.batch import Samples
from slurm_rl.train.returns import Signals


def check_first_kl(
    samples: Samples, signals: Signals, *, is_own: bool, limit: float
) -> dict[str, float]:
    """The KL to the reference before the update; in iteration 0 it is 0 if that is the policy.

    is_own: whether the reference is the policy that is trained now. Raises NumericsError.
    """
    if signals.reference is None or signals.proximal is None:
        return {}
    mask_R = torch.from_numpy(samples.loss_mask) != 0
    away_R = (signals.proximal - signals.reference)[mask_R].double()
    kl = float(away_R.mean()) if len(away_R) else 0.0
    if is_own and not abs(kl) <= limit:
        raise NumericsError(
            f"before the first optimizer step the policy's KL to the reference is {kl:.3g}, but "
            f"they are the same model; train.check_first_kl allows {limit:.3g}",
            hint="the reference was loaded wrongly, or computes in another precision",
        )
    return {"train/first_kl": kl}


def check_tokens(ids_RK: torch.Tensor, *, below: int) -> None:
    """CorruptError for a token that the policy does not have: its log-prob would be of nothing."""
    largest = int(ids_RK.max()) if ids_RK.numel() else 0
    if largest >= below:
        raise CorruptError(f"the teacher's likeliest tokens hold {largest}; the policy has {below}")


def check_finite(value: Any, *, what: str, where: str) -> None:
    if not math.isfinite(float(value)):
        raise NumericsError(
            f"{what} is {float(value)} at {where}; the optimizer has not taken that step",
            hint="look at the rewards and log-probabilities of this rollout; lower the rate",
        )


def check_first_ratio(value: float, *, limit: float, where: str) -> None:
    # Written so that NaN fails too.
    if not value <= limit:
        raise NumericsError(
            f"before {where} the policy differs from itself: |ratio - 1| is {value:.3g}, "
            f"train.check_first_ratio allows {limit:.3g}",
            hint="the same model gave other log-probabilities twice: dropout, or a kernel that "
            "is not deterministic",
        )
