"""What attention's programs left, under the output gate: the sum of a context's parts, or the result of a whole one.

The gate has a launch of its own beside whole contexts, whose sums leave no registers for it. Rounding as
`kernels/paged_attention.py` says.
"""

# Triton declares neither its launch options nor what constexpr parameters take.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from kernels.overlap import let_next_start, wait_for_earlier
from kernels.paged_attention_kernels import parts_of_rows


@triton.jit
def _gated(mixture, gate, live, dtype: tl.constexpr):
    """Attention output [M, D] FP32 times the gate's sigmoid, with the reference's rounding points; else zeros."""
    weight = tl.sigmoid(gate.to(tl.float32)).to(dtype).to(tl.float32)
    return tl.where(live, mixture.to(dtype).to(tl.float32) * weight, 0.0).to(dtype)


@triton.jit(do_not_specialize=["batch", "width", "slots", "parts_of_all"])
def combine_gated_parts(
    gate_ptr,
    start_ptr,
    valid_ptr,
    best_ptr,
    total_ptr,
    mixed_ptr,
    out_ptr,
    gate_row,
    gate_column,
    gate_head,
    batch,
    width,
    slots,
    parts_of_all,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (tile of query rows, kv head, row of the batch), STEP parts at a time. A part without a key has
    best = -inf and leaves the rest of it unwritten."""
    wait_for_earlier(OVERLAPS)
    let_next_start(OVERLAPS)
    kv_head, lane = tl.program_id(1), tl.program_id(2)
    row, dim, of_step = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, HEAD_DIM), tl.arange(0, STEP)
    rows = width * GROUP
    column, head = row // GROUP, kv_head * GROUP + row % GROUP
    live = column < tl.load(valid_ptr + lane)
    at_gate = lane.to(tl.int64) * gate_row + column.to(tl.int64) * gate_column + head * gate_head
    gate = tl.load(gate_ptr + at_gate[:, None] + dim[None, :], mask=live[:, None], other=0.0)
    _, parts = parts_of_rows(start_ptr, valid_ptr, batch, slots, KEYS, LANES)
    index = tl.arange(0, LANES)
    first = tl.sum(tl.where(index < lane, parts, 0), 0)
    count = tl.sum(tl.where(index == lane, parts, 0), 0)

    place = (kv_head * parts_of_all + first).to(tl.int64) * rows + row
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixture = tl.zeros((ROWS, HEAD_DIM), tl.float32)
    for begin in range(0, count, STEP):  # pyright: ignore[reportArgumentType]
        at = place[:, None] + (begin + of_step)[None, :] * rows
        there = live[:, None] & (begin + of_step < count)[None, :]
        best = tl.load(best_ptr + at, mask=there, other=float("-inf"))
        weight = tl.load(total_ptr + at, mask=there, other=0.0)
        mixed = tl.load(mixed_ptr + at[:, :, None] * HEAD_DIM + dim[None, None, :], mask=there[:, :, None], other=0.0)
        some = best > float("-inf")
        higher = tl.maximum(highest, tl.max(best, 1))
        shift = tl.where(higher > float("-inf"), higher, 0.0)
        share = tl.exp2(best - shift[:, None])
        kept = tl.exp2(highest - shift)
        total = total * kept + tl.sum(tl.where(some, weight, 0.0) * share, 1)
        mixed = tl.where(some[:, :, None], mixed, 0.0) * share[:, :, None]
        mixture = mixture * kept[:, None] + tl.sum(mixed, 1)
        highest = higher
    dtype = out_ptr.dtype.element_ty
    out = _gated(mixture / tl.where(live, total, 1.0)[:, None], gate, live[:, None], dtype)
    at_out = ((lane.to(tl.int64) * width + column) * (KV_HEADS * GROUP) + head) * HEAD_DIM
    tl.store(out_ptr + at_out[:, None] + dim[None, :], out, mask=(row < rows)[:, None])


@triton.jit(do_not_specialize=["width"])
def gate_rows(
    gate_ptr,
    valid_ptr,
    out_ptr,
    gate_row,
    gate_column,
    gate_head,
    width,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (tile of (column, head) rows, row of the batch): the gate, in place."""
    lane = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = row // HEADS
    live = (column < tl.load(valid_ptr + lane))[:, None]
    dim = tl.arange(0, HEAD_DIM)[None, :]
    at_gate = lane.to(tl.int64) * gate_row + column.to(tl.int64) * gate_column + row % HEADS * gate_head
    at_out = out_ptr + (lane.to(tl.int64) * width * HEADS + row)[:, None] * HEAD_DIM + dim
    gate = tl.load(gate_ptr + at_gate[:, None] + dim, mask=live, other=0.0)
    out = tl.load(at_out, mask=live, other=0.0)
    tl.store(at_out, _gated(out.to(tl.float32), gate, live, out.dtype), mask=(column < width)[:, None])
