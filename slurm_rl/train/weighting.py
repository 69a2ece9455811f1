"""What each response token of a rollout counts in the loss. Denominators know no micro-batch.

Legend: R response tokens of all samples, U conversations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from slurm_rl.config.train_schema import Update
from slurm_rl.errors import ConfigError
from slurm_rl.train.batch import Samples, rollout_weights

#: A custom reducer: mask uint8[R], lengths int64[B], group index int64[B] and the section ->
#: float[R], each token's weight; the denominator is the number of conversations.
CustomReducer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any], torch.Tensor]


def counts_tokens(role: Update) -> bool:
    """Whether the denominator is the number of trained tokens, not of conversations."""
    if getattr(role, "custom_reducer_path", None) is not None:
        return False
    asked = role.megatron.get("calculate_per_token_loss", False)
    return role.loss_aggregation == "token" or bool(asked)


def loss_weights(
    samples: Samples, *, role: Update, custom: CustomReducer | None = None
) -> torch.Tensor:
    """`token_weights` of the whole rollout as the role asks for it, float32[R]."""
    mask_R = torch.from_numpy(samples.loss_mask)
    if custom is not None:
        lengths_B = torch.from_numpy(samples.response_lengths.astype(np.int64))
        return _checked(
            custom(mask_R, lengths_B, torch.from_numpy(samples.group_index), role), mask_R
        )
    return rollout_weights(
        samples,
        aggregation="token" if counts_tokens(role) else role.loss_aggregation,
        constant_length=role.loss_constant_length,
    )


def _checked(weights_R: Any, mask_R: torch.Tensor) -> torch.Tensor:
    if not torch.is_tensor(weights_R) or weights_R.shape != mask_R.shape:
        raise ConfigError(
            f"train.custom_reducer_path returned {type(weights_R).__name__}, not "
            f"float[{len(mask_R)}]",
            hint="one weight for each response token",
        )
    return torch.where(mask_R != 0, weights_R.detach().to(torch.float32), 0.0)
