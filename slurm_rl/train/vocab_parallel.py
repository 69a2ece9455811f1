"""Log-probabilities and entropy of logits whose vocabulary is split over tensor ranks.

Megatron-core has a cross entropy of this kind but no entropy; here one pass gives both, and padding
columns count nothing. The kernels of `fused_vocab.py` compute them without a float32 copy of the
logits, PyTorch's operations with several.

Legend: N tokens, V columns of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

#: Logit of a padding column: exp of it is 0, and 0 times it is 0 (which -inf would not be).
_NOWHERE = -1e30


def logprobs_and_entropy(
    logits_NV: torch.Tensor,
    *,
    targets_N: torch.Tensor,
    temperature: float,
    vocab_size: int,
    group: Any = None,
    kernels: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy of each distribution, float32[N] each.

    logits_NV: this rank's columns, any dtype; computed in float32, divided by the rollout
    temperature first, so that they are what the engine sampled from. Columns from
    `vocab_size` on are padding. `group`: the tensor-parallel group; None for one rank.
    Both results are differentiable and equal on all ranks of the group.
    """
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    first = rank * logits_NV.shape[-1]
    group = group if size > 1 else None
    if kernels is not None:
        width = min(max(vocab_size - first, 0), logits_NV.shape[-1])
        return fused(
            logits_NV,
            targets_N - first,
            temperature=temperature,
            width=width,
            group=group,
            kernels=kernels,
        )
    scaled_NV = hide_from(logits_NV.float() / temperature, vocab_size - first)
    logprobs_N, entropy_N = _VocabParallel.apply(scaled_NV, targets_N - first, group)
    return logprobs_N, entropy_N


def fused(
    logits_NV: torch.Tensor,
    local_targets_N: torch.Tensor,
    *,
    temperature: float,
    width: int,
    kernels: Any,
    group: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by `kernels` (`fused_vocab.py`); targets count from this rank's first column, and
    columns from `width` on are padding."""
    logprobs_N, entropy_N = _Fused.apply(
        logits_NV, local_targets_N, temperature, width, group, kernels
    )
    return logprobs_N, entropy_N


def hide_from(logits_NV: torch.Tensor, first: int) -> torch.Tensor:
    """The logits with the columns from `first` on out of the game; themselves if there are none."""
    if first >= logits_NV.shape[-1]:
        return logits_NV
    columns_V = torch.arange(logits_NV.shape[-1], device=logits_NV.device)
    return logits_NV.masked_fill(columns_V >= first, _NOWHERE)


class _VocabParallel(torch.autograd.Function):
    """log softmax at a target, and -sum p log p, with one saved [N, V] tensor."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Any, local_targets_N: Any, group: Any) -> Any:
        ctx.set_materialize_grads(False)
        width = logits_NV.shape[-1]
        maximum_N = _reduce(logits_NV.max(dim=-1).values, group, dist.ReduceOp.MAX)
        shifted_NV = logits_NV - maximum_N[:, None]
        total_N = _reduce(shifted_NV.exp().sum(dim=-1), group)
        logprobs_NV = shifted_NV - total_N.log()[:, None]
        here_N = (local_targets_N >= 0) & (local_targets_N < width)
        index_N = local_targets_N.clamp(0, width - 1)
        chosen_N = logprobs_NV.gather(1, index_N[:, None])[:, 0]
        target_N = _reduce(torch.where(here_N, chosen_N, torch.zeros_like(chosen_N)), group)
        entropy_N = _reduce(-(logprobs_NV.exp() * logprobs_NV).sum(dim=-1), group)
        ctx.save_for_backward(logprobs_NV, here_N, index_N, entropy_N)
        return target_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_target_N, grad_entropy_N = grads
        logprobs_NV, here_N, index_N, entropy_N = ctx.saved_tensors
        p_NV = logprobs_NV.exp()
        grad_NV = torch.zeros_like(p_NV)
        if grad_target_N is not None:
            grad_NV -= p_NV * grad_target_N[:, None]
            own_N = (grad_target_N * here_N)[:, None]
            grad_NV.scatter_(1, index_N[:, None], grad_NV.gather(1, index_N[:, None]) + own_N)
        if grad_entropy_N is not None:
            grad_NV -= p_NV * (logprobs_NV + entropy_N[:, None]) * grad_entropy_N[:, None]
        return grad_NV, None, None


class _Fused(torch.autograd.Function):
    """The same by kernels; what is saved are the logits themselves, and two numbers a row."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: Any,
        targets_N: Any,
        temperature: float,
        width: int,
        group: Any,
        kernels: Any,
    ) -> Any:
        ctx.set_materialize_grads(False)
        own_N, sum_N, bent_N, target_N = kernels.row_sums(
            logits_NV, targets_N, temperature=temperature, width=width
        )
        maximum_N = own_N
        if group is not None:
            maximum_N = _reduce(own_N.clone(), group, dist.ReduceOp.MAX)
            # Each rank has counted from its own largest; one without columns has none.
            moved_N = torch.where(sum_N > 0, own_N - maximum_N, 0.0)
            bent_N = _reduce((bent_N + sum_N * moved_N) * moved_N.exp(), group)
            sum_N = _reduce(sum_N * moved_N.exp(), group)
            target_N = _reduce(target_N.contiguous(), group)
        log_sum_N = sum_N.log()
        log_total_N = maximum_N + log_sum_N
        entropy_N = log_sum_N - bent_N / sum_N
        ctx.save_for_backward(logits_NV, targets_N, log_total_N, entropy_N)
        ctx.plan = kernels, {"temperature": temperature, "width": width}
        return target_N - log_total_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        logits_NV, targets_N, log_total_N, entropy_N = ctx.saved_tensors
        kernels, plan = ctx.plan
        grad_NV = kernels.logits_gradient(
            logits_NV,
            targets_N,
            log_total_N=log_total_N,
            entropy_N=entropy_N,
            grad_logprobs_N=grads[0],
            grad_entropy_N=grads[1],
            **plan,
        )
        return grad_NV, None, None, None, None, None


def _reduce(values_N: Any, group: Any, op: Any = dist.ReduceOp.SUM) -> Any:
    if group is not None:
        dist.all_reduce(values_N, op=op, group=group)
    return values_N
