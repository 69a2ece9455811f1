"""From a rollout to micro-batches of tensors: who trains on what, in which order.

Owns the cut into optimizer steps (global batches), data-parallel ranks and micro-batches, and what
a micro-batch holds. No sample is dropped, and each is in exactly one step: steps take the rollout's
order (by group, then sample), or the order that is asked for. Everything is known to every rank,
since every rank reads the whole rollout.

Micro-batches are padded, a row a sample, `micro_batch_size` at a time and in order; or packed, the
samples end to end in one row, under a token budget (`packing.py`).

Samples that are parts of one conversation (`rollout_index`) count as one: in the global batch,
in the denominators, and in the statistics of their group.

Legend: B samples, U conversations (mostly of one sample each), R response tokens of all of them;
b rows of a micro-batch, S their padded length, N their trained tokens laid end to end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from slurm_rl.algorithms.losses import token_weights
from slurm_rl.errors import DataError
from slurm_rl.train.packing import Budget, plan_packed, round_up


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
    @property
    def routed_experts(self) -> NDArray[np.uint8] | None: ...


@dataclass(slots=True)
class MicroBatch:
    """One forward pass. Masked tokens are in `tokens_bS` and in nothing else.

    tokens_bS:   int64, padded at the end; packed samples are one row.
    lengths:     of packed samples, each with its padding; None if each sample has a row.
    position_N:  where in the flattened [b, S] the logits are that predict each trained token.
    targets_N:   the trained tokens; weights_N their weights (`token_weights`).
    sequence_N:  which of its `num_sequences` samples each is part of, from 0.
    served_N:    bool, whether a token is of the weights that the rollout served, not of older ones.
    routed_bSLK: uint8, the experts of each token in each layer, where they are replayed.
    arrays:      what else goes with the trained tokens, by name: `advantages`, `values`, ….
    denominator: what this micro-batch adds to the step's denominator.
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
    lengths: tuple[int, ...] | None = field(default=None)
    routed_bSLK: torch.Tensor | None = field(default=None)
    arrays: dict[str, torch.Tensor] = field(default_factory=dict)

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


def cut_steps(
    sizes: Sequence[int], *, global_batch_size: int, order: Sequence[int] | None = None
) -> list[list[int]]:
    """Sample numbers of each optimizer step.

    sizes: samples of each conversation; a step takes `global_batch_size` conversations, the last
    one perhaps fewer. order: of the conversations, theirs in the rollout if None.
    """
    ends = np.cumsum(sizes).tolist()
    turns = list(range(len(sizes))) if order is None else list(order)
    return [
        [
            i
            for u in turns[start : start + global_batch_size]
            for i in range(ends[u] - sizes[u], ends[u])
        ]
        for start in range(0, len(turns), global_batch_size)
    ]


