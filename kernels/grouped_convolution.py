"""DFlash2's dynamic grouped convolution around a branch: two sides, taps of a column and those before it, groups of
channels that share a dynamic increment.

    n = plain_norm(x)                          delta = reshape(W_delta n, [B, W, sides, taps, H / group])
    Conv_s(X)[b, i, h] = sum over taps t <= i of (base[s, t, h] + delta[b, i, s, t, h / group]) X[b, i - t, h]

    prepare   Conv_0(n) and the delta of side 1
    finish    residual + Conv_1(z), with the delta that the same branch's `prepare` gave

There is no history across rounds, and column 0 has no preceding tap. Coefficients are summed and applied in FP32.
`prepare` rounds its two outputs to x's dtype; `finish` rounds the convolution and then the sum. The normalised input
and the coefficients of side 0 are private: the kernel projects round(w x) and scales the sums by the row's 1 / rms.

The projection is a tall weight of few rows (13 MB at H = 5120) and is read once: its kernel splits H over programs so
that they fill the card, and the second kernel sums the parts where it needs them.

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
from kernels.norms import plain_rms_norm_reference, plainly_normalised

SIDES = 2

# Enough programs for every multiprocessor of a large card; two of them fit on one.
_PROGRAMS = 160
_TILE_OUTPUTS = 64
_CHANNELS = 512
_FINISH_BLOCK = 1024
_STAGES = 5


def _convolve(x: torch.Tensor, base: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """`x` [B, W, H], `base` [taps, H], `delta` [B, W, taps, H / group] -> FP32 [B, W, H]."""
    x32 = x.float()
    coefficients = base.float() + delta.float().repeat_interleave(x.shape[-1] // delta.shape[-1], dim=-1)
    out = coefficients[:, :, 0] * x32
    for tap in range(1, base.shape[0]):
        out[:, tap:] += coefficients[:, tap:, tap] * x32[:, :-tap]
    return out


def prepare_reference(
    x: torch.Tensor, norm: torch.Tensor, base: torch.Tensor, projection: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    n = plain_rms_norm_reference(x, norm, eps)
    delta = F.linear(n, projection).unflatten(-1, (SIDES, base.shape[1], -1))
    return _convolve(n, base[0], delta[:, :, 0]).to(x.dtype), delta[:, :, 1]


def finish_reference(
    residual: torch.Tensor, z: torch.Tensor, base: torch.Tensor, finish_delta: torch.Tensor
) -> torch.Tensor:
    return residual + _convolve(z, base[1], finish_delta).to(z.dtype)


# ------------------------------------------------------------------------------------------------ kernels


@triton.jit
def _projection_kernel(
    x_ptr,
    norm_ptr,
    projection_ptr,
    part_ptr,
    square_ptr,
    rows,
    H: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEPS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Of one share of H: part[split, row, output] = round(norm x) . projection, square[split, row] = sum of x^2."""
    tile, split = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    output = tile * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    # the weight is the wide operand of the matrix units, the few rows are the narrow one
    total = tl.zeros((TILE_OUTPUTS, TILE_ROWS), tl.float32)
    square = tl.zeros((TILE_ROWS,), tl.float32)
    first = split * STEPS * STEP
    for start in tl.range(first, first + STEPS * STEP, STEP, num_stages=STAGES):
        h = start + tl.arange(0, STEP)
        inside = h < H
        weight = tl.load(
            projection_ptr + output[:, None] * H + h[None, :],
            mask=(output[:, None] < OUTPUTS) & inside[None, :],
            other=0.0,
        )
        x = tl.load(x_ptr + row[None, :] * H + h[:, None], mask=(row[None, :] < rows) & inside[:, None], other=0.0)
        norm = tl.load(norm_ptr + h, mask=inside, other=0.0).to(tl.float32)
        x32 = x.to(tl.float32)
        square += tl.sum(x32 * x32, 0)
        total = tl.dot(weight, (x32 * norm[:, None]).to(x.dtype), total, input_precision="ieee")
    at = (split * rows + row).to(tl.int64)
    live = row < rows
    tl.store(
        part_ptr + at[None, :] * OUTPUTS + output[:, None], total, mask=live[None, :] & (output[:, None] < OUTPUTS)
    )
    tl.store(square_ptr + at, square, mask=live & (tile == 0))


@triton.jit
def _mean_square(square_ptr, row, rows, H: tl.constexpr, SPLITS: tl.constexpr, SPLIT_BLOCK: tl.constexpr):
    split = tl.arange(0, SPLIT_BLOCK)
    return tl.sum(tl.load(square_ptr + split * rows + row, mask=split < SPLITS, other=0.0), 0) / H


