"""The small operations between a layer's products, as one Triton kernel each: RMSNorm, SwiGLU and
rotary embedding.

PyTorch's own operations read and write the activations several times for each. Here they are read
once and written once, computed in float32 and rounded once at the end. Sums run in a fixed order:
the bits do not change from run to run. Who calls them, and where not: `fused.py`.

Needs the package triton, which PyTorch's CUDA builds bring.

Legend: T rows, H hidden size, F columns of an MLP on this rank, P programs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

#: Elements that a program holds at a time, and the most programs that sum a norm's gradient.
_TILE, _MOST_PROGRAMS = 4096, 512


class RMSNormFunction(torch.autograd.Function):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis. Source: arXiv 1910.07467."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
        x_TH = x.reshape(-1, x.shape[-1]).contiguous()
        num, size = x_TH.shape
        out_TH = torch.empty_like(x_TH)
        scale_T = torch.empty(num, dtype=torch.float32, device=x.device)
        tile = _tile(size)
        _norm[(triton.cdiv(num, tile["ROWS"]),)](
            x_TH, weight_H, out_TH, scale_T, num, eps, SIZE=size, **tile
        )
        ctx.save_for_backward(x_TH, weight_H, scale_T)
        return out_TH.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x_TH, weight_H, scale_T = ctx.saved_tensors
        (grad,) = grads
        num, size = x_TH.shape
        tile = _tile(size)
        programs = min(_round_up(triton.cdiv(num, tile["ROWS"])), _MOST_PROGRAMS)
        out_TH = torch.empty_like(x_TH)
        parts_PH = torch.empty((programs, size), dtype=torch.float32, device=x_TH.device)
        _norm_gradient[(programs,)](
            x_TH,
            weight_H,
            scale_T,
            grad.reshape(num, size).contiguous(),
            out_TH,
            parts_PH,
            num,
            SIZE=size,
            TILES=_round_up(triton.cdiv(num, programs * tile["ROWS"])),
            PROGRAMS=programs,
            **tile,
        )
        return out_TH.view(grad.shape), parts_PH.sum(0).to(weight_H.dtype), None


def _round_up(count: int) -> int:
    """To 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, …: four of each octave. A kernel is compiled
    for each, and there are as many counts as lengths of micro-batches."""
    step = max(1, triton.next_power_of_2(count + 1) // 8)
    return triton.cdiv(count, step) * step


def _tile(size: int) -> dict[str, int]:
    """How many rows of `size` a program takes at a time, and how wide a power of two they need."""
    columns = triton.next_power_of_2(size)
    return {"ROWS": max(1, _TILE // columns), "COLUMNS": columns}


class SwiGLUFunction(torch.autograd.Function):
    """silu(x[..., :F]) * x[..., F:], [..., 2F] -> [..., F]. Source: arXiv 2002.05202."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        width = x.shape[-1] // 2
        out = x.new_empty((*x.shape[:-1], width))
        num = out.numel() // width
        if num:
            grid = (num, triton.cdiv(width, _TILE // 4))
            _swiglu[grid](x, out, WIDTH=width, BLOCK=_TILE // 4)
        ctx.save_for_backward(x)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        width = x.shape[-1] // 2
        out = torch.empty_like(x)
        num = x.numel() // x.shape[-1]
        if num:
            grid = (num, triton.cdiv(width, _TILE // 4))
            _swiglu_gradient[grid](x, grads[0].contiguous(), out, WIDTH=width, BLOCK=_TILE // 4)
        return out


class RotaryFunction(torch.autograd.Function):
    """Rotary embedding of x [T, heads, d] at positions int32[T]. Source: arXiv 2104.09864.

    freqs float32 [positions, …, r]: angles of the first r of d columns, each twice, as Megatron
    lays them out; the others pass. is_interleaved: pairs are neighbours, and not r/2 apart.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        freqs: torch.Tensor,
        positions_T: torch.Tensor,
        is_interleaved: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(freqs, positions_T)
        ctx.is_interleaved = is_interleaved
        return _rotate(x, freqs, positions_T, is_interleaved=is_interleaved, sign=1.0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        freqs, positions_T = ctx.saved_tensors
        interleaved = ctx.is_interleaved
        found = _rotate(grads[0], freqs, positions_T, is_interleaved=interleaved, sign=-1.0)
        return found, None, None, None


def _rotate(
    x: torch.Tensor,
    freqs: torch.Tensor,
    positions_T: torch.Tensor,
    *,
    is_interleaved: bool,
    sign: float,
) -> torch.Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    num, heads, width = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num:
        half = freqs.shape[-1] // 2
        _rotary[(num,)](
            x,
            x.stride(0),
            x.stride(1),
            freqs.reshape(freqs.shape[0], -1).contiguous(),
            positions_T,
            out,
            sign,
            HEADS=heads,
            HEADS_UP=triton.next_power_of_2(heads),
            WIDTH=width,
            HALF=half,
            HALF_UP=triton.next_power_of_2(half),
            REST_UP=triton.next_power_of_2(max(width - 2 * half, 1)),
            IS_INTERLEAVED=is_interleaved,
        )
    return out


@triton.jit
def _norm(
    x,
    weight,
    out,
    scales,
    num,
    eps,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    is_here = (row < num)[:, None] & (column < SIZE)[None, :]
    place = row.to(tl.int64)[:, None] * SIZE + column[None, :]
    values = tl.load(x + place, mask=is_here, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=1) / SIZE + eps)
    w = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    normed = values * scale[:, None] * w[None, :]
    tl.store(out + place, normed.to(out.dtype.element_ty), mask=is_here)
    tl.store(scales + row, scale, mask=row < num)


@triton.jit
def _norm_gradient(
    x,
    weight,
    scales,
    grad,
    out,
    parts,
    num,
    SIZE: tl.constexpr,
    TILES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    w = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    part = tl.zeros((COLUMNS,), dtype=tl.float32)
    for number in range(TILES):
        row = (number * PROGRAMS + program) * ROWS + tl.arange(0, ROWS)
        is_here = (row < num)[:, None] & (column < SIZE)[None, :]
        place = row.to(tl.int64)[:, None] * SIZE + column[None, :]
        values = tl.load(x + place, mask=is_here, other=0.0).to(tl.float32)
        above = tl.load(grad + place, mask=is_here, other=0.0).to(tl.float32)
        scale = tl.load(scales + row, mask=row < num, other=0.0)
        normed = values * scale[:, None]
        part += tl.sum(above * normed, axis=0)
        weighted = above * w[None, :]
        mean = tl.sum(weighted * normed, axis=1) / SIZE
        found = (weighted - normed * mean[:, None]) * scale[:, None]
        tl.store(out + place, found.to(out.dtype.element_ty), mask=is_here)
    tl.store(parts + program * SIZE + column, part, mask=column < SIZE)


@triton.jit
def _swiglu(x, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_here = column < WIDTH
    start = x + row * (2 * WIDTH) + column
    gate = tl.load(start, mask=is_here, other=0.0).to(tl.float32)
    value = tl.load(start + WIDTH, mask=is_here, other=0.0).to(tl.float32)
    found = gate * tl.sigmoid(gate) * value
    tl.store(out + row * WIDTH + column, found.to(out.dtype.element_ty), mask=is_here)


@triton.jit
def _swiglu_gradient(x, grad, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_here = column < WIDTH
    place = row * (2 * WIDTH) + column
    gate = tl.load(x + place, mask=is_here, other=0.0).to(tl.float32)
    value = tl.load(x + place + WIDTH, mask=is_here, other=0.0).to(tl.float32)
    above = tl.load(grad + row * WIDTH + column, mask=is_here, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    of_gate = above * value * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    of_value = above * gate * sigmoid
    tl.store(out + place, of_gate.to(out.dtype.element_ty), mask=is_here)
    tl.store(out + place + WIDTH, of_value.to(out.dtype.element_ty), mask=is_here)


@triton.jit
def _rotary(
    x,
    stride_row,
    stride_head,
    freqs,
    positions,
    out,
    sign,
    HEADS: tl.constexpr,
    HEADS_UP: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    HALF_UP: tl.constexpr,
    REST_UP: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_UP)
    pair = tl.arange(0, HALF_UP)
    first = pair * 2 if IS_INTERLEAVED else pair
    apart = 1 if IS_INTERLEAVED else HALF
    position = tl.load(positions + row).to(tl.int64)
    angle = tl.load(freqs + position * (2 * HALF) + first, mask=pair < HALF, other=0.0)
    cos = tl.cos(angle)[None, :]
    sin = tl.sin(angle)[None, :] * sign
    is_here = (head < HEADS)[:, None] & (pair < HALF)[None, :]
    place = row * stride_row + head[:, None] * stride_head + first[None, :]
    a = tl.load(x + place, mask=is_here, other=0.0).to(tl.float32)
    b = tl.load(x + place + apart, mask=is_here, other=0.0).to(tl.float32)
    target = (row * HEADS + head[:, None]) * WIDTH + first[None, :]
    tl.store(out + target, (a * cos - b * sin).to(out.dtype.element_ty), mask=is_here)
    tl.store(out + target + apart, (b * cos + a * sin).to(out.dtype.element_ty), mask=is_here)
    if 2 * HALF < WIDTH:
        rest = 2 * HALF + tl.arange(0, REST_UP)
        is_rest = (head < HEADS)[:, None] & (rest < WIDTH)[None, :]
        place = row * stride_row + head[:, None] * stride_head + rest[None, :]
        passed = tl.load(x + place, mask=is_rest, other=0.0)
        tl.store(out + (row * HEADS + head[:, None]) * WIDTH + rest[None, :], passed, mask=is_rest)
