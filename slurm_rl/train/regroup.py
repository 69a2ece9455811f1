"""Packed micro-batches cut in another way for passes without gradient, and their values put back.

Such passes keep no activations, so that they may hold more tokens. A sample's log-probabilities do
not depend on what is packed beside it, but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from slurm_rl.train.batch import MicroBatch, filled
from slurm_rl.train.packing import first_fit, round_up

PutBack = Callable[[list[torch.Tensor]], list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One sequence of a micro-batch: its tokens `start:stop`, its trained tokens `first:last`."""

    batch: MicroBatch
    start: int
    stop: int
    first: int
    last: int

    @property
    def length(self) -> int:
        return self.stop - self.start


def regroup(
    microbatches: Sequence[MicroBatch], *, max_tokens: int, multiple: int
) -> tuple[list[MicroBatch], PutBack]:
    """The same sequences in micro-batches of at most `max_tokens` tokens, and a function that makes
    values [N] of each of these those of each of `microbatches`.

    Only what a forward pass reads is in the new ones: tokens, their experts, and where and what the
    trained ones are. multiple: what the length of a row must be one of.
    """
    pieces = [piece for batch in microbatches for piece in _sequences(batch)]
    bins = first_fit([piece.length for piece in pieces], max_tokens=max_tokens)
    joined = [_join([pieces[i] for i in own], multiple) for own in bins]

    def put_back(values: list[torch.Tensor]) -> list[torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        for own, values_N in zip(bins, values, strict=True):
            counts = [pieces[i].last - pieces[i].first for i in own]
            found |= dict(zip(own, values_N.split(counts), strict=True))
        ordered = iter(range(len(pieces)))
        return [torch.cat([found[next(ordered)] for _ in b.lengths or ()]) for b in microbatches]

    return joined, put_back


def _sequences(batch: MicroBatch) -> list[_Sequence]:
    assert batch.lengths is not None, "only packed micro-batches are regrouped"
    counts = torch.bincount(batch.sequence_N, minlength=len(batch.lengths)).tolist()
    pieces, start, first = [], 0, 0
    for length, num in zip(batch.lengths, counts, strict=True):
        pieces.append(_Sequence(batch, start, start + length, first, first + num))
        start, first = start + length, first + num
    return pieces


def _join(pieces: list[_Sequence], multiple: int) -> MicroBatch:
    lengths = [piece.length for piece in pieces]
    starts = [sum(lengths[:row]) for row in range(len(pieces))]
    missing = round_up(sum(lengths), multiple) - sum(lengths)
    lengths[-1] += missing

    def trained(name: str) -> torch.Tensor:
        return torch.cat([getattr(p.batch, name)[p.first : p.last] for p in pieces])

    rows = [p.batch.tokens_bS[0, p.start : p.stop] for p in pieces]
    routed = [
        p.batch.routed_bSLK[0, p.start : p.stop] for p in pieces if p.batch.routed_bSLK is not None
    ]
    if routed:
        shape = (missing, *routed[0].shape[1:])
        routed.append(torch.from_numpy(filled(shape)).to(routed[0].device))
    moved = [
        p.batch.position_N[p.first : p.last] - p.start + start
        for p, start in zip(pieces, starts, strict=True)
    ]
    counts = torch.tensor([p.last - p.first for p in pieces])
    return MicroBatch(
        tokens_bS=torch.cat([*rows, rows[0].new_zeros(missing)])[None],
        position_N=torch.cat(moved),
        targets_N=trained("targets_N"),
        sequence_N=torch.arange(len(pieces)).repeat_interleave(counts).to(rows[0].device),
        weights_N=trained("weights_N"),
        rollout_N=trained("rollout_N"),
        served_N=trained("served_N"),
        denominator=0,
        num_sequences=len(pieces),
        lengths=tuple(lengths),
        routed_bSLK=torch.cat(routed)[None] if routed else None,
    )
