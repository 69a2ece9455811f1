"""The policy's log-probabilities of the tokens that a teacher finds likeliest.

Legend: N trained tokens, n those of this context rank, K tokens at each, V vocabulary columns of
this tensor rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from slurm_rl.errors import ModelError
from slurm_rl.train.batch import MicroBatch
from slurm_rl.train.context import gather_tokens, own_tokens
from slurm_rl.train.forward import Engine, ask_model
from slurm_rl.train.vocab_parallel import hide_from


def predict_top(engine: Engine, batch: MicroBatch, logits_1nV: torch.Tensor) -> torch.Tensor:
    """Log-probabilities float32[N, K] at `batch.arrays["top_ids"]`, with gradient.

    At the rollout's temperature, over the whole vocabulary.
    """
    _, own_n = own_tokens(batch)
    ids_NK = batch.arrays["top_ids"]
    found_nK = logprobs_at(
        logits_1nV[0],
        ids_NK=ids_NK if own_n is None else ids_NK[own_n],
        temperature=engine.temperature,
        vocab_size=engine.vocab_size,
        group=parallel_state.get_tensor_model_parallel_group(),
    )
    columns = tuple(found_nK.unbind(dim=1))
    return torch.stack(gather_tokens(columns, own_n, num=len(batch.targets_N)), dim=1)


def likeliest_tokens(
    engine: Engine, microbatches: list[MicroBatch], *, num: int, below: int
) -> list[torch.Tensor]:
    """Of each micro-batch's trained tokens, without gradient: columns float32[N, 1 + 2 num], the
    token's own log-probability, then the ids of the `num` likeliest below `below` (the student's
    vocabulary), then their log-probabilities.

    Ids are exact: below 2^24. Empty except on the last pipeline rank. Raises ModelError if there
    are fewer tokens.
    """
    if num > below:
        raise ModelError(f"teacher.top_logprobs_num = {num}, but there are {below} tokens")
    group = parallel_state.get_tensor_model_parallel_group()

    def ask(batch: MicroBatch, logits_1nV: torch.Tensor) -> torch.Tensor:
        _, own_n = own_tokens(batch)
        logits_nV = logits_1nV[0]
        ids_nK = find_likeliest(logits_nV, num=num, below=below, group=group)
        targets_n = batch.targets_N if own_n is None else batch.targets_N[own_n]
        logprobs_nL = logprobs_at(
            logits_nV,
            ids_NK=torch.cat([targets_n[:, None], ids_nK], dim=1),
            temperature=engine.temperature,
            vocab_size=engine.vocab_size,
            group=group,
        )
        columns = (logprobs_nL[:, 0], *ids_nK.float().unbind(1), *logprobs_nL[:, 1:].unbind(1))
        return torch.stack(gather_tokens(columns, own_n, num=len(batch.targets_N)), dim=1)

    return ask_model(engine, microbatches, ask)


def find_likeliest(
    logits_NV: torch.Tensor, *, num: int, below: int, group: Any = None
) -> torch.Tensor:
    """Ids of the `num` largest logits among the tokens below `below`, largest first, int64[N, num].

    Of equal ones the smaller id comes first, as far as all of them are among the `num`.
    """
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    width = logits_NV.shape[-1]
    held_NV = hide_from(logits_NV.float(), below - rank * width)
    values_Nk, ids_Nk = held_NV.topk(min(num, width), dim=1)
    ids_Nk = ids_Nk + rank * width
    if size > 1:
        values_Nk = torch.cat(_all_gather(values_Nk.contiguous(), group), dim=1)
        ids_Nk = torch.cat(_all_gather(ids_Nk.contiguous(), group), dim=1)
    by_id = ids_Nk.argsort(dim=1, stable=True)
    values_Nk, ids_Nk = values_Nk.gather(1, by_id), ids_Nk.gather(1, by_id)
    chosen = values_Nk.sort(dim=1, descending=True, stable=True).indices[:, :num]
    return ids_Nk.gather(1, chosen)


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
    scaled_NV = hide_from(logits_NV.float() / temperature, vocab_size - first)
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