def plan_steps(
    sizes: Sequence[int],
    *,
    global_batch_size: int,
    micro_batch_size: int,
    dp_size: int,
    order: Sequence[int] | None = None,
    lengths: Sequence[int] = (),
    budget: Budget | None = None,
) -> list[list[list[list[int]]]]:
    """Sample numbers by [step][data-parallel rank][micro-batch].

    sizes, global_batch_size, order: see `cut_steps`. With a `budget` micro-batches are packed,
    and `lengths` are the samples' tokens; without, ranks take equal shares in order, and
    `micro_batch_size` samples make a micro-batch. Every rank gets at least one, perhaps an empty
    one: a rank without work would leave the others waiting.

    Example: 5 conversations of one sample, steps of 4, micro-batches of 1, 2 ranks:
    [[[[0], [1]], [[2], [3]]], [[[4]], [[]]]].
    """
    steps = []
    for own in cut_steps(sizes, global_batch_size=global_batch_size, order=order):
        if budget is not None:
            ranks = plan_packed(own, lengths, num_ranks=dp_size, budget=budget)
        else:
            share = -(-len(own) // dp_size)
            shares = [own[r * share : (r + 1) * share] for r in range(dp_size)]
            ranks = [_cut(members, micro_batch_size) for members in shares]
        steps.append([batches or [[]] for batches in ranks])
    return steps


@dataclass(frozen=True, slots=True)
class _Places:
    """What is known of each trained token of a micro-batch.

    position, target, r, row, sample: of each trained token, int64[N]: where its logits are, the
    token, its place in the whole rollout, and its sample, in the micro-batch and in the rollout.
    """

    position: torch.Tensor
    target: torch.Tensor
    r: torch.Tensor
    row: torch.Tensor
    sample: torch.Tensor


def pack_microbatch(
    samples: Samples,
    members: Sequence[int],
    *,
    arrays_R: Mapping[str, torch.Tensor],
    weights_R: torch.Tensor,
    per_token: bool,
    length_multiple: int = 1,
    sequence_multiple: int | None = None,
    routed_TLK: NDArray[np.uint8] | None = None,
) -> MicroBatch:
    """The samples `members` as one micro-batch; none give one sequence of padding.

    arrays_R: what goes with the response tokens of the whole rollout, by name. length_multiple:
    rows are padded to a multiple of it. sequence_multiple: pack the samples into one row, each
    padded to a multiple of this; None: a row each. routed_TLK: the experts of every token.
    """
    all_lengths = sample_lengths(samples)
    own_lengths = [int(all_lengths[i]) for i in members]
    starts, shape, lengths = _lay_out(own_lengths, length_multiple, sequence_multiple)
    ends = np.cumsum(all_lengths)
    sources = [slice(ends[i] - all_lengths[i], ends[i]) for i in members]
    tokens = np.zeros(shape[0] * shape[1], np.int64)
    _place(samples.tokens, sources, starts, into=tokens)
    places = _find_trained(samples, members, tokens=tokens, starts=starts)
    return MicroBatch(
        tokens_bS=torch.from_numpy(tokens.reshape(shape)),
        position_N=places.position,
        targets_N=places.target,
        sequence_N=places.row,
        weights_N=weights_R[places.r],
        rollout_N=torch.from_numpy(samples.rollout_logprobs)[places.r],
        served_N=torch.from_numpy(samples.token_versions)[places.r]
        == torch.from_numpy(samples.weights_version)[places.sample],
        denominator=len(places.target) if per_token else _count_firsts(samples, members),
        num_sequences=max(len(members), 1),
        lengths=lengths,
        routed_bSLK=_route(routed_TLK, sources, starts, shape=shape),
        arrays={name: values_R[places.r] for name, values_R in arrays_R.items()},
    )


def _place(
    values_T: NDArray[Any], sources: list[slice], starts: list[int], *, into: NDArray[Any]
) -> NDArray[Any]:
    """`into`, with each sample's part of the rollout's tokens where it starts among the rows'."""
    flat = into.reshape(-1, *values_T.shape[1:])
    for source, start in zip(sources, starts, strict=True):
        part = values_T[source]
        flat[start : start + len(part)] = part
    return into


def _route(
    routed_TLK: NDArray[np.uint8] | None,
    sources: list[slice],
    starts: list[int],
    *,
    shape: tuple[int, int],
) -> torch.Tensor | None:
    """The experts of the rows' tokens, and any of their padding."""
    if routed_TLK is None:
        return None
    into = filled((*shape, *routed_TLK.shape[1:]))
    return torch.from_numpy(_place(routed_TLK, sources, starts, into=into))


def _lay_out(
    lengths: Sequence[int], length_multiple: int, sequence_multiple: int | None
) -> tuple[list[int], tuple[int, int], tuple[int, ...] | None]:
    """Where each sample starts among the flattened tokens, the shape of these, packed lengths."""
    if sequence_multiple is None:
        width = round_up(max(lengths, default=1), length_multiple)
        return [row * width for row in range(len(lengths))], (max(len(lengths), 1), width), None
    packed = [round_up(length, sequence_multiple) for length in lengths or [1]]
    total = round_up(sum(packed), math.lcm(length_multiple, sequence_multiple))
    starts = [sum(packed[:row]) for row in range(len(lengths))]
    packed[-1] += total - sum(packed)
    return starts, (1, total), tuple(packed)


def _find_trained(
    samples: Samples, members: Sequence[int], *, tokens: NDArray[np.int64], starts: list[int]
) -> _Places:
    """The trained tokens of `members`, whose samples start at `starts` of `tokens`."""
    response_ends = np.cumsum(samples.response_lengths, dtype=np.int64)
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in _Places.__slots__}
    for row, i in enumerate(members):
        trained = np.flatnonzero(samples.loss_mask[_response(samples, response_ends, i)])
        place = trained + int(samples.prompt_lengths[i]) + starts[row]
        parts["position"].append(place - 1)
        parts["target"].append(tokens[place])
        parts["r"].append(trained + response_ends[i] - samples.response_lengths[i])
        parts["row"].append(np.full(len(trained), row))
        parts["sample"].append(np.full(len(trained), i))
    return _Places(
        **{
            name: torch.from_numpy(
                np.concatenate([*values, np.zeros(0, np.int64)]).astype(np.int64)
            )
            for name, values in parts.items()
        }
    )


def rollout_weights(samples: Samples, **options: Any) -> torch.Tensor:
    """`token_weights` of the whole rollout, float32[R]: denominators know no micro-batch.

    options: `aggregation` and what belongs to it.
    """
    sizes_U = conversation_sizes(samples)
    starts_U = np.cumsum(sizes_U) - sizes_U
    lengths_U = np.add.reduceat(samples.response_lengths.astype(np.int64), starts_U)
    return token_weights(
        torch.from_numpy(samples.loss_mask),
        lengths_B=torch.from_numpy(lengths_U),
        group_index_B=torch.from_numpy(samples.group_index[starts_U]),
        **options,
    )


def check_samples(
    samples: Samples, *, vocab_size: int, max_positions: int, is_graded: bool = True
) -> None:
    """DataError unless every sample can be trained on by this model.

    is_graded: False for a model that only scores them; their rewards may be open still.

    Checked: there are samples; prompts are not empty; lengths fit the model; tokens are in the
    vocabulary; rewards and log-probabilities are finite.
    """
    lengths = sample_lengths(samples)
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
        (
            is_graded and not np.isfinite(samples.rewards).all(),
            "a reward is not finite",
        ),
        (not np.isfinite(logprobs).all(), "a rollout log-probability is not finite"),
    )
    for wrong, message in checks:
        if wrong:
            raise DataError(f"the rollout cannot be trained on: {message}")


def filled(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Experts [..., K] of tokens that no engine saw: K different ones, on which nothing depends."""
    return np.broadcast_to(np.arange(shape[-1], dtype=np.uint8), shape).copy()


def sample_lengths(samples: Samples) -> NDArray[np.int64]:
    """Tokens of each sample, prompt and response, int64[B]."""
    lengths: NDArray[np.int64] = samples.prompt_lengths.astype(np.int64) + samples.response_lengths
    return lengths


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
