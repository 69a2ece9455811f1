"""The off-policy correction of a rollout: what each token's loss is multiplied by.

Owns which rules the settings ask for; the formulas are `algorithms/corrections.py`'s. Computed once
from fixed log-probabilities, for the whole rollout, by every rank.

Legend: B samples, R response tokens of all of them, T trained tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from slurm_rl.algorithms.corrections import (
    Correction,
    ImportanceRule,
    RejectionRule,
    off_policy_correction,
)
from slurm_rl.algorithms.numerics import sequence_of_tokens
from slurm_rl.config.train_schema import Train
from slurm_rl.errors import ConfigError
from slurm_rl.train.batch import Samples
from slurm_rl.train.returns import Signals

#: A custom correction: proximal and rollout log-probs float32[T], the sample of each token
#: int64[T], the number of samples, and `train` -> weights float[T].
CustomCorrection = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, Train], Any]


def correct(
    samples: Samples, signals: Signals, *, train: Train, custom: CustomCorrection | None = None
) -> tuple[torch.Tensor | None, dict[str, float]]:
    """(weights float32[R], metrics); (None, {}) if nothing is to be corrected.

    Raises ConfigError if the user's own correction gives something else.
    """
    importance, rejection = read_rules(train)
    if importance is None and rejection is None and custom is None:
        return None, {}
    trained_R = torch.from_numpy(samples.loss_mask) != 0
    lengths_B = torch.from_numpy(samples.response_lengths.astype(np.int64))
    sequence_T = sequence_of_tokens(lengths_B, num_tokens=len(trained_R))[trained_R]
    proximal_T = signals.need("proximal")[trained_R]
    rollout_T = torch.from_numpy(samples.rollout_logprobs)[trained_R]
    weights_R = torch.zeros(len(trained_R))
    if custom is not None:
        own = custom(proximal_T, rollout_T, sequence_T, len(lengths_B), train)
        weights_R[trained_R] = _checked(own, len(proximal_T))
        return weights_R, {}
    found = off_policy_correction(
        proximal_T,
        rollout_logprobs_N=rollout_T,
        sequence_N=sequence_T,
        num_sequences=len(lengths_B),
        importance=importance,
        rejection=rejection,
    )
    weights_R[trained_R] = found.weights_N
    return weights_R, _metrics(found)


def read_rules(train: Train) -> tuple[ImportanceRule | None, RejectionRule | None]:
    """What the settings ask for."""
    importance, rejection = None, None
    if train.use_tis:
        low, high = train.tis_clip_low, train.tis_clip
        importance = ImportanceRule(train.tis_level, train.tis_mode, low, high)
    if train.rejection is not None:
        rule = train.rejection
        rejection = RejectionRule(rule.level, rule.low, rule.high)
    return importance, rejection


def _metrics(found: Correction) -> dict[str, float]:
    number = max(len(found.weights_N), 1)
    return {
        "train/tis": float(found.weight_sum) / number,
        "train/tis_max": float(found.weight_max),
        "train/tis_clipfrac": float(found.num_outside) / number,
        "train/rejected_frac": float(found.num_rejected) / number,
    }


def _checked(weights_T: Any, number: int) -> torch.Tensor:
    if not torch.is_tensor(weights_T) or weights_T.shape != (number,):
        shown = tuple(weights_T.shape) if torch.is_tensor(weights_T) else type(weights_T).__name__
        raise ConfigError(
            f"train.custom_correction_path returned {shown}, not float[{number}]",
            hint="one weight for each trained token",
        )
    return weights_T.detach().to(torch.float32)
