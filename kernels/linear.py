"""A matrix product of few rows with a large weight: y = x W^T, accumulated in FP32 and rounded once.

    x [..., K], W [N, K] -> y [..., N] in x's dtype, or in FP32

With few rows it takes as long as reading W takes. Up to 64 rows in BF16 our kernel streams W through the matrix units
as their wide operand, with the rows as the narrow one; a deep W is cut along K, so that a short N fills the card too,
and the parts are added in a fixed order by a second kernel, or by the one that needs the product. Between our kernels
it is the faster one of all weights, where the library's launch would be waited for, and wait itself: a layer of 27B
takes 205 us with it and 212 without. The first lines of W are on their way before the kernel may begin. With more rows
the library's product is at least as fast.
"""

# Triton declares neither its launch options nor what constexpr parameters take.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.launch_checks import require, require_contiguous
from kernels.overlap import ask_for, let_next_start, overlaps, wait_for_earlier

STREAMED_ROWS = 64
"""Up to so many rows the product is bound by reading the weight."""
LONG = 65536
"""The N of a head, whose tiles are many."""

_MULTIPROCESSORS = 132
_AHEAD = 128
"""So many elements of each row of W are asked for before the kernel may begin: more take longer to ask for. Context K/V
takes 40.2 us at 35B with 128, 40.6 with 256 and 42.5 with 1,024 (eight lanes)."""
_LINE_BYTES = 128


