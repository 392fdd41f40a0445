"""DFlash2's dynamic grouped convolution around a branch: two sides, taps of a column and those before it, groups of
channels that share a dynamic increment.

    n = plain_norm(x)                          delta = reshape(W_delta n, [B, W, sides, taps, H / group])
    Conv_s(X)[b, i, h] = sum over taps t <= i of (base[s, t, h] + delta[b, i, s, t, h / group]) X[b, i - t, h]

    enter     leaves of a residual x what the next `prepare` begins with
    prepare   Conv_0(n) and the delta of side 1
    finish    residual + Conv_1(z), with the delta that the same branch's `prepare` gave; then what `enter` does

There is no history across rounds, and column 0 has no preceding tap. Coefficients are summed and applied in FP32.
`prepare` rounds its two outputs to x's dtype; `finish` rounds the convolution and then the sum. The normalised input
and the coefficients of side 0 are private: the kernel projects round(w x) and scales the sums by the row's 1 / rms.

The projection is a tall weight of few rows (13 MB at H = 5120). Whoever has x at hand multiplies it by the norm's gain
and sums its squares, so that projecting is nothing but reading the weight once; `prepare` adds up the parts of H, and
applies the rest of the norm, where it needs them.

Source: specification (DFlash2 convolution).
"""

# Triton declares neither its launch options nor what constexpr parameters take.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.launch_checks import require_contiguous
from kernels.linear import streamed_parts, streaming
from kernels.norms import plain_rms_norm_reference, plainly_normalised
from kernels.overlap import let_next_start, overlaps, wait_for_earlier

SIDES = 2

_CHANNELS = 512
_BLOCK = 1024


