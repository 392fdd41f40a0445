"""RMS normalisation, in the three forms the model family uses.

    plain   w * x / sqrt(mean(x^2) + eps)          drafter norms, and inside the gated form
    offset  (1 + w) * x / sqrt(mean(x^2) + eps)    target block, final, q and k norms
    gated   plain(x) * SiLU(z)                     output of a gated delta net layer, before its projection

The mean is over the last axis, in FP32. Rounding points: `plain` and the inner norm of `gated` round the normalised
value to x's dtype before the gain is applied; `offset` applies the gain in FP32 and rounds once; `gated` multiplies by
the gate in FP32 and rounds once at the end. The forms that add first round the sum, which is the residual or a product
in parts, and normalise the rounded one; what is added to a residual may come in parts too, whose FP32 sum is rounded
before.

Source: specification ("plain_rmsnorm"), decision 10.
"""

# Triton declares neither its launch options nor what constexpr parameters take.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.launch_checks import require, require_contiguous
from kernels.overlap import let_next_start, overlaps, wait_for_earlier


def _normalise(x: torch.Tensor, eps: float) -> torch.Tensor:
    x32 = x.float()
    return x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)


def _whole(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What is to be added to `x`, which may come in parts."""
    return y if y.dim() == x.dim() else y.float().sum(-2).to(x.dtype)


def plain_rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * _normalise(x, eps).to(x.dtype)


def offset_rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return (_normalise(x, eps) * (1.0 + weight.float())).to(x.dtype)


def gated_rms_norm_reference(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    normed = plain_rms_norm_reference(x, weight, eps)
    return (normed.float() * F.silu(gate.float())).to(x.dtype)


# ------------------------------------------------------------------------------------------------ kernel


@triton.jit
def plainly_normalised(x, weight, mean_square, eps, dtype: tl.constexpr):
    """`x`, `weight` FP32, `mean_square` of x's row, broadcastable -> FP32 of the rounding points of `plain`."""
    return weight * (x * tl.rsqrt(mean_square + eps)).to(dtype).to(tl.float32)


@triton.jit
def offset_normalised(x, weight, mean_square, eps):
    """As `plainly_normalised`, of the rounding points of `offset`: nothing is rounded before the caller does."""
    return x * tl.rsqrt(mean_square + eps) * (1.0 + weight)


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    y_ptr,
    weight_ptr,
    sum_ptr,
    out_ptr,
    x_stride,
    y_stride,
    part_stride,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    OFFSET: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_earlier(OVERLAPS)
    let_next_start(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < D
    weight = tl.load(weight_ptr + d, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + d, mask=inside, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    if PARTS:
        y = tl.zeros((BLOCK,), tl.float32)
        for part in tl.static_range(PARTS):
            y += tl.load(y_ptr + row * y_stride + part * part_stride + d, mask=inside, other=0.0).to(tl.float32)
        x = (x + y.to(dtype).to(tl.float32)).to(dtype)
        tl.store(sum_ptr + row * D + d, x, mask=inside)
        x = x.to(tl.float32)
    mean_square = tl.sum(x * x, 0) / D
    if OFFSET:
        normed = offset_normalised(x, weight, mean_square, eps)
    else:
        normed = plainly_normalised(x, weight, mean_square, eps, dtype)
    tl.store(out_ptr + row * D + d, normed.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _summed_rms_norm_kernel(
    parts_ptr,
    weight_ptr,
    out_ptr,
    rows,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """`parts` FP32 [PARTS, rows, D] without gaps."""
    wait_for_earlier(OVERLAPS)
    let_next_start(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < D
    weight = tl.load(weight_ptr + d, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts_ptr + (part * rows + row) * D + d, mask=inside, other=0.0)
    dtype = out_ptr.dtype.element_ty
    x = total.to(dtype).to(tl.float32)
    normed = plainly_normalised(x, weight, tl.sum(x * x, 0) / D, eps, dtype)
    tl.store(out_ptr + row * D + d, normed.to(dtype), mask=inside)


@triton.jit
def _gated_rms_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    gate_row,
    gate_head,
    heads,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (row, tile of heads): `x`, `out` [rows, heads, D] without gaps."""
    wait_for_earlier(OVERLAPS)
    let_next_start(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, BLOCK)[None, :]
    inside = (head < heads) & (d < D)
    at = (row * heads + head) * D + d
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    gate = tl.load(gate_ptr + row * gate_row + head * gate_head + d, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    dtype = x.dtype
    x = x.to(tl.float32)
    mean_square = tl.sum(x * x, 1)[:, None] / D
    normed = plainly_normalised(x, weight, mean_square, eps, dtype).to(dtype).to(tl.float32)
    tl.store(out_ptr + at, (normed * (gate / (1.0 + tl.exp(-gate)))).to(dtype), mask=inside)


# ------------------------------------------------------------------------------------------------ launch


def _launch(
    x: torch.Tensor,
    y: torch.Tensor | None,
    weight: torch.Tensor,
    total: torch.Tensor | None,
    eps: float,
    offset: bool,
) -> torch.Tensor:
    """One program a row, `total` = x + y [..., D] filled where y [..., P, D] is given -> the norm [..., D]. Parts
    may lie anywhere."""
    width = x.shape[-1]
    require("weight", weight, (width,), torch.float32, torch.bfloat16)
    require("x", x, tuple(x.shape), torch.float32, torch.bfloat16)
    dtype = x.dtype if offset else torch.promote_types(x.dtype, weight.dtype)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    rows = x.reshape(-1, width)
    added = rows[:, None] if y is None else y.reshape(len(rows), -1, width)
    block, overlapping = triton.next_power_of_2(width), overlaps(x)
    if rows.shape[0]:
        _rms_norm_kernel[(rows.shape[0],)](
            rows,
            added,
            weight,
            out if total is None else total,
            out,
            rows.stride(0),
            added.stride(0),
            added.stride(1),
            eps,
            D=width,
            BLOCK=block,
            PARTS=0 if y is None else added.shape[1],
            OFFSET=offset,
            OVERLAPS=overlapping,
            num_warps=min(max(block // 128, 1), 16),  # all parts of a row are on their way at once
            launch_pdl=overlapping,
        )
    return out


def _launch_after_adding(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float, offset: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if y.dim() == x.dim():
        y = y.unsqueeze(-2)
    require("y", y.select(-2, 0), tuple(x.shape), x.dtype, torch.float32)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return total, _launch(x, y, weight, total, eps, offset)


def plain_rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _launch(x, None, weight, None, eps, offset=False)


def offset_rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _launch(x, None, weight, None, eps, offset=True)


def add_plain_rms_norm_triton(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return _launch_after_adding(x, y, weight, eps, offset=False)


def add_offset_rms_norm_triton(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return _launch_after_adding(x, y, weight, eps, offset=True)


def summed_plain_rms_norm(parts: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`parts` FP32 [P, R, D] of a product on a card (`linear.streamed_parts`), `weight` [D] -> the plain norm of their
    sum, which is rounded to the weight's dtype first as the product would be: [R, D]."""
    count, rows, width = parts.shape
    require_contiguous("parts", parts, (count, rows, width), torch.float32)
    require("weight", weight, (width,), torch.float32, torch.bfloat16)
    out = torch.empty((rows, width), dtype=weight.dtype, device=parts.device)
    if rows:
        block, overlapping = triton.next_power_of_2(width), overlaps(parts)
        _summed_rms_norm_kernel[(rows,)](
            parts,
            weight,
            out,
            rows,
            eps,
            D=width,
            BLOCK=block,
            PARTS=count,
            OVERLAPS=overlapping,
            num_warps=min(max(block // 256, 1), 16),
            launch_pdl=overlapping,
        )
    return out


def gated_rms_norm_triton(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    *lead, heads, width = x.shape
    require_contiguous("x", x, tuple(x.shape), torch.float32, torch.bfloat16)
    require("gate", gate, tuple(x.shape), x.dtype)
    require("weight", weight, (width,), x.dtype)
    out = torch.empty_like(x)
    if x.numel():
        rows, block = math.prod(lead), triton.next_power_of_2(width)
        gate, overlapping = gate.reshape(rows, heads, width), overlaps(x)
        per_program = max(1, min(1024 // block, triton.next_power_of_2(heads)))
        _gated_rms_norm_kernel[(rows, triton.cdiv(heads, per_program))](
            x,
            gate,
            weight,
            out,
            gate.stride(0),
            gate.stride(1),
            heads,
            eps,
            D=width,
            BLOCK=block,
            HEADS=per_program,
            OVERLAPS=overlapping,
            num_warps=4,
            launch_pdl=overlapping,
        )
    return out


# ------------------------------------------------------------------------------------------------ public


def plain_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x` [..., D], `weight` [D] -> [..., D] in x's dtype (FP32 if either is)."""
    norm = plain_rms_norm_triton if x.is_cuda else plain_rms_norm_reference
    return norm(x, weight, eps)


def offset_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x` [..., D], `weight` [D], gain 1 + weight -> [..., D] in x's dtype."""
    norm = offset_rms_norm_triton if x.is_cuda else offset_rms_norm_reference
    return norm(x, weight, eps)


def add_plain_rms_norm(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x`, `y` [..., D] or [..., P, D] of one dtype, `weight` [D] -> (x + y, its plain norm), [..., D] each."""
    if x.is_cuda:
        return add_plain_rms_norm_triton(x, y, weight, eps)
    total = x + _whole(y, x)
    return total, plain_rms_norm_reference(total, weight, eps)


def add_offset_rms_norm(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x`, `y` [..., D] or [..., P, D] of one dtype, `weight` [D] -> (x + y, its offset norm), [..., D] each."""
    if x.is_cuda:
        return add_offset_rms_norm_triton(x, y, weight, eps)
    total = x + _whole(y, x)
    return total, offset_rms_norm_reference(total, weight, eps)


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x`, `gate` [..., heads, D], `weight` [D] of one dtype -> [..., heads, D] in it. Normalisation comes before the
    gate, whose rows may have any stride."""
    norm = gated_rms_norm_triton if x.is_cuda else gated_rms_norm_reference
    return norm(x, gate, weight, eps)
