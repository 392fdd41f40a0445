"""A matrix product of few rows with a large weight: y = x W^T, accumulated in FP32 and rounded once.

    x [..., K], W [N, K] -> y [..., N] in x's dtype, or in FP32

With few rows it takes as long as reading W takes. Up to 64 rows in BF16 our kernel streams W through the matrix units
as their wide operand, with the rows as the narrow one; a deep W is cut along K, so that a short N fills the card too,
and the parts are added in a fixed order by a second kernel. Elsewhere the library's product is at least as fast.
"""

# Triton declares neither its launch options nor what constexpr parameters take.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.launch_checks import require, require_contiguous

STREAMED_ROWS = 64
"""Up to so many rows the product is bound by reading the weight."""
DEEP, LONG = 16384, 65536
"""The K and the N from which streaming beats the library."""


def linear_reference(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (x.float() @ weight.float().T).to(dtype)


class Tiling(NamedTuple):
    """One program takes `weights` rows of W and `rows` of x over one of `splits` parts of K, `depth` at a time."""

    rows: int
    weights: int
    depth: int
    splits: int
    stages: int
    warps: int


def _tiling(rows: int, n: int) -> Tiling:
    """Measured for N from 1,280 to 248,320: about 240 programs or more, and 48 KiB of W in flight in each."""
    wide = n >= LONG and rows > 32
    weights = 128 if wide else 64
    splits = 1 if n >= LONG else max(1, round(240 / -(-n // weights)))
    block = max(16, triton.next_power_of_2(min(rows, STREAMED_ROWS)))
    return Tiling(block, weights, 128, splits, 4 if wide else 3, 8 if wide else 4)


@triton.jit
def _stream_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    rows,
    n,
    depth,
    part,
    ROWS: tl.constexpr,
    WEIGHTS: tl.constexpr,
    DEPTH: tl.constexpr,
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Part `program_id(2)` of K: out [parts, rows, n]. WHOLE: every part is a multiple of DEPTH."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    weight_row = tl.program_id(1) * WEIGHTS + tl.arange(0, WEIGHTS)
    k = tl.arange(0, DEPTH)
    begin = tl.program_id(2) * part
    end = tl.minimum(begin + part, depth)
    weights = weight_ptr + weight_row[:, None].to(tl.int64) * depth + k[None, :]
    columns = x_ptr + row[None, :].to(tl.int64) * depth + k[:, None]
    weight_inside, row_inside = weight_row[:, None] < n, row[None, :] < rows
    total = tl.zeros((WEIGHTS, ROWS), tl.float32)
    for at in tl.range(begin, end, DEPTH, num_stages=STAGES):
        if WHOLE:
            w = tl.load(weights + at, mask=weight_inside, other=0.0)
            x = tl.load(columns + at, mask=row_inside, other=0.0)
        else:
            w = tl.load(weights + at, mask=weight_inside & (at + k[None, :] < end), other=0.0)
            x = tl.load(columns + at, mask=row_inside & (at + k[:, None] < end), other=0.0)
        total = tl.dot(w, x, total, input_precision=PRECISION)
    to = (tl.program_id(2).to(tl.int64) * rows + row[None, :]) * n + weight_row[:, None]
    tl.store(out_ptr + to, total.to(out_ptr.dtype.element_ty), mask=weight_inside & row_inside)


@triton.jit
def _sum_kernel(parts_ptr, out_ptr, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts_ptr + part * size.to(tl.int64) + at, mask=inside, other=0.0)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


def linear_triton(
    x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, tiling: Tiling | None = None
) -> torch.Tensor:
    """`tiling`: for measurements; by default the one that was fastest."""
    n, depth = weight.shape
    require("x", x, (*x.shape[:-1], depth), torch.float32, torch.bfloat16)
    require_contiguous("weight", weight, (n, depth), x.dtype)
    columns = x.reshape(-1, depth).contiguous()
    rows = columns.shape[0]
    out = torch.empty((rows, n), dtype=dtype, device=x.device)
    if rows and n:
        plan = tiling or _tiling(rows, n)
        part = triton.cdiv(triton.cdiv(depth, plan.depth), plan.splits) * plan.depth
        splits = triton.cdiv(depth, part)
        parts = out if splits == 1 else torch.empty((splits, rows, n), dtype=torch.float32, device=x.device)
        _stream_kernel[(triton.cdiv(rows, plan.rows), triton.cdiv(n, plan.weights), splits)](
            columns,
            weight,
            parts,
            rows,
            n,
            depth,
            part,
            ROWS=plan.rows,
            WEIGHTS=plan.weights,
            DEPTH=plan.depth,
            WHOLE=depth % plan.depth == 0,
            STAGES=plan.stages,
            PRECISION="ieee",
            num_warps=plan.warps,
        )
        if splits > 1:
            block = 1024
            _sum_kernel[(triton.cdiv(rows * n, block),)](parts, out, rows * n, PARTS=splits, BLOCK=block)
    return out.view(*x.shape[:-1], n)


def streams(rows: int, n: int, depth: int, dtype: torch.dtype) -> bool:
    """Whether our kernel is the faster one on a card."""
    return dtype == torch.bfloat16 and rows <= STREAMED_ROWS and (n >= LONG or depth >= DEEP)


def linear(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`x` [..., K], `weight` [N, K] of the same dtype, FP32 or BF16 -> [..., N] in `dtype` (x's, if None)."""
    dtype = dtype or x.dtype
    if not x.is_cuda:
        return F.linear(x, weight) if dtype == x.dtype else linear_reference(x, weight, dtype)
    rows = x.numel() // max(x.shape[-1], 1)
    if streams(rows, *weight.shape, x.dtype):
        return linear_triton(x, weight, dtype)
    if dtype == x.dtype:
        return F.linear(x, weight)
    product = torch.mm(x.reshape(rows, -1), weight.T, out_dtype=dtype)
    return product.view(*x.shape[:-1], -1)
