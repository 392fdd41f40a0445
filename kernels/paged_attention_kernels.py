"""The launches of paged attention: shares of the rows' contexts, then the sum of the shares and the gate.

The rows of a batch are cut into parts of one length by their lengths on the device: each of about `slots` programs
takes one part of one row, so that a single long row is spread over as many as many short ones. A query row is a
(column, head of the group) of one kv head. Each part leaves, for its query rows, the largest score (base 2), the sum of
weights and the sum of weighted values. Where query rows alone give enough programs a part is a whole row: its program
leaves the result, and only the gate is applied to it later (beside the sums it would not fit into registers).

Source: Dao et al. 2023, "Flash-Decoding" (splitting the keys of few queries); rounding as `kernels/paged_attention.py`
says.
"""

# Triton declares neither its launch options nor what constexpr parameters take.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention_tile import take_tile


@triton.jit
def parts_of_rows(start_ptr, valid_ptr, batch, slots, KEYS: tl.constexpr, LANES: tl.constexpr):
    """(keys of a part, number of parts of each row [LANES]): a multiple of KEYS, and at most `slots` + batch - 1
    parts. A row without live columns has none."""
    lane = tl.arange(0, LANES)
    valid = tl.load(valid_ptr + lane, mask=lane < batch, other=0).to(tl.int32)
    start = tl.load(start_ptr + lane, mask=lane < batch, other=0).to(tl.int32)
    length = tl.where(valid > 0, start + valid, 0)
    share = tl.maximum(tl.cdiv(tl.cdiv(tl.sum(length, 0), slots), KEYS), 1) * KEYS
    return share, tl.cdiv(length, share)


@triton.jit
def _gated(mixture, gate, live, dtype: tl.constexpr):
    """Attention output [M, D] FP32 times the gate's sigmoid, with the reference's rounding points; else zeros."""
    weight = tl.sigmoid(gate.to(tl.float32)).to(dtype).to(tl.float32)
    return tl.where(live, mixture.to(dtype).to(tl.float32) * weight, 0.0).to(dtype)


