"""Small rollouts, made by hand."""

from typing import Any

import numpy as np

from slurm_rl.rollout.samples import SampleBatch


def batch_of(lengths: list[int], **fields: Any) -> SampleBatch:
    """Samples with a prompt of one token and responses of `lengths`, in groups of two."""
    number, total = len(lengths), sum(lengths)
    given = {
        "tokens": np.arange(number + total) % 7,
        "prompt_lengths": np.ones(number),
        "response_lengths": lengths,
        "rollout_logprobs": -np.arange(1, total + 1) / 8,
        "loss_mask": np.ones(total),
        "token_versions": np.zeros(total),
        "rewards": np.arange(number) % 3,
        "group_index": np.arange(number) // 2,
        "sample_index": np.arange(number) % 2,
        "rollout_index": np.arange(number) % 2,
        "weights_version": np.zeros(number),
        "truncated": np.zeros(number),
    } | fields
    kinds = {
        "rollout_logprobs": np.float32,
        "rewards": np.float32,
        "loss_mask": np.uint8,
        "truncated": np.uint8,
        **dict.fromkeys(("group_index", "sample_index", "rollout_index"), np.int64),
    }
    return SampleBatch(
        **{name: np.asarray(values, kinds.get(name, np.int32)) for name, values in given.items()}
    )