def linear_reference(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (x.float() @ weight.float().T).to(dtype)


class Tiling(NamedTuple):
    """One program takes `weights` rows of W and `rows` of x over one of `splits` parts of K, `depth` at a time.
    `taken`: only so many rows of W, where the whole tile would be no even share; 0 for all of them."""

    rows: int
    weights: int
    depth: int
    splits: int
    stages: int
    warps: int
    taken: int = 0


def streaming(rows: int, n: int, dtype: torch.dtype) -> Tiling:
    """Measured in BF16 for N from 1,280 to 248,320: an even share of W, or one program for nearly every multiprocessor
    with 160 KiB on their way in it, where K can be cut into as many parts, or else two with 96 KiB each."""
    depth = 128 if dtype == torch.bfloat16 else 32
    block = max(16, triton.next_power_of_2(min(rows, STREAMED_ROWS)))
    if n >= LONG:
        return Tiling(block, 128, depth, 1, 4, 8) if rows > 32 else Tiling(block, 64, depth, 1, 3, 4)
    tiles = triton.cdiv(n, 64)
    splits = max(1, _MULTIPROCESSORS // tiles)
    if tiles * splits * 8 < _MULTIPROCESSORS * 7:
        splits = max(1, round(240 / tiles))
        return Tiling(block, 64, depth, splits, 3, 4)
    if splits == 1 and dtype == torch.bfloat16:
        return shared_evenly(rows, n)
    return Tiling(block, 64, depth, splits, 5, 4)


def shared_evenly(rows: int, n: int) -> Tiling:
    """BF16, the whole depth at once: each multiprocessor takes as many rows of W as the others, up to 128 a program."""
    block = max(16, triton.next_power_of_2(min(rows, STREAMED_ROWS)))
    programs = triton.cdiv(n, 128 * _MULTIPROCESSORS) * _MULTIPROCESSORS
    taken = min(128, triton.cdiv(n, 16 * programs) * 16)
    weights = max(64, triton.next_power_of_2(taken))
    return Tiling(block, weights, 128, 1, 4, 4, taken)


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
    TAKEN: tl.constexpr,
    DEPTH: tl.constexpr,
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    AHEAD: tl.constexpr,
    LINE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Part `program_id(2)` of K: out [parts, rows, n]. WHOLE: every part is a multiple of DEPTH."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    weight_row = tl.program_id(1) * TAKEN + tl.arange(0, WEIGHTS)
    weight_end = tl.minimum(tl.program_id(1) * TAKEN + TAKEN, n)
    k = tl.arange(0, DEPTH)
    begin = tl.program_id(2) * part
    end = tl.minimum(begin + part, depth)
    weights = weight_ptr + weight_row[:, None].to(tl.int64) * depth + k[None, :]
    columns = x_ptr + row[None, :].to(tl.int64) * depth + k[:, None]
    lines = tl.minimum(begin + tl.arange(0, AHEAD // LINE) * LINE, end - 1)
    held = tl.minimum(weight_row, weight_end - 1)[:, None].to(tl.int64)
    ask_for(weight_ptr + held * depth + lines[None, :], OVERLAPS)
    wait_for_earlier(OVERLAPS)
    let_next_start(OVERLAPS)
    weight_inside, row_inside = weight_row[:, None] < weight_end, row[None, :] < rows
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
def _sum_kernel(parts_ptr, out_ptr, size, PARTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    wait_for_earlier(OVERLAPS)
    let_next_start(OVERLAPS)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts_ptr + part * size.to(tl.int64) + at, mask=inside, other=0.0)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


def streamed_parts(
    x: torch.Tensor, weight: torch.Tensor, tiling: Tiling, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """`x` [R, K] and `weight` [N, K] without gaps -> the products over parts of K, whose sum over the first axis is the
    whole product: [parts, R, N] in `dtype`, at most `tiling.splits` parts, in the order of K."""
    (rows, depth), n = x.shape, weight.shape[0]
    part = triton.cdiv(triton.cdiv(depth, tiling.depth), tiling.splits) * tiling.depth
    splits = triton.cdiv(depth, part)
    parts = torch.empty((splits, rows, n), dtype=dtype, device=x.device)
    taken = tiling.taken or tiling.weights
    overlapping = overlaps(x)
    _stream_kernel[(triton.cdiv(rows, tiling.rows), triton.cdiv(n, taken), splits)](
        x,
        weight,
        parts,
        rows,
        n,
        depth,
        part,
        ROWS=tiling.rows,
        WEIGHTS=tiling.weights,
        TAKEN=taken,
        DEPTH=tiling.depth,
        WHOLE=depth % tiling.depth == 0,
        STAGES=tiling.stages,
        PRECISION="ieee",
        AHEAD=_AHEAD,
        LINE=_LINE_BYTES // weight.element_size(),
        OVERLAPS=overlapping,
        num_warps=tiling.warps,
        launch_pdl=overlapping,
    )
    return parts


def linear_triton(
    x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, tiling: Tiling | None = None
) -> torch.Tensor:
    """`tiling`: for measurements; by default the one that was fastest."""
    n, depth = weight.shape
    require("x", x, (*x.shape[:-1], depth), torch.float32, torch.bfloat16)
    require_contiguous("weight", weight, (n, depth), x.dtype)
    columns = x.reshape(-1, depth).contiguous()
    rows = columns.shape[0]
    if not rows or not n:
        return torch.empty((*x.shape[:-1], n), dtype=dtype, device=x.device)
    plan = tiling or streaming(rows, n, x.dtype)
    if plan.splits == 1:
        return streamed_parts(columns, weight, plan, dtype).view(*x.shape[:-1], n)
    parts = streamed_parts(columns, weight, plan)
    out = torch.empty((rows, n), dtype=dtype, device=x.device)
    block, overlapping = 1024, overlaps(x)
    _sum_kernel[(triton.cdiv(rows * n, block),)](
        parts, out, rows * n, PARTS=len(parts), BLOCK=block, OVERLAPS=overlapping, launch_pdl=overlapping
    )
    return out.view(*x.shape[:-1], n)


def linear_parts_triton(x: torch.Tensor, weight: torch.Tensor, tiling: Tiling | None = None) -> torch.Tensor:
    """`x` [..., K] -> the product [..., N] in its dtype, or FP32 [..., P, N], which are still to be added and rounded:
    for a kernel that does so."""
    n, depth = weight.shape
    require("x", x, (*x.shape[:-1], depth), torch.float32, torch.bfloat16)
    require_contiguous("weight", weight, (n, depth), x.dtype)
    columns = x.reshape(-1, depth).contiguous()
    plan = tiling or streaming(len(columns), n, x.dtype)
    if plan.splits == 1:
        return streamed_parts(columns, weight, plan, x.dtype).view(*x.shape[:-1], n)
    return streamed_parts(columns, weight, plan).transpose(0, 1).unflatten(0, x.shape[:-1])


def streams(rows: int, dtype: torch.dtype) -> bool:
    """Whether our kernel is the faster one on a card."""
    return dtype == torch.bfloat16 and rows <= STREAMED_ROWS


Product = Literal["torch", "cuBLAS", "streaming"]


def product(rows: int, dtype: torch.dtype, card: bool) -> Product:
    """What multiplies `rows` rows with a weight: on a `card` the library or our kernel."""
    if not card:
        return "torch"
    return "streaming" if streams(rows, dtype) else "cuBLAS"


def linear(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`x` [..., K], `weight` [N, K] of the same dtype, FP32 or BF16 -> [..., N] in `dtype` (x's, if None)."""
    dtype = dtype or x.dtype
    rows = x.numel() // max(x.shape[-1], 1)
    kind = product(rows, x.dtype, x.is_cuda)
    if kind == "streaming":
        return linear_triton(x, weight, dtype)
    if dtype == x.dtype:
        return F.linear(x, weight)
    if kind == "torch":
        return linear_reference(x, weight, dtype)
    return torch.mm(x.reshape(rows, -1), weight.T, out_dtype=dtype).view(*x.shape[:-1], -1)


@dataclass(frozen=True)
class Linear:
    """A matrix of a model, applied by calling it: `weight` [N, K], in the dtype of what it is applied to.

    Who calls it knows neither how the matrix is stored nor what multiplies with it. One that is stored otherwise, as
    FP8 with its scales, is another value with the same call.
    """

    weight: torch.Tensor

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """`x` [..., K] -> [..., N] in `dtype` (x's, if None)."""
        return linear(x, self.weight, dtype)

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [..., K] -> the product [..., N] in its dtype, or FP32 [..., P, N], whose sum is to be rounded to it."""
        rows = x.numel() // max(x.shape[-1], 1)
        streaming = self.product(rows, x.is_cuda) == "streaming"
        return linear_parts_triton(x, self.weight) if streaming and rows else self(x)

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    def product(self, rows: int, card: bool) -> Product:
        """What multiplies `rows` rows with it."""
        return product(rows, self.weight.dtype, card)