@triton.jit
def attend_parts(
    q_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    start_ptr,
    valid_ptr,
    best_ptr,
    total_ptr,
    mixed_ptr,
    out_ptr,
    page_stride,
    table_width,
    batch,
    width,
    slots,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (kv head and tile of query rows, part). WHOLE: part b is all of row b, and `out` is what it leaves."""
    # Of a chunk, later tiles see more keys: they begin first, so that none is left for the end.
    tile = tl.num_programs(0) // KV_HEADS - 1 - tl.program_id(0) // KV_HEADS
    kv_head, part = tl.program_id(0) % KV_HEADS, tl.program_id(1)
    if WHOLE:
        lane = part
        begin, share = 0, 1 << 30
    else:
        share, parts = parts_of_rows(start_ptr, valid_ptr, batch, slots, KEYS, LANES)
        ends = tl.cumsum(parts, 0)
        lane = tl.sum((ends <= part).to(tl.int32), 0)
        if lane >= batch:
            return
        begin = (part - tl.sum(tl.where(tl.arange(0, LANES) < lane, parts, 0), 0)) * share

    start, valid = tl.load(start_ptr + lane).to(tl.int32), tl.load(valid_ptr + lane).to(tl.int32)
    first_column = tile * ROWS // GROUP
    last_column = (tile * ROWS + ROWS - 1) // GROUP
    seen = tl.where(first_column < valid, start + tl.minimum(last_column + 1, valid), 0)
    stop = tl.minimum(begin + share, seen)

    row = tile * ROWS + tl.arange(0, ROWS)
    column = row // GROUP
    real = row < width * GROUP
    rows = width * GROUP
    slot_of_row = (kv_head * tl.num_programs(1) + part).to(tl.int64) * rows + row
    if (begin >= stop) & (not WHOLE):
        tl.store(best_ptr + slot_of_row, tl.full((ROWS,), float("-inf"), tl.float32), mask=real)
        return

    dim = tl.arange(0, HEAD_DIM)
    head = kv_head * GROUP + row % GROUP
    at_q = ((lane.to(tl.int64) * width + column) * (KV_HEADS * GROUP) + head) * HEAD_DIM
    q = tl.load(q_ptr + at_q[:, None] + dim[None, :], mask=real[:, None], other=0.0)
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, HEAD_DIM), tl.float32)

    # A tile lies in one page: it begins at a multiple of KEYS, which divides a page. The next tile's page is read a
    # tile ahead, or each tile would wait for it before its keys can be asked for.
    in_tile = (tl.arange(0, KEYS) * (KV_HEADS * HEAD_DIM))[:, None] + dim[None, :]
    pages = table_ptr + lane.to(tl.int64) * table_width
    page = tl.load(pages + begin // PAGE_TOKENS, mask=begin < stop, other=0)
    for key_of_tile in tl.range(begin, stop, KEYS, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        key = key_of_tile + tl.arange(0, KEYS)
        there = (key < stop)[:, None]
        at_tile = page * page_stride + (key_of_tile % PAGE_TOKENS) * (KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
        k = tl.load(keys_ptr + at_tile + in_tile, mask=there, other=0.0).to(q.dtype)
        v = tl.load(values_ptr + at_tile + in_tile, mask=there, other=0.0).to(q.dtype)
        visible = key[None, :] <= (start + column)[:, None]
        best, total, mixed = take_tile(q, k, v, visible, scale, best, total, mixed)
        page = tl.load(pages + tl.minimum((key_of_tile + KEYS) // PAGE_TOKENS, table_width - 1))

    if WHOLE:
        # Columns that are not live come out as they may: the second launch leaves zeros for them.
        out = (mixed / tl.where(total > 0, total, 1.0)[:, None]).to(q.dtype)
        tl.store(out_ptr + at_q[:, None] + dim[None, :], out, mask=real[:, None])
    else:
        tl.store(best_ptr + slot_of_row, best, mask=real)
        tl.store(total_ptr + slot_of_row, total, mask=real)
        tl.store(mixed_ptr + slot_of_row[:, None] * HEAD_DIM + dim[None, :], mixed, mask=real[:, None])


@triton.jit
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


@triton.jit
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
    PARTS_PADDED: tl.constexpr,
    STEP: tl.constexpr,
):
    """Program (query head, column, row). A part without a key has best = -inf and leaves the rest of it unwritten."""
    head, column, lane = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    dim = tl.arange(0, HEAD_DIM)
    dtype = out_ptr.dtype.element_ty
    at_out = out_ptr + ((lane.to(tl.int64) * width + column) * (KV_HEADS * GROUP) + head) * HEAD_DIM + dim
    if column >= tl.load(valid_ptr + lane):
        tl.store(at_out, tl.zeros((HEAD_DIM,), dtype))
        return
    gate = tl.load(gate_ptr + lane.to(tl.int64) * gate_row + column.to(tl.int64) * gate_column + head * gate_head + dim)
    _, parts = parts_of_rows(start_ptr, valid_ptr, batch, slots, KEYS, LANES)
    index = tl.arange(0, LANES)
    first = tl.sum(tl.where(index < lane, parts, 0), 0)
    count = tl.sum(tl.where(index == lane, parts, 0), 0)

    rows = width * GROUP
    first_slot = (head // GROUP * parts_of_all + first).to(tl.int64) * rows + column * GROUP + head % GROUP
    part = tl.arange(0, PARTS_PADDED)
    best = tl.load(best_ptr + first_slot + part * rows, mask=part < count, other=float("-inf"))
    total = tl.load(total_ptr + first_slot + part * rows, mask=best > float("-inf"), other=0.0)
    highest = tl.max(best, 0)
    total = tl.sum(total * tl.exp2(best - highest), 0)
    mixture = tl.zeros((HEAD_DIM,), tl.float32)
    for begin in range(0, count, STEP):  # pyright: ignore[reportArgumentType]
        of_step = begin + tl.arange(0, STEP)
        slot = first_slot + of_step * rows
        weight = tl.exp2(tl.load(best_ptr + slot, mask=of_step < count, other=float("-inf")) - highest)
        mixed = tl.load(mixed_ptr + slot[:, None] * HEAD_DIM + dim[None, :], mask=(weight > 0)[:, None], other=0.0)
        mixture += tl.sum(mixed * weight[:, None], 0)
    tl.store(at_out, _gated(mixture / total, gate, True, dtype))
