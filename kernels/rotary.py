"""Rotary position embedding, split-half, over the first `2 * len(frequencies)` dimensions of a head.

    out[j]     = x[j] * cos(p * f_j) - x[j + R/2] * sin(p * f_j)        j in [0, R/2)
    out[j+R/2] = x[j + R/2] * cos(p * f_j) + x[j] * sin(p * f_j)
    out[R:]    = x[R:]

The drafter rotates the full head by scalar cache positions. The target rotates a part of the head, by positions of
three axes (MRoPE); for text these are equal, so that scalar positions are exact there too. Angles, sine and cosine are
FP32, and are rounded to x's dtype before they are applied.

Source: specification ("rope_1d"), decision 2 (drafter), research of the target's MRoPE for text.
"""

# A launch takes num_warps and num_stages beside the kernel's own parameters.
# pyright: reportCallIssue=false

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kernels.launch_checks import require_contiguous


def rotary_frequencies(dim: int, theta: float, device: torch.device | str = "cpu") -> torch.Tensor:
    """Frequencies of `dim` rotated dimensions (even): FP32 [dim / 2], theta^(-2j/dim)."""
    exponent = torch.arange(0, dim, 2, dtype=torch.int64, device=device).float() / dim
    return 1.0 / (theta**exponent)


def yarn_frequencies(
    dim: int,
    theta: float,
    factor: float,
    original_positions: int,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """As `rotary_frequencies`, stretched by YaRN: frequencies of fewer than `beta_slow` turns over
    `original_positions` are divided by `factor`, those of more than `beta_fast` turns are kept, the rest is blended.
    `truncate` rounds the blend's ends to whole dimensions. Source: Peng et al. 2023, section 3.2."""

    def dimension_of(turns: float) -> float:
        return dim * math.log(original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(beta_fast), dimension_of(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = max(high - low, 1e-3)
    ramp = ((torch.arange(dim // 2, device=device).float() - low) / width).clamp(0.0, 1.0)
    frequencies = rotary_frequencies(dim, theta, device)
    return frequencies / factor * ramp + frequencies * (1.0 - ramp)


def rotary_tables(
    positions: torch.Tensor, frequencies: torch.Tensor, factor: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """`positions` integer [...] and FP32 `frequencies` [R/2] -> (cos, sin) times `factor`, FP32 [..., R/2]."""
    tables = rotary_tables_triton if positions.is_cuda else rotary_tables_reference
    return tables(positions, frequencies, factor)


def rotary_tables_reference(
    positions: torch.Tensor, frequencies: torch.Tensor, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    angles = positions.to(torch.float32)[..., None] * frequencies
    return angles.cos() * factor, angles.sin() * factor


@triton.jit
def turn(position, frequencies, factor):
    """FP32 (cos, sin) times `factor` of the FP32 product of an integer `position` and `frequencies`."""
    angle = position.to(tl.float32) * frequencies
    return tl.cos(angle) * factor, tl.sin(angle) * factor


@triton.jit
def _tables(
    positions_ptr, frequencies_ptr, cos_ptr, sin_ptr, rows, half, factor, ROWS: tl.constexpr, HALF: tl.constexpr
):
    row, j = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, HALF)
    position = tl.load(positions_ptr + row, mask=row < rows, other=0)
    frequencies = tl.load(frequencies_ptr + j, mask=j < half, other=0.0)
    cos, sin = turn(position[:, None], frequencies[None, :], factor)
    at = row.to(tl.int64)[:, None] * half + j[None, :]
    inside = (row < rows)[:, None] & (j < half)[None, :]
    tl.store(cos_ptr + at, cos, mask=inside)
    tl.store(sin_ptr + at, sin, mask=inside)


@triton.jit
def turned(x, other, d, cos_ptr, sin_ptr, HALF: tl.constexpr, dtype: tl.constexpr):
    """`apply_rotary` with its rounding points: FP32 `x` at dimensions `d` of a head, `other` at those that they are
    paired with, and the tables of its position -> `dtype`."""
    rotated = d < 2 * HALF
    cos = tl.load(cos_ptr + d % HALF, mask=rotated, other=0.0).to(dtype).to(tl.float32)
    sin = tl.load(sin_ptr + d % HALF, mask=rotated, other=0.0).to(dtype).to(tl.float32)
    along, across = (x * cos).to(dtype).to(tl.float32), (other * sin).to(dtype).to(tl.float32)
    return tl.where(rotated, tl.where(d < HALF, along - across, along + across), x).to(dtype)


@triton.jit
def partner_of(d, HALF: tl.constexpr):
    """The other dimension of each rotated pair; of a dimension that is not rotated, itself."""
    return tl.where(d < HALF, d + HALF, tl.where(d < 2 * HALF, d - HALF, d))


def rotary_tables_triton(
    positions: torch.Tensor, frequencies: torch.Tensor, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    require_contiguous("positions", positions, tuple(positions.shape), torch.int64, torch.int32)
    require_contiguous("frequencies", frequencies, tuple(frequencies.shape), torch.float32)
    half = frequencies.shape[0]
    shape = (2, *positions.shape, half)
    cos, sin = torch.empty(shape, dtype=torch.float32, device=positions.device)
    # 256 angles a program: a block of drafts has few positions, and these should not wait for one another.
    block = triton.next_power_of_2(half)
    rows = max(1, 256 // block)
    grid = (triton.cdiv(positions.numel(), rows),)
    _tables[grid](positions, frequencies, cos, sin, positions.numel(), half, factor, ROWS=rows, HALF=block, num_warps=4)
    return cos, sin


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`x` [..., heads, D] with tables [..., R/2] of its positions -> [..., heads, D], R <= D, in x's dtype."""
    half = cos.shape[-1]
    cos = cos[..., None, :].to(x.dtype)
    sin = sin[..., None, :].to(x.dtype)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
