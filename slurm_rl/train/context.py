"""A context rank's part of a micro-batch, and the log-probabilities of all of it.

Every context rank holds the whole micro-batch. Each computes its chunks of every sequence
(`attention.py`), then all get the values of all trained tokens, in the batch's order. So a loss
over whole sequences is exact, and no loss has to know of context parallelism: each rank computes
the same loss, and the gradient that goes back into a rank's chunks is that of its own tokens.
What is summed over ranks (denominators, reports) is counted on context rank 0 alone.

Legend: S tokens of a row, s those of this rank; N trained tokens, n those of this rank.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from slurm_rl.train.attention import chunk_order
from slurm_rl.train.batch import MicroBatch


def row_multiple(config: Any) -> int:
    """What the length of a row must be a multiple of: chunks of context ranks, each of which
    sequence parallelism splits once more."""
    tp_size = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return math.lcm(sequence_multiple(config), config.context_parallel_size * tp_size)


def sequence_multiple(config: Any) -> int:
    """What the length of each packed sequence must be a multiple of."""
    cp_size = int(config.context_parallel_size)
    return 2 * cp_size if cp_size > 1 else 1


def model_inputs(batch: MicroBatch, *, on_device: bool) -> dict[str, Any]:
    """What the model takes: this rank's tokens and their positions, where sequences end, and which
    tokens' output is wanted: the trained ones'.

    on_device: whether the ends must be on the device, for kernels of TransformerEngine; our own
    attention and Megatron's rotary embedding read them on the CPU, and would wait for the GPU.
    """
    tokens_bS, lengths = batch.tokens_bS, _lengths(batch)
    device = tokens_bS.device
    positions_S = torch.cat([torch.arange(length) for length in lengths]).to(device)
    if parallel_state.get_context_parallel_world_size() > 1:
        places_s = _own_places(lengths, device)
        tokens_bS, positions_S = tokens_bS.index_select(1, places_s), positions_S[places_s]
    packed = None
    if batch.lengths is not None:
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        ends = ends.to(device) if on_device else ends
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        )
    return {
        "input_ids": tokens_bS,
        "position_ids": positions_S.expand_as(tokens_bS),
        "attention_mask": None,
        "packed_seq_params": packed,
        "rows_n": own_tokens(batch)[0],
    }


def own_places(batch: MicroBatch) -> torch.Tensor | None:
    """Where this context rank's tokens are among those of a row, in its order; None for all."""
    if parallel_state.get_context_parallel_world_size() == 1:
        return None
    return _own_places(_lengths(batch), batch.tokens_bS.device)


def own_tokens(batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Where the logits of this rank's trained tokens are in its flattened [b, s], int64[n], and
    which of the N they are; None if all."""
    if parallel_state.get_context_parallel_world_size() == 1:
        return batch.position_N, None
    width = batch.tokens_bS.shape[1]
    places_s = _own_places(_lengths(batch), batch.tokens_bS.device)
    here_S = torch.full((width,), -1, dtype=torch.int64, device=places_s.device)
    here_S[places_s] = torch.arange(len(places_s), device=places_s.device)
    column_N = here_S[batch.position_N % width]
    own_n = torch.nonzero(column_N >= 0)[:, 0]
    position_N = batch.position_N // width * len(places_s) + column_N
    return position_N[own_n], own_n


def gather_tokens(
    values_n: tuple[torch.Tensor, ...], own_n: torch.Tensor | None, *, num: int
) -> tuple[torch.Tensor, ...]:
    """Values of all `num` trained tokens on every context rank, from those of each rank's own."""
    if own_n is None:
        return values_n
    group = parallel_state.get_context_parallel_group()
    gathered: tuple[torch.Tensor, ...] = _Gather.apply(own_n, num, group, *values_n)
    return gathered


def counts_here() -> bool:
    """Whether what is summed over ranks is counted on this one: once for all context ranks."""
    return parallel_state.get_context_parallel_rank() == 0


def _lengths(batch: MicroBatch) -> tuple[int, ...]:
    """Of the sequences in a row: a padded row is one."""
    return batch.lengths or (batch.tokens_bS.shape[1],)


def _own_places(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Where this rank's tokens are among those of a row."""
    rank = parallel_state.get_context_parallel_rank()
    size = parallel_state.get_context_parallel_world_size()
    return chunk_order(lengths, cp_rank=rank, cp_size=size, device=device)


class _Gather(torch.autograd.Function):
    """Each token is one rank's, and 0 on the others: their sum is exact."""

    @staticmethod
    def forward(ctx: Any, own_n: Any, num: int, group: Any, *values_n: Any) -> Any:
        ctx.save_for_backward(own_n)
        ctx.set_materialize_grads(False)
        stacked = values_n[0].new_zeros(len(values_n), num)
        stacked[:, own_n] = torch.stack(values_n)
        dist.all_reduce(stacked, group=group)
        return tuple(stacked.unbind())

    @staticmethod
    def backward(ctx: Any, *grads_N: Any) -> Any:
        (own_n,) = ctx.saved_tensors
        own = (None if grad_N is None else grad_N[own_n] for grad_N in grads_N)
        return None, None, None, *own
