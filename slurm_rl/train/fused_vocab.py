"""The kernels of `vocab_parallel.py` on a GPU, in Triton: log-probabilities and entropy.

Forward, one program a row reads its logits once, in their own dtype, and keeps the largest z and
two sums over e = exp(z - largest): of e, and of e * (z - largest). Backward reads them once more
and writes their gradient. Nothing as large as the logits is made besides that, where PyTorch's
operations make some ten float32 copies of them. Each row is summed by one program in a fixed
order: the bits do not change from run to run, nor with what other rows there are.

Needs the package triton, which PyTorch's CUDA builds bring.

Legend: N tokens, V columns of this rank; z are logits divided by the temperature.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Columns that a program takes at a time, and its warps.
_BLOCK, _WARPS = 4096, 8


def row_sums(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, *, temperature: float, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each row, over its first `width` columns: the largest z, the sum of e, the sum of
    e * (z - largest), and z at the target, 0 if that column is not here; float32[N] each.

    logits_NV: any floating dtype, rows contiguous; targets_N: int64 columns of this rank.
    """
    num = len(logits_NV)
    out_4N = torch.empty((4, num), dtype=torch.float32, device=logits_NV.device)
    if num:
        _row_sums[(num,)](
            logits_NV,
            logits_NV.stride(0),
            targets_N,
            out_4N,
            num,
            1.0 / temperature,
            WIDTH=width,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )
    return out_4N[0], out_4N[1], out_4N[2], out_4N[3]


def logits_gradient(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    log_total_N: torch.Tensor,
    entropy_N: torch.Tensor,
    grad_logprobs_N: torch.Tensor | None,
    grad_entropy_N: torch.Tensor | None,
    temperature: float,
    width: int,
) -> torch.Tensor:
    """The gradient of what `row_sums` led to, [N, V] in the logits' dtype, 0 from `width` on.

    log_total_N: log of the sum of exp(z) over all ranks' columns.
    """
    num, columns = logits_NV.shape
    grad_NV = torch.empty_like(logits_NV, memory_format=torch.contiguous_format)
    none_N = torch.zeros_like(log_total_N)
    grads = (none_N if g is None else g.contiguous() for g in (grad_logprobs_N, grad_entropy_N))
    if num:
        _logits_gradient[(num,)](
            logits_NV,
            logits_NV.stride(0),
            targets_N,
            log_total_N,
            entropy_N,
            *grads,
            grad_NV,
            1.0 / temperature,
            COLUMNS=columns,
            WIDTH=width,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )
    return grad_NV


@triton.jit
def _row_sums(
    logits,
    stride,
    targets,
    out,
    num,
    scale,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    most = -float("inf")
    total = 0.0
    weighted = 0.0
    for first in range(0, WIDTH, BLOCK):
        column = first + tl.arange(0, BLOCK)
        is_here = column < WIDTH
        z = tl.load(start + column, mask=is_here, other=-float("inf")).to(tl.float32) * scale
        larger = tl.maximum(most, tl.max(z))
        # What there is so far is counted from another largest one.
        moved = tl.where(most == -float("inf"), 0.0, most - larger)
        shrunk = tl.exp(moved)
        away = tl.where(is_here, z - larger, 0.0)
        e = tl.where(is_here, tl.exp(away), 0.0)
        weighted = (weighted + total * moved) * shrunk + tl.sum(e * away)
        total = total * shrunk + tl.sum(e)
        most = larger
    target = tl.load(targets + row)
    is_own = (target >= 0) & (target < WIDTH)
    chosen = tl.load(start + target, mask=is_own, other=0.0).to(tl.float32) * scale
    tl.store(out + row, most)
    tl.store(out + num + row, total)
    tl.store(out + 2 * num + row, weighted)
    tl.store(out + 3 * num + row, chosen)


@triton.jit
def _logits_gradient(
    logits,
    stride,
    targets,
    log_totals,
    entropies,
    grad_logprobs,
    grad_entropies,
    grad,
    scale,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    target = tl.load(targets + row)
    log_total = tl.load(log_totals + row)
    entropy = tl.load(entropies + row)
    grad_logprob = tl.load(grad_logprobs + row)
    grad_entropy = tl.load(grad_entropies + row)
    for first in range(0, COLUMNS, BLOCK):
        column = first + tl.arange(0, BLOCK)
        z = tl.load(start + column, mask=column < WIDTH, other=-float("inf")).to(tl.float32) * scale
        logprob = z - log_total
        p = tl.exp(logprob)
        # 0 times -inf is no 0.
        bent = p * tl.where(p > 0.0, logprob + entropy, 0.0)
        own = tl.where(column == target, grad_logprob, 0.0)
        found = (own - p * grad_logprob - bent * grad_entropy) * scale
        tl.store(
            grad + row * COLUMNS + column,
            tl.where(column < WIDTH, found, 0.0).to(grad.dtype.element_ty),
            mask=column < COLUMNS,
        )