def _convolve(x: torch.Tensor, base: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """`x` [B, W, H], `base` [taps, H], `delta` [B, W, taps, H / group] -> FP32 [B, W, H]."""
    x32 = x.float()
    coefficients = base.float() + delta.float().repeat_interleave(x.shape[-1] // delta.shape[-1], dim=-1)
    out = coefficients[:, :, 0] * x32
    for tap in range(1, base.shape[0]):
        out[:, tap:] += coefficients[:, tap:, tap] * x32[:, :-tap]
    return out


@dataclass(frozen=True)
class Residual:
    """A residual `x` [B, W, H] on its way into a plain norm with the gain `norm` [H]: `scaled` is round(w x), which a
    projection of n needs but for the row's 1 / rms, and `squares` FP32 [B, W, blocks] has x^2 summed over blocks of
    H."""

    x: torch.Tensor
    norm: torch.Tensor
    scaled: torch.Tensor
    squares: torch.Tensor


def enter_reference(x: torch.Tensor, norm: torch.Tensor) -> Residual:
    return Residual(x, norm, x * norm, x.float().square().sum(-1, keepdim=True))


def prepare_reference(
    residual: Residual, base: torch.Tensor, projection: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the residual it takes x and the norm, and rounds where the specification does."""
    n = plain_rms_norm_reference(residual.x, residual.norm, eps)
    delta = F.linear(n, projection).unflatten(-1, (SIDES, base.shape[1], -1))
    return _convolve(n, base[0], delta[:, :, 0]).to(n.dtype), delta[:, :, 1]


def finish_reference(
    residual: torch.Tensor,
    z: torch.Tensor,
    base: torch.Tensor,
    finish_delta: torch.Tensor,
    norm: torch.Tensor,
) -> Residual:
    return enter_reference(residual + _convolve(z, base[1], finish_delta).to(z.dtype), norm)


# ------------------------------------------------------------------------------------------------ kernels


@triton.jit
def _store_scaled(x, norm_ptr, scaled_ptr, squares_ptr, row, h, H: tl.constexpr):
    """Leaves round(w x) of a block of a row, and the block's sum of squares."""
    inside = h < H
    norm = tl.load(norm_ptr + h, mask=inside, other=0.0).to(tl.float32)
    x32 = x.to(tl.float32)
    tl.store(scaled_ptr + row * H + h, (x32 * norm).to(x.dtype), mask=inside)
    tl.store(squares_ptr + row * tl.num_programs(1) + tl.program_id(1), tl.sum(x32 * x32, 0))


@triton.jit
def _scale_kernel(
    x_ptr, norm_ptr, scaled_ptr, squares_ptr, H: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr
):
    wait_for_earlier(OVERLAPS)
    let_next_start(OVERLAPS)
    row, h = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * H + h, mask=h < H, other=0.0)
    _store_scaled(x, norm_ptr, scaled_ptr, squares_ptr, row, h, H)


@triton.jit
def _mean_square(squares_ptr, row, H: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_PADDED: tl.constexpr):
    block = tl.arange(0, BLOCKS_PADDED)
    return tl.sum(tl.load(squares_ptr + row.to(tl.int64) * BLOCKS + block, mask=block < BLOCKS, other=0.0), 0) / H


@triton.jit
def _prepare_kernel(
    x_ptr,
    norm_ptr,
    base_ptr,
    part_ptr,
    squares_ptr,
    prepared_ptr,
    delta_ptr,
    rows,
    width,
    eps,
    H: tl.constexpr,
    TAPS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One row and `GROUPS` of its groups of channels."""
    wait_for_earlier(OVERLAPS)
    let_next_start(OVERLAPS)
    count: tl.constexpr = H // GROUP
    row = tl.program_id(0)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    member = tl.arange(0, GROUP_BLOCK)[None, :]
    h = group[:, None] * GROUP + member
    inside = (group[:, None] < count) & (member < GROUP)
    split = tl.arange(0, SPLIT_BLOCK)[:, None]
    norm = tl.load(norm_ptr + h, mask=inside, other=0.0).to(tl.float32)
    part = part_ptr + (split * rows + row).to(tl.int64) * (2 * TAPS * count) + group[None, :]
    summed = (split < SPLITS) & (group[None, :] < count)
    inverse_rms = tl.rsqrt(_mean_square(squares_ptr, row, H, BLOCKS, BLOCKS_PADDED) + eps)
    dtype = x_ptr.dtype.element_ty
    out = tl.zeros((GROUPS, GROUP_BLOCK), tl.float32)
    for tap in tl.static_range(TAPS):
        finishing = tl.sum(tl.load(part + (TAPS + tap) * count, mask=summed, other=0.0), 0) * inverse_rms
        tl.store(delta_ptr + (row.to(tl.int64) * TAPS + tap) * count + group, finishing.to(dtype), mask=group < count)
        seen = row % width >= tap
        before = tl.where(seen, row - tap, row)
        x = tl.load(x_ptr + before.to(tl.int64) * H + h, mask=inside & seen, other=0.0).to(tl.float32)
        mean_square = _mean_square(squares_ptr, before, H, BLOCKS, BLOCKS_PADDED)
        n = plainly_normalised(x, norm, mean_square, eps, dtype).to(dtype).to(tl.float32)
        increment = tl.sum(tl.load(part + tap * count, mask=summed, other=0.0), 0) * inverse_rms
        base = tl.load(base_ptr + tap * H + h, mask=inside, other=0.0).to(tl.float32)
        out += tl.where(seen, (base + increment[:, None]) * n, 0.0)
    tl.store(prepared_ptr + row.to(tl.int64) * H + h, out.to(dtype), mask=inside)


@triton.jit
def _finish_kernel(
    residual_ptr,
    z_ptr,
    base_ptr,
    delta_ptr,
    norm_ptr,
    out_ptr,
    scaled_ptr,
    squares_ptr,
    width,
    H: tl.constexpr,
    TAPS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_earlier(OVERLAPS)
    let_next_start(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = h < H
    residual = tl.load(residual_ptr + row * H + h, mask=inside, other=0.0)
    branch = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(TAPS):
        seen = inside & (row % width >= tap)
        z = tl.load(z_ptr + (row - tap) * H + h, mask=seen, other=0.0).to(tl.float32)
        base = tl.load(base_ptr + (TAPS + tap) * H + h, mask=inside, other=0.0).to(tl.float32)
        delta = tl.load(delta_ptr + (row * TAPS + tap) * (H // GROUP) + h // GROUP, mask=inside, other=0.0)
        branch += tl.where(seen, (base + delta.to(tl.float32)) * z, 0.0)
    rounded = branch.to(residual.dtype).to(tl.float32)
    out = (residual.to(tl.float32) + rounded).to(residual.dtype)
    tl.store(out_ptr + row * H + h, out, mask=inside)
    _store_scaled(out, norm_ptr, scaled_ptr, squares_ptr, row, h, H)


# ------------------------------------------------------------------------------------------------ launch


def _left_for(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a kernel leaves round(w x) and the sums of squares."""
    blocks = triton.cdiv(x.shape[-1], _BLOCK)
    return torch.empty_like(x), torch.empty((*x.shape[:-1], blocks), dtype=torch.float32, device=x.device)


def enter_triton(x: torch.Tensor, norm: torch.Tensor) -> Residual:
    batch, width, hidden = x.shape
    require_contiguous("x", x, (batch, width, hidden), torch.float32, torch.bfloat16)
    require_contiguous("norm", norm, (hidden,), x.dtype)
    scaled, squares = _left_for(x)
    if x.numel():
        overlapping = overlaps(x)
        _scale_kernel[(batch * width, squares.shape[-1])](
            x,
            norm,
            scaled,
            squares,
            H=hidden,
            BLOCK=_BLOCK,
            OVERLAPS=overlapping,
            num_warps=4,
            launch_pdl=overlapping,
        )
    return Residual(x, norm, scaled, squares)


def prepare_triton(
    residual: Residual, base: torch.Tensor, projection: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    x, norm = residual.x, residual.norm
    batch, width, hidden = x.shape
    taps, outputs = base.shape[1], projection.shape[0]
    require_contiguous("x", x, (batch, width, hidden), torch.float32, torch.bfloat16)
    require_contiguous("norm", norm, (hidden,), x.dtype)
    require_contiguous("base", base, (SIDES, taps, hidden), x.dtype)
    require_contiguous("projection", projection, (outputs, hidden), x.dtype)
    groups = outputs // (SIDES * taps)
    if outputs % (SIDES * taps) or not groups or hidden % groups:
        raise ValueError(f"projection: {outputs} rows, must be {SIDES} * {taps} taps * a divisor of {hidden} channels")
    group, rows = hidden // groups, batch * width
    prepared, finish_delta = torch.empty_like(x), x.new_empty(batch, width, taps, groups)
    if not rows:
        return prepared, finish_delta
    parts = streamed_parts(residual.scaled.view(rows, hidden), projection, streaming(rows, outputs, x.dtype))
    blocks = residual.squares.shape[-1]
    group_block = triton.next_power_of_2(group)
    per_program = max(_CHANNELS // group_block, 1)
    overlapping = overlaps(x)
    _prepare_kernel[(rows, triton.cdiv(groups, per_program))](
        x,
        norm,
        base,
        parts,
        residual.squares,
        prepared,
        finish_delta,
        rows,
        width,
        eps,
        H=hidden,
        TAPS=taps,
        GROUP=group,
        GROUP_BLOCK=group_block,
        GROUPS=per_program,
        SPLITS=len(parts),
        SPLIT_BLOCK=triton.next_power_of_2(len(parts)),
        BLOCKS=blocks,
        BLOCKS_PADDED=triton.next_power_of_2(blocks),
        OVERLAPS=overlapping,
        num_warps=4,
        launch_pdl=overlapping,
    )
    return prepared, finish_delta


def finish_triton(
    residual: torch.Tensor,
    z: torch.Tensor,
    base: torch.Tensor,
    finish_delta: torch.Tensor,
    norm: torch.Tensor,
) -> Residual:
    batch, width, hidden = z.shape
    taps, groups = base.shape[1], finish_delta.shape[-1]
    require_contiguous("z", z, (batch, width, hidden), torch.float32, torch.bfloat16)
    require_contiguous("residual", residual, tuple(z.shape), z.dtype)
    require_contiguous("base", base, (SIDES, taps, hidden), z.dtype)
    require_contiguous("finish_delta", finish_delta, (batch, width, taps, groups), z.dtype)
    require_contiguous("norm", norm, (hidden,), z.dtype)
    if not groups or hidden % groups:
        raise ValueError(f"finish_delta: {groups} groups, must divide the {hidden} channels of z")
    out = torch.empty_like(z)
    scaled, squares = _left_for(z)
    if z.numel():
        overlapping = overlaps(z)
        _finish_kernel[(batch * width, squares.shape[-1])](
            residual,
            z,
            base,
            finish_delta,
            norm,
            out,
            scaled,
            squares,
            width,
            H=hidden,
            TAPS=taps,
            GROUP=hidden // groups,
            BLOCK=_BLOCK,
            OVERLAPS=overlapping,
            num_warps=4,
            launch_pdl=overlapping,
        )
    return Residual(out, norm, scaled, squares)


# ------------------------------------------------------------------------------------------------ public


def enter(x: torch.Tensor, norm: torch.Tensor) -> Residual:
    """`x` [B, W, H], which no convolution has finished, on its way into a branch whose plain norm has the gain `norm`
    [H]."""
    run = enter_triton if x.is_cuda else enter_reference
    return run(x, norm)


def prepare(
    residual: Residual, base: torch.Tensor, projection: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual before a branch, `base` [2, taps, H], `projection` [2 taps H / group, H] and `eps` of the branch's
    norm -> the prepared branch input [B, W, H] and the finish delta [B, W, taps, H / group]."""
    run = prepare_triton if residual.x.is_cuda else prepare_reference
    return run(residual, base, projection, eps)


def finish(
    residual: torch.Tensor,
    z: torch.Tensor,
    base: torch.Tensor,
    finish_delta: torch.Tensor,
    norm: torch.Tensor,
) -> Residual:
    """`residual` before and output `z` [B, W, H] of a branch, `base` [2, taps, H], `finish_delta` of `prepare` -> the
    residual after the branch, on its way into the next norm, whose gain is `norm` [H]."""
    run = finish_triton if z.is_cuda else finish_reference
    return run(residual, z, base, finish_delta, norm)