@triton.jit
def _prepare_kernel(
    x_ptr,
    norm_ptr,
    base_ptr,
    part_ptr,
    square_ptr,
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
):
    """One row and `GROUPS` of its groups of channels."""
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
    inverse_rms = tl.rsqrt(_mean_square(square_ptr, row, rows, H, SPLITS, SPLIT_BLOCK) + eps)
    dtype = x_ptr.dtype.element_ty
    out = tl.zeros((GROUPS, GROUP_BLOCK), tl.float32)
    for tap in tl.static_range(TAPS):
        finishing = tl.sum(tl.load(part + (TAPS + tap) * count, mask=summed, other=0.0), 0) * inverse_rms
        tl.store(delta_ptr + (row.to(tl.int64) * TAPS + tap) * count + group, finishing.to(dtype), mask=group < count)
        seen = row % width >= tap
        before = tl.where(seen, row - tap, row)
        x = tl.load(x_ptr + before.to(tl.int64) * H + h, mask=inside & seen, other=0.0).to(tl.float32)
        mean_square = _mean_square(square_ptr, before, rows, H, SPLITS, SPLIT_BLOCK)
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
    out_ptr,
    width,
    H: tl.constexpr,
    TAPS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
    tl.store(out_ptr + row * H + h, (residual.to(tl.float32) + rounded).to(residual.dtype), mask=inside)


# ------------------------------------------------------------------------------------------------ launch


@dataclass(frozen=True)
class _Tiling:
    """How the projection's work is cut: tiles of rows, and shares of H of `steps` times `step` channels."""

    rows: int
    step: int
    steps: int
    splits: int

    @classmethod
    def of(cls, rows: int, outputs: int, hidden: int, dtype: torch.dtype) -> _Tiling:
        tile_rows = min(max(triton.next_power_of_2(rows), 16), 64)
        step = 64 if dtype == torch.bfloat16 else 32
        tiles = triton.cdiv(rows, tile_rows) * triton.cdiv(outputs, _TILE_OUTPUTS)
        total = triton.cdiv(hidden, step)
        steps = triton.cdiv(total, max(_PROGRAMS // tiles, 1))
        return cls(tile_rows, step, steps, triton.cdiv(total, steps))


def prepare_triton(
    x: torch.Tensor, norm: torch.Tensor, base: torch.Tensor, projection: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
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
    tiling = _Tiling.of(rows, outputs, hidden, x.dtype)
    part = torch.empty(tiling.splits, rows, outputs, dtype=torch.float32, device=x.device)
    square = torch.empty(tiling.splits, rows, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(outputs, _TILE_OUTPUTS), tiling.splits, triton.cdiv(rows, tiling.rows))
    _projection_kernel[grid](
        x,
        norm,
        projection,
        part,
        square,
        rows,
        H=hidden,
        OUTPUTS=outputs,
        STEPS=tiling.steps,
        TILE_ROWS=tiling.rows,
        TILE_OUTPUTS=_TILE_OUTPUTS,
        STEP=tiling.step,
        STAGES=_STAGES,
        num_warps=4,
    )
    group_block = triton.next_power_of_2(group)
    per_program = max(_CHANNELS // group_block, 1)
    _prepare_kernel[(rows, triton.cdiv(groups, per_program))](
        x,
        norm,
        base,
        part,
        square,
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
        SPLITS=tiling.splits,
        SPLIT_BLOCK=triton.next_power_of_2(tiling.splits),
        num_warps=4,
    )
    return prepared, finish_delta


def finish_triton(
    residual: torch.Tensor, z: torch.Tensor, base: torch.Tensor, finish_delta: torch.Tensor
) -> torch.Tensor:
    batch, width, hidden = z.shape
    taps, groups = base.shape[1], finish_delta.shape[-1]
    require_contiguous("z", z, (batch, width, hidden), torch.float32, torch.bfloat16)
    require_contiguous("residual", residual, tuple(z.shape), z.dtype)
    require_contiguous("base", base, (SIDES, taps, hidden), z.dtype)
    require_contiguous("finish_delta", finish_delta, (batch, width, taps, groups), z.dtype)
    if not groups or hidden % groups:
        raise ValueError(f"finish_delta: {groups} groups, must divide the {hidden} channels of z")
    out = torch.empty_like(z)
    if z.numel():
        _finish_kernel[(batch * width, triton.cdiv(hidden, _FINISH_BLOCK))](
            residual,
            z,
            base,
            finish_delta,
            out,
            width,
            H=hidden,
            TAPS=taps,
            GROUP=hidden // groups,
            BLOCK=_FINISH_BLOCK,
            num_warps=4,
        )
    return out


# ------------------------------------------------------------------------------------------------ public


def prepare(
    x: torch.Tensor, norm: torch.Tensor, base: torch.Tensor, projection: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` [B, W, H] residual, `norm` [H] and `eps` of the branch's plain norm, `base` [2, taps, H], `projection`
    [2 taps H / group, H] -> the prepared branch input [B, W, H] and the finish delta [B, W, taps, H / group]."""
    run = prepare_triton if x.is_cuda else prepare_reference
    return run(x, norm, base, projection, eps)


def finish(residual: torch.Tensor, z: torch.Tensor, base: torch.Tensor, finish_delta: torch.Tensor) -> torch.Tensor:
    """`residual`, branch output `z` [B, W, H], `base` [2, taps, H], `finish_delta` of `prepare` -> the residual after
    the branch [B, W, H]."""
    run = finish_triton if z.is_cuda else finish_reference
    return run(residual, z, base, finish_delta)
