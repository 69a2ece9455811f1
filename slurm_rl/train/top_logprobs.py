"""The policy's log-probabilities of the tokens that a teacher finds likeliest.

Legend: N trained tokens, K tokens at each, V vocabulary columns of this tensor rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from slurm_rl.errors import ModelError
from slurm_rl.train.batch import MicroBatch
from slurm_rl.train.context import gather_tokens, own_tokens
from slurm_rl.train.forward import Engine, count, run_microbatches

#: Logit of a padding column: its exponential is 0.
_NOWHERE = -1e30


def predict_top(engine: Engine, batch: MicroBatch, logits_bSV: torch.Tensor) -> torch.Tensor:
    """Log-probabilities float32[N, K] at `batch.arrays["top_ids"]`, with gradient.

    At the rollout's temperature, over the whole vocabulary.
    """
    position_n, own_n = own_tokens(batch)
    ids_NK = batch.arrays["top_ids"]
    found_nK = logprobs_at(
        logits_bSV.flatten(0, 1).index_select(0, position_n),
        ids_NK=ids_NK if own_n is None else ids_NK[own_n],
        temperature=engine.temperature,
        vocab_size=engine.vocab_size,
        group=parallel_state.get_tensor_model_parallel_group(),
    )
    columns = tuple(found_nK.unbind(dim=1))
    return torch.stack(gather_tokens(columns, own_n, num=len(batch.targets_N)), dim=1)


def likeliest_tokens(
    engine: Engine, microbatches: list[MicroBatch], *, num: int
) -> list[torch.Tensor]:
    """Of each micro-batch's trained tokens, without gradient: columns float32[N, 1 + 2 num], the
    token's own log-probability, then the ids of the `num` likeliest, then theirs.

    Ids are exact: below 2^24. Empty except on the last pipeline rank. Raises ModelError if the
    vocabulary has fewer tokens.
    """
    if num > engine.vocab_size:
        raise ModelError(
            f"teacher.top_logprobs_num = {num}, but the vocabulary has {engine.vocab_size} tokens"
        )
    group = parallel_state.get_tensor_model_parallel_group()

    def report(batch: MicroBatch, logits_bSV: torch.Tensor) -> Any:
        position_n, own_n = own_tokens(batch)
        logits_nV = logits_bSV.flatten(0, 1).index_select(0, position_n)
        ids_nK = find_likeliest(logits_nV, num=num, vocab_size=engine.vocab_size, group=group)
        targets_n = batch.targets_N if own_n is None else batch.targets_N[own_n]
        logprobs_nL = logprobs_at(
            logits_nV,
            ids_NK=torch.cat([targets_n[:, None], ids_nK], dim=1),
            temperature=engine.temperature,
            vocab_size=engine.vocab_size,
            group=group,
        )
        columns = (logprobs_nL[:, 0], *ids_nK.float().unbind(1), *logprobs_nL[:, 1:].unbind(1))
        found = torch.stack(gather_tokens(columns, own_n, num=len(batch.targets_N)), dim=1)
        return found.sum() * 0, count(0, logits_bSV), {"columns": found}

    with torch.no_grad():
        parts = run_microbatches(engine.model, microbatches, report, forward_only=True)
    return [part["columns"] for part in parts]


def find_likeliest(
    logits_NV: torch.Tensor, *, num: int, vocab_size: int, group: Any = None
) -> torch.Tensor:
    """Ids of the `num` largest logits of the whole vocabulary, largest first, int64[N, num].

    Of equal ones the smaller id comes first, whatever the ranks.
    """
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    width = logits_NV.shape[-1]
    columns_V = torch.arange(width, device=logits_NV.device) + rank * width
    held_NV = logits_NV.float().masked_fill(columns_V >= vocab_size, _NOWHERE)
    values_Nk, order_Nk = held_NV.sort(dim=1, descending=True, stable=True)
    values_Nk, ids_Nk = values_Nk[:, :num], order_Nk[:, :num] + rank * width
    if size > 1:
        values_Nk = torch.cat(_all_gather(values_Nk.contiguous(), group), dim=1)
        ids_Nk = torch.cat(_all_gather(ids_Nk.contiguous(), group), dim=1)
        # Ranks come in the order of their ids: a stable sort keeps the smaller ones first.
        chosen = values_Nk.sort(dim=1, descending=True, stable=True).indices[:, :num]
        ids_Nk = ids_Nk.gather(1, chosen)
    return ids_Nk


def _all_gather(values: torch.Tensor, group: Any) -> list[torch.Tensor]:
    parts = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(parts, values, group=group)
    return parts


def logprobs_at(
    logits_NV: torch.Tensor,
    *,
    ids_NK: torch.Tensor,
    temperature: float,
    vocab_size: int,
    group: Any = None,
) -> torch.Tensor:
    """log softmax of the whole vocabulary at `ids_NK`, float32[N, K]; equal on all tensor ranks."""
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    first = rank * logits_NV.shape[-1]
    scaled_NV = logits_NV.float() / temperature
    columns_V = torch.arange(logits_NV.shape[-1], device=logits_NV.device) + first
    scaled_NV = scaled_NV.masked_fill(columns_V >= vocab_size, _NOWHERE)
    found: torch.Tensor = _LogProbsAt.apply(scaled_NV, ids_NK - first, group if size > 1 else None)
    return found


class _LogProbsAt(torch.autograd.Function):
    """With p the softmax of a row: d logprob_k / d logit_v = [v = id_k] - p_v."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Any, local_ids_NK: Any, group: Any) -> Any:
        width = logits_NV.shape[-1]
        most_N = logits_NV.max(dim=-1).values
        if group is not None:
            dist.all_reduce(most_N, op=dist.ReduceOp.MAX, group=group)
        p_NV = (logits_NV - most_N[:, None]).exp()
        total_N = p_NV.sum(dim=-1)
        here_NK = (local_ids_NK >= 0) & (local_ids_NK < width)
        index_NK = local_ids_NK.clamp(0, width - 1)
        chosen_NK = torch.where(here_NK, logits_NV.gather(1, index_NK) - most_N[:, None], 0.0)
        if group is not None:
            dist.all_reduce(total_N, group=group)
            dist.all_reduce(chosen_NK, group=group)
        ctx.save_for_backward(p_NV / total_N[:, None], here_NK, index_NK)
        return chosen_NK - total_N.log()[:, None]

    @staticmethod
    def backward(ctx: Any, grad_NK: Any) -> Any:
        p_NV, here_NK, index_NK = ctx.saved_tensors
        grad_NV = -p_NV * grad_NK.sum(dim=1, keepdim=True)
        return grad_NV.scatter_add(1, index_NK, grad_NK * here_NK), None, None
