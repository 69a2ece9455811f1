"""From a rollout to padded micro-batches of tensors: who trains on what, in which order.

Owns the cut into optimizer steps (global batches), data-parallel ranks and micro-batches. It
neither drops nor shuffles a sample: the rollout's order (by group, then sample) is the
training order, and each sample is in exactly one step. Everything is known to every rank,
since every rank reads the whole rollout.

Samples that are parts of one conversation (`rollout_index`) count as one: in the global batch,
in the denominators, and in the statistics of their group.

Legend: B samples, U conversations (mostly of one sample each), R response tokens of all of them;
b sequences of a micro-batch, S their padded length, N their trained tokens laid end to end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from slurm_rl.algorithms.losses import token_weights
from slurm_rl.errors import DataError


class Samples(Protocol):
    """The arrays of a rollout: what `samples.safetensors` holds and training needs."""

    @property
    def tokens(self) -> NDArray[np.int32]: ...
    @property
    def prompt_lengths(self) -> NDArray[np.int32]: ...
    @property
    def response_lengths(self) -> NDArray[np.int32]: ...
    @property
    def rollout_logprobs(self) -> NDArray[np.float32]: ...
    @property
    def loss_mask(self) -> NDArray[np.uint8]: ...
    @property
    def rewards(self) -> NDArray[np.float32]: ...
    @property
    def group_index(self) -> NDArray[np.int64]: ...
    @property
    def rollout_index(self) -> NDArray[np.int64]: ...
    @property
    def token_versions(self) -> NDArray[np.int32]: ...
    @property
    def weights_version(self) -> NDArray[np.int32]: ...


@dataclass(slots=True)
class MicroBatch:
    """One forward pass. Masked tokens are in `tokens_bS` and in nothing else.

    tokens_bS:   int64, padded at the end.
    position_N:  where in the flattened [b, S] the logits are that predict each trained token.
    targets_N:   the trained tokens; weights_N their weights (`token_weights`).
    sequence_N:  which of its `num_sequences` samples each is part of, from 0.
    served_N:    bool, whether a token is of the weights that the rollout served, not of older ones.
    arrays:      what else goes with the trained tokens, by name: `advantages`, `values`, ….
    denominator: what this micro-batch adds to the step's denominator.
    Filled by the step before the first update: proximal_N, reference_N, correction_N.
    """

    tokens_bS: torch.Tensor
    position_N: torch.Tensor
    targets_N: torch.Tensor
    sequence_N: torch.Tensor
    weights_N: torch.Tensor
    rollout_N: torch.Tensor
    served_N: torch.Tensor
    denominator: int
    num_sequences: int
    arrays: dict[str, torch.Tensor] = field(default_factory=dict)
    proximal_N: torch.Tensor | None = field(default=None)
    reference_N: torch.Tensor | None = field(default=None)
    correction_N: torch.Tensor | None = field(default=None)

    def to(self, device: Any) -> MicroBatch:
        """The same with every tensor on `device`."""
        values: dict[str, Any] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            values[name] = value.to(device) if torch.is_tensor(value) else value
        values["arrays"] = {name: tensor.to(device) for name, tensor in self.arrays.items()}
        return MicroBatch(**values)


def conversation_sizes(samples: Samples) -> NDArray[np.int64]:
    """How many samples each conversation has, int64[U], in order.

    Raises DataError if the parts of one do not follow each other.
    """
    first_B = _is_first(samples)
    pairs = np.stack([samples.group_index, samples.rollout_index])
    if np.unique(pairs, axis=1).shape[1] != int(first_B.sum()):
        raise DataError(
            "the rollout cannot be trained on: the samples of one conversation (rollout_index) "
            "do not follow each other in their group",
            hint="number them without a gap, in sample_index",
        )
    starts = np.append(np.flatnonzero(first_B), len(first_B))
    return np.diff(starts)


def plan_steps(
    sizes: Sequence[int], *, global_batch_size: int, micro_batch_size: int, dp_size: int
) -> list[list[list[list[int]]]]:
    """Sample numbers by [step][data-parallel rank][micro-batch].

    sizes: samples of each conversation; a step takes `global_batch_size` conversations, the last
    one perhaps fewer. Every rank of a step gets at least one micro-batch, perhaps an empty one: a
    rank without work would leave the others waiting.

    Example: 5 conversations of one sample, steps of 4, micro-batches of 1, 2 ranks:
    [[[[0], [1]], [[2], [3]]], [[[4]], [[]]]].
    """
    ends = [0, *np.cumsum(sizes).tolist()]
    steps = []
    for start in range(0, len(sizes), global_batch_size):
        members = list(range(ends[start], ends[min(start + global_batch_size, len(sizes))]))
        share = -(-len(members) // dp_size)
        ranks = [members[r * share : (r + 1) * share] for r in range(dp_size)]
        steps.append([_cut(own, micro_batch_size) or [[]] for own in ranks])
    return steps


#: What is known of each trained token: where its logits are, the token, where it is in the whole
#: rollout, and which sample it is of, in the micro-batch and in the rollout.
_PLACES = ("position", "target", "r", "row", "sample")


# long: one loop that says where each trained token is
def pack_microbatch(
    samples: Samples,
    members: Sequence[int],
    *,
    arrays_R: Mapping[str, torch.Tensor],
    weights_R: torch.Tensor,
    per_token: bool,
    length_multiple: int = 1,
) -> MicroBatch:
    """The samples `members` as one padded micro-batch; none give one padding sequence.

    arrays_R: what goes with the response tokens of the whole rollout, by name.
    """
    lengths = samples.prompt_lengths.astype(np.int64) + samples.response_lengths
    ends, response_ends = np.cumsum(lengths), np.cumsum(samples.response_lengths, dtype=np.int64)
    width = max([int(lengths[i]) for i in members], default=1)
    width = -(-width // length_multiple) * length_multiple
    tokens = np.zeros((max(len(members), 1), width), np.int64)
    parts: dict[str, list[NDArray[Any]]] = {
        n: [] for n in ("position", "target", "r", "row", "sample")
    }
    for row, i in enumerate(members):
        own = samples.tokens[ends[i] - lengths[i] : ends[i]]
        tokens[row, : len(own)] = own
        trained = np.flatnonzero(samples.loss_mask[_response(samples, response_ends, i)])
        place = trained + int(samples.prompt_lengths[i])
        parts["position"].append(row * width + place - 1)
        parts["target"].append(own[place])
        parts["r"].append(trained + response_ends[i] - samples.response_lengths[i])
        parts["row"].append(np.full(len(trained), row))
        parts["sample"].append(np.full(len(trained), i))
    joined = {
        name: torch.from_numpy(np.concatenate([*values, np.zeros(0, np.int64)]).astype(np.int64))
        for name, values in parts.items()
    }
    return MicroBatch(
        tokens_bS=torch.from_numpy(tokens),
        position_N=joined["position"],
        targets_N=joined["target"],
        sequence_N=joined["row"],
        weights_N=weights_R[joined["r"]],
        rollout_N=torch.from_numpy(samples.rollout_logprobs)[joined["r"]],
        served_N=torch.from_numpy(samples.token_versions)[joined["r"]]
        == torch.from_numpy(samples.weights_version)[joined["sample"]],
        denominator=len(joined["target"]) if per_token else _count_firsts(samples, members),
        num_sequences=max(len(members), 1),
        arrays={name: values_R[joined["r"]] for name, values_R in arrays_R.items()},
    )


def rollout_weights(samples: Samples, *, per_token: bool) -> torch.Tensor:
    """`token_weights` of the whole rollout, float32[R]: denominators know no micro-batch."""
    sizes_U = conversation_sizes(samples)
    lengths_U = np.add.reduceat(
        samples.response_lengths.astype(np.int64), np.cumsum(sizes_U) - sizes_U
    )
    return token_weights(
        torch.from_numpy(samples.loss_mask),
        lengths_B=torch.from_numpy(lengths_U),
        per_token=per_token,
    )


def check_samples(samples: Samples, *, vocab_size: int, max_positions: int) -> None:
    """DataError unless every sample can be trained on by this model.

    Checked: there are samples; prompts are not empty; lengths fit the model; tokens are in the
    vocabulary; rewards and log-probabilities are finite.
    """
    lengths = samples.prompt_lengths.astype(np.int64) + samples.response_lengths
    logprobs = samples.rollout_logprobs[samples.loss_mask != 0]
    checks = (
        (len(samples.rewards) == 0, "there are no samples"),
        (bool((samples.prompt_lengths < 1).any()), "a sample has an empty prompt"),
        (
            bool((lengths > max_positions).any()),
            f"a sample has {lengths.max(initial=0)} tokens, the model takes {max_positions}",
        ),
        (
            bool((samples.tokens < 0).any() or (samples.tokens >= vocab_size).any()),
            f"a token is outside the model's vocabulary of {vocab_size}",
        ),
        (not np.isfinite(samples.rewards).all(), "a reward is not finite"),
        (not np.isfinite(logprobs).all(), "a rollout log-probability is not finite"),
    )
    for wrong, message in checks:
        if wrong:
            raise DataError(f"the rollout cannot be trained on: {message}")


def _is_first(samples: Samples) -> NDArray[np.bool_]:
    """bool[B]: whether a sample is the first of its conversation."""
    first_B = np.ones(len(samples.group_index), np.bool_)
    for index in (samples.group_index, samples.rollout_index):
        first_B[1:] &= index[1:] == index[:-1]
    return np.append(first_B[:1], ~first_B[1:])


def _count_firsts(samples: Samples, members: Sequence[int]) -> int:
    """A conversation adds its one to the denominator where its first sample is."""
    return int(_is_first(samples)[list(members)].sum())


def _response(samples: Samples, ends: NDArray[np.int64], i: int) -> slice:
    return slice(int(ends[i] - samples.response_lengths[i]), int(ends[i]))


def _cut(items: list[int], size: int) -> list[list[int]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
