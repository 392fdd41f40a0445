"""Depthwise causal convolution over the projected q, k, v of a gated delta net layer, followed by SiLU.

    out[t, c] = SiLU(sum_j w[c, j] x[t - (n - 1) + j, c])        n taps; rows before the first come from the history

The history is the last n - 1 projected columns before the frontier, oldest first. `short_convolution` does not move it:
it copies its inputs into `columns`, from which prefill and commit take the new history with `advance_histories`, an
exact gather. Sums and SiLU are FP32, and are rounded once.

Source: specification (Fold, convolution history); research of the target's layer.
"""

# Triton declares neither its launch options nor what constexpr parameters take.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.launch_checks import require, require_contiguous
from kernels.overlap import ask_for, let_next_start, overlaps, wait_for_earlier

_CHANNELS = 256
_COLUMNS = 4


def short_convolution_reference(
    x: torch.Tensor,
    histories: torch.Tensor,
    slots: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    columns: torch.Tensor,
) -> None:
    width, taps = x.shape[1], weight.float()[..., None].unbind(1)
    line = torch.cat((histories[slots].float(), x.transpose(1, 2).float()), dim=-1)
    convolved = line[..., :width] * taps[0]
    for shift, tap in enumerate(taps[1:], start=1):
        convolved = torch.addcmul(convolved, line[..., shift : shift + width], tap)
    out.copy_(F.silu(convolved).transpose(1, 2))
    columns.copy_(x)


def advance_histories_reference(
    histories: torch.Tensor, slots: torch.Tensor, columns: torch.Tensor, counts: torch.Tensor
) -> None:
    history = histories[slots]
    line = torch.cat((history, columns.permute(1, 0, 3, 2).to(history.dtype)), dim=-1)
    index = counts[:, None] + torch.arange(history.shape[-1], device=line.device)
    histories[slots] = line.gather(-1, index[:, None, None, :].expand(*history.shape))


# ------------------------------------------------------------------------------------------------ kernels


@triton.jit
def _short_convolution_kernel(
    x_ptr,
    histories_ptr,
    slots_ptr,
    weight_ptr,
    out_ptr,
    columns_ptr,
    width,
    channels,
    x_row,
    x_column,
    slot_stride,
    TAPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (tile of channels, tile of columns, b)."""
    batch, first = tl.program_id(2).to(tl.int64), tl.program_id(1) * COLUMNS
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    histories_ptr += tl.load(slots_ptr + batch) * slot_stride
    held = tl.minimum(c, channels - 1)
    ask_for(weight_ptr + held * TAPS, OVERLAPS)
    if first < TAPS - 1:
        ask_for(histories_ptr + held * (TAPS - 1), OVERLAPS)
    wait_for_earlier(OVERLAPS)
    let_next_start(OVERLAPS)
    t = first + tl.arange(0, COLUMNS)[:, None]
    exists = (c < channels)[None, :]
    x = x_ptr + batch * x_row + c[None, :]
    history = histories_ptr + c[None, :] * (TAPS - 1)
    at = (batch * width + t) * channels + c[None, :]
    total = tl.zeros((COLUMNS, CHANNELS), tl.float32)
    for tap in tl.static_range(TAPS):
        source = t - (TAPS - 1) + tap
        inside = exists & (source < width)
        new = tl.load(x + source.to(tl.int64) * x_column, mask=inside & (source >= 0), other=0.0)
        if tap == TAPS - 1:
            tl.store(columns_ptr + at, new, mask=inside)
        new = new.to(tl.float32)
        if first < TAPS - 1:  # channels of a history lie apart, and few programs need them
            old = tl.load(history + source + (TAPS - 1), mask=inside & (source < 0), other=0.0)
            new = tl.where(source < 0, old.to(tl.float32), new)
        weight = tl.load(weight_ptr + c * TAPS + tap, mask=c < channels, other=0.0).to(tl.float32)
        total += weight[None, :] * new
    out = total / (1.0 + tl.exp(-total))
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=exists & (t < width))


@triton.jit
def _advance_histories_kernel(
    histories_ptr,
    slots_ptr,
    columns_ptr,
    counts_ptr,
    width,
    channels,
    slot_stride,
    layer_stride,
    TAPS: tl.constexpr,
    PADDED: tl.constexpr,
    CHANNELS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (tile of channels, b, layer)."""
    wait_for_earlier(OVERLAPS)
    let_next_start(OVERLAPS)
    batch, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    count = tl.load(counts_ptr + batch).to(tl.int32)
    if count <= 0:
        return
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)[:, None]
    place = tl.arange(0, PADDED)[None, :]
    inside = (c < channels) & (place < TAPS - 1)
    history = histories_ptr + tl.load(slots_ptr + batch) * slot_stride + layer * layer_stride + c * (TAPS - 1)
    columns = columns_ptr + (layer * tl.num_programs(1) + batch) * width * channels + c
    source = count + place
    old = tl.load(history + source, mask=inside & (source < TAPS - 1), other=0.0)
    column = (source - (TAPS - 1)).to(tl.int64)
    new = tl.load(columns + column * channels, mask=inside & (source >= TAPS - 1), other=0.0)
    moved = tl.where(source < TAPS - 1, old, new.to(old.dtype))
    tl.debug_barrier()  # a place is written by one thread and read by another
    tl.store(history + place, moved, mask=inside)


