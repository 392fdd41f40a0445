"""Attention of query rows over keys in pages: parts of the rows' contexts, or whole contexts.

A query row is a (column, head of the group) of one kv head. Where query rows are few, the rows of a batch are cut into
parts of one length by their lengths on the device: each of about `slots` programs takes one part of one row, so that a
single long row is spread over as many as many short ones. Each part leaves, for its query rows, the largest score (base
2), the sum of weights and the sum of weighted values. Where query rows alone give enough programs, each takes a whole
context and leaves the result. What is left is summed and gated in `kernels/paged_attention_gate.py`.

Source: Dao et al. 2023, "Flash-Decoding" (splitting the keys of few queries); rounding as `kernels/paged_attention.py`
says.
"""

# Triton declares neither its launch options nor what constexpr parameters take.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention_tile import take_seen_tile, take_tile
from kernels.overlap import let_next_start, wait_for_earlier


@triton.jit
def parts_of_rows(start_ptr, valid_ptr, batch, slots, KEYS: tl.constexpr, LANES: tl.constexpr):
    """(keys of a part, number of parts of each row [LANES]): a multiple of KEYS, and at most `slots` + batch - 1
    parts. A row without live columns has none.

    An even share of all keys cuts most rows once more than there are slots for, and who comes last waits for a slot. So
    the part is up to a half longer than that, as soon as all parts run at one time.
    """
    lane = tl.arange(0, LANES)
    valid = tl.load(valid_ptr + lane, mask=lane < batch, other=0).to(tl.int32)
    start = tl.load(start_ptr + lane, mask=lane < batch, other=0).to(tl.int32)
    tiles = tl.where(valid > 0, tl.cdiv(start + valid, KEYS), 0)
    least = tl.maximum(tl.cdiv(tl.sum(tiles, 0), slots), 1)
    longer = least + least * tl.arange(0, 16) // 32
    parts = tl.sum(tl.cdiv(tiles[:, None], longer[None, :]), 0)
    fitting = tl.min(tl.where(parts <= slots, longer, 1 << 30), 0)
    share = tl.where(fitting == 1 << 30, least, fitting)
    return share * KEYS, tl.cdiv(tiles, share)