# ------------------------------------------------------------------------------------------------ launch


def _check_histories(histories: torch.Tensor, layers: int, channels: int, taps: int) -> None:
    require("histories", histories, (histories.shape[0], layers, channels, taps - 1), torch.float32, torch.bfloat16)
    if not histories[:1, :1].is_contiguous():
        raise ValueError(f"histories: strides {histories.stride()}, a layer's channels must be contiguous")


def short_convolution_triton(
    x: torch.Tensor,
    histories: torch.Tensor,
    slots: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    columns: torch.Tensor,
) -> None:
    (batch, width, channels), taps = x.shape, weight.shape[-1]
    require("x", x, (batch, width, channels), torch.float32, torch.bfloat16)
    _check_histories(histories[:, None], 1, channels, taps)
    require_contiguous("slots", slots, (batch,), torch.int64)
    require_contiguous("weight", weight, (channels, taps), torch.float32, torch.bfloat16)
    for name, written in (("out", out), ("columns", columns)):
        require_contiguous(name, written, (batch, width, channels), x.dtype)
    if x.numel():
        overlapping = overlaps(x)
        _short_convolution_kernel[(triton.cdiv(channels, _CHANNELS), triton.cdiv(width, _COLUMNS), batch)](
            x,
            histories,
            slots,
            weight,
            out,
            columns,
            width,
            channels,
            x.stride(0),
            x.stride(1),
            histories.stride(0),
            TAPS=taps,
            COLUMNS=_COLUMNS,
            CHANNELS=_CHANNELS,
            OVERLAPS=overlapping,
            num_warps=4,
            launch_pdl=overlapping,
        )


def advance_histories_triton(
    histories: torch.Tensor, slots: torch.Tensor, columns: torch.Tensor, counts: torch.Tensor
) -> None:
    layers, batch, width, channels = columns.shape
    taps = histories.shape[-1] + 1
    require_contiguous("columns", columns, (layers, batch, width, channels), torch.float32, torch.bfloat16)
    _check_histories(histories, layers, channels, taps)
    require_contiguous("slots", slots, (batch,), torch.int64)
    require_contiguous("counts", counts, (batch,), torch.int64)
    if columns.numel():
        overlapping = overlaps(columns)
        _advance_histories_kernel[(triton.cdiv(channels, _CHANNELS), batch, layers)](
            histories,
            slots,
            columns,
            counts,
            width,
            channels,
            histories.stride(0),
            histories.stride(1),
            TAPS=taps,
            PADDED=triton.next_power_of_2(taps - 1),
            CHANNELS=_CHANNELS,
            OVERLAPS=overlapping,
            num_warps=4,
            launch_pdl=overlapping,
        )


# ------------------------------------------------------------------------------------------------ public


def short_convolution(
    x: torch.Tensor,
    histories: torch.Tensor,
    slots: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    columns: torch.Tensor,
) -> None:
    """`x` [B, T, C], `histories` [slots, C, n - 1], `slots` int64 [B], `weight` [C, n]; fills `out` and `columns`
    [B, T, C] in x's dtype, with the convolution and with x."""
    run = short_convolution_triton if x.is_cuda else short_convolution_reference
    run(x, histories, slots, weight, out, columns)


def advance_histories(
    histories: torch.Tensor, slots: torch.Tensor, columns: torch.Tensor, counts: torch.Tensor
) -> None:
    """Moves `histories` [slots, L, C, n - 1] over the first counts[b] of `columns` [L, B, T, C], in place.

    `slots` (distinct), `counts` int64 [B]. counts[b] = 0 touches no byte; columns at or beyond counts[b] are not used.
    """
    run = advance_histories_triton if columns.is_cuda else advance_histories_reference
    run(histories, slots, columns, counts)