@triton.jit
def _take_tiles(
    q,
    keys_ptr,
    values_ptr,
    pages_ptr,
    page,
    begin,
    end,
    stop,
    position,
    scale,
    best,
    total,
    mixed,
    page_stride,
    table_width,
    TOKEN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The tiles of keys [begin, end) into the running softmax of query rows at `position` [M]. `keys_ptr`,
    `values_ptr`: one kv head's, TOKEN numbers from token to token. MASKED: a row sees keys up to its own position, and
    none from `stop` on is read; else every row sees every key.

    A tile lies in one page: it begins at a multiple of KEYS, which divides a page. The first tile's is `page`; the next
    one's is read a tile ahead, or each tile would wait for it before its keys can be asked for.
    """
    in_tile = (tl.arange(0, KEYS) * TOKEN)[:, None] + tl.arange(0, HEAD_DIM)[None, :]
    for key_of_tile in tl.range(begin, end, KEYS, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        at_tile = page * page_stride + (key_of_tile % PAGE_TOKENS) * TOKEN
        if MASKED:
            key = key_of_tile + tl.arange(0, KEYS)
            there = (key < stop)[:, None]
            k = tl.load(keys_ptr + at_tile + in_tile, mask=there, other=0.0).to(q.dtype)
            v = tl.load(values_ptr + at_tile + in_tile, mask=there, other=0.0).to(q.dtype)
            visible = key[None, :] <= position[:, None]
            best, total, mixed = take_tile(q, k, v, visible, scale, best, total, mixed)
        else:
            k = tl.load(keys_ptr + at_tile + in_tile).to(q.dtype)
            v = tl.load(values_ptr + at_tile + in_tile).to(q.dtype)
            best, total, mixed = take_seen_tile(q, k, v, scale, best, total, mixed)
        page = tl.load(pages_ptr + tl.minimum((key_of_tile + KEYS) // PAGE_TOKENS, table_width - 1))
    return best, total, mixed


@triton.jit
def _seen(first_row, start, valid, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Keys that at least one live row of a tile of query rows sees."""
    last_column = tl.minimum((first_row + ROWS - 1) // GROUP + 1, valid)
    return tl.where(first_row // GROUP < valid, start + last_column, 0)


@triton.jit
def _take_keys(
    q,
    keys_ptr,
    values_ptr,
    pages_ptr,
    page,
    begin,
    stop,
    common,
    position,
    scale,
    page_stride,
    table_width,
    TOKEN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """(best, total, mixed) of keys [begin, stop), the first in `page`. Every row of the tile sees the keys before
    `common`: only the few tiles after them ask who sees what."""
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, HEAD_DIM), tl.float32)
    middle = begin + tl.maximum(tl.minimum(common, stop) - begin, 0) // KEYS * KEYS
    last_page = tl.load(pages_ptr + middle // PAGE_TOKENS, mask=middle < stop, other=0)
    for masked in tl.static_range(2):
        best, total, mixed = _take_tiles(
            q,
            keys_ptr,
            values_ptr,
            pages_ptr,
            last_page if masked else page,
            middle if masked else begin,
            stop if masked else middle,
            stop,
            position,
            scale,
            best,
            total,
            mixed,
            page_stride,
            table_width,
            TOKEN,
            HEAD_DIM,
            PAGE_TOKENS,
            KEYS,
            masked == 1,
            STAGES,
        )
    return best, total, mixed


@triton.jit(do_not_specialize=["table_width", "batch", "width", "slots"])
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
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (kv head and tile of query rows, part)."""
    wait_for_earlier(OVERLAPS)
    kv_head, first_row = tl.program_id(0) % KV_HEADS, tl.program_id(0) // KV_HEADS * ROWS
    part, index = tl.program_id(1), tl.arange(0, LANES)
    share, parts = parts_of_rows(start_ptr, valid_ptr, batch, slots, KEYS, LANES)
    lane = tl.sum((tl.cumsum(parts, 0) <= part).to(tl.int32), 0)
    if lane >= batch:
        return
    begin = (part - tl.sum(tl.where(index < lane, parts, 0), 0)) * share

    start, valid = tl.load(start_ptr + lane).to(tl.int32), tl.load(valid_ptr + lane).to(tl.int32)
    stop = tl.minimum(begin + share, _seen(first_row, start, valid, GROUP, ROWS))
    row, rows = first_row + tl.arange(0, ROWS), width * GROUP
    real = row < rows
    place = (kv_head * tl.num_programs(1) + part).to(tl.int64) * rows + row
    if begin >= stop:
        tl.store(best_ptr + place, tl.full((ROWS,), float("-inf"), tl.float32), mask=real)
        return
    column, dim = row // GROUP, tl.arange(0, HEAD_DIM)
    pages = table_ptr + lane.to(tl.int64) * table_width
    page = tl.load(pages + begin // PAGE_TOKENS)  # ahead of q, which is waited for before the first keys are asked for
    at_q = ((lane.to(tl.int64) * width + column) * (KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP) * HEAD_DIM
    q = tl.load(q_ptr + at_q[:, None] + dim[None, :], mask=real[:, None], other=0.0)
    let_next_start(OVERLAPS)
    best, total, mixed = _take_keys(
        q,
        keys_ptr + kv_head * HEAD_DIM,
        values_ptr + kv_head * HEAD_DIM,
        pages,
        page,
        begin,
        stop,
        start + first_row // GROUP + 1,
        start + column,
        scale,
        page_stride,
        table_width,
        KV_HEADS * HEAD_DIM,
        HEAD_DIM,
        PAGE_TOKENS,
        ROWS,
        KEYS,
        STAGES,
    )
    tl.store(best_ptr + place, best, mask=real)
    tl.store(total_ptr + place, total, mask=real)
    tl.store(mixed_ptr + place[:, None] * HEAD_DIM + dim[None, :], mixed, mask=real[:, None])


@triton.jit(do_not_specialize=["table_width", "width"])
def attend_rows(
    q_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    start_ptr,
    valid_ptr,
    out_ptr,
    page_stride,
    table_width,
    width,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (kv head and tile of query rows, row of the batch): a whole context. Columns that are not live come out
    as they may: the gate's launch leaves zeros for them."""
    # Later tiles see more keys: they begin first, so that none is left for the end.
    tile = tl.num_programs(0) // KV_HEADS - 1 - tl.program_id(0) // KV_HEADS
    kv_head, lane, first_row = tl.program_id(0) % KV_HEADS, tl.program_id(1), tile * ROWS
    start, valid = tl.load(start_ptr + lane).to(tl.int32), tl.load(valid_ptr + lane).to(tl.int32)
    row = first_row + tl.arange(0, ROWS)
    column, dim = row // GROUP, tl.arange(0, HEAD_DIM)
    real = (row < width * GROUP)[:, None]
    at_q = ((lane.to(tl.int64) * width + column) * (KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP) * HEAD_DIM
    q = tl.load(q_ptr + at_q[:, None] + dim[None, :], mask=real, other=0.0)
    stop = _seen(first_row, start, valid, GROUP, ROWS)
    pages = table_ptr + lane.to(tl.int64) * table_width
    page = tl.load(pages, mask=stop > 0, other=0)
    _best, total, mixed = _take_keys(
        q,
        keys_ptr + kv_head * HEAD_DIM,
        values_ptr + kv_head * HEAD_DIM,
        pages,
        page,
        0,
        stop,
        start + first_row // GROUP + 1,
        start + column,
        scale,
        page_stride,
        table_width,
        KV_HEADS * HEAD_DIM,
        HEAD_DIM,
        PAGE_TOKENS,
        ROWS,
        KEYS,
        STAGES,
    )
    out = (mixed / tl.where(total > 0, total, 1.0)[:, None]).to(q.dtype)
    tl.store(out_ptr + at_q[:, None] + dim[None, :], out, mask=real)
