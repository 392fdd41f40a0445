"""The two launches of block attention: a share of the context each, then the sum of the shares.

A part is one program's share of a row's keys: the PARTS divide the committed context evenly, by the frontier on the
device, and part 0 takes the block itself too. A query row is a (column, head of the group) of one kv head. Each part
leaves, for its query rows, the largest score (base 2), the sum of weights and the sum of weighted values. Query rows of
inactive columns are computed as they come, and the second launch leaves zeros instead.

Source: Dao et al. 2023, "Flash-Decoding" (splitting the keys of few queries); rounding as `kernels/block_attention.py`
says.
"""

# Triton declares neither its launch options nor what constexpr parameters take.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention_tile import take_tile
from kernels.overlap import let_next_start, wait_for_earlier


@triton.jit
def partial_attention(
    q_ptr,
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    places_ptr,
    frontier_ptr,
    valid_ptr,
    best_ptr,
    total_ptr,
    mixed_ptr,
    q_row,
    q_column,
    q_head,
    k_row,
    k_column,
    k_head,
    v_row,
    v_column,
    v_head,
    keys_plane,
    keys_token,
    keys_head,
    values_plane,
    values_token,
    values_head,
    place_count,
    scale,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    BOUNDED: tl.constexpr,
    PLANE_TOKENS: tl.constexpr,
    CAUSAL: tl.constexpr,
    PARTS: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ONE_PLACE: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (kv head and tile of query rows, part, b)."""
    wait_for_earlier(OVERLAPS)
    kv_head, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    part, batch = tl.program_id(1), tl.program_id(2)
    places = places_ptr + batch * place_count
    live = tl.load(valid_ptr + batch).to(tl.int32)
    end = tl.load(frontier_ptr + batch).to(tl.int32)
    place = tl.load(places, mask=place_count > 0, other=0)
    if live == 0:
        return
    first = tl.maximum(end - WINDOW + 1, 0)
    share = tl.cdiv(tl.cdiv(end - first, PARTS), KEYS) * KEYS
    begin = first + part * share
    stop = tl.minimum(begin + share, end)

    row = tile * ROWS + tl.arange(0, ROWS)
    column = row // GROUP
    kv_heads = tl.num_programs(0) // TILES
    slot_of_row = ((batch * kv_heads + kv_head) * (WIDTH * GROUP) + row) * PARTS + part
    real = row < WIDTH * GROUP
    if (part > 0) & (begin >= end):
        tl.store(best_ptr + slot_of_row, tl.full((ROWS,), float("-inf"), tl.float32), mask=real)
        return

    dim = tl.arange(0, HEAD_DIM)
    head = kv_head * GROUP + row % GROUP
    at_q = q_ptr + batch.to(tl.int64) * q_row + column * q_column + head * q_head
    q = tl.load(at_q[:, None] + dim[None, :], mask=real[:, None], other=0.0)
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, HEAD_DIM), tl.float32)

    # The block's keys are asked for before the context's and taken after them, when they have long been here.
    block_key = tl.arange(0, COLUMNS)
    in_block = (block_key < live) & (part == 0)
    at_block_k = k_ptr + batch.to(tl.int64) * k_row + kv_head * k_head + block_key * k_column
    at_block_v = v_ptr + batch.to(tl.int64) * v_row + kv_head * v_head + block_key * v_column
    block_k = tl.load(at_block_k[:, None] + dim[None, :], mask=in_block[:, None], other=0.0)
    block_v = tl.load(at_block_v[:, None] + dim[None, :], mask=in_block[:, None], other=0.0)

    # Of pages, a tile lies in one: it begins at a multiple of KEYS, which divides a page. The next tile's place is read
    # a tile ahead, or each tile would wait for it before its keys can be asked for. A ring is one plane.
    if not ONE_PLACE:
        place = tl.load(places + begin // PLANE_TOKENS % place_count)
    for start in tl.range(begin, stop, KEYS, num_stages=STAGES):
        key = start + tl.arange(0, KEYS)
        populated = key < stop
        token = key % PLANE_TOKENS
        at_k = keys_ptr + place * keys_plane + kv_head * keys_head + token * keys_token
        at_v = values_ptr + place * values_plane + kv_head * values_head + token * values_token
        k = tl.load(at_k[:, None] + dim[None, :], mask=populated[:, None], other=0.0).to(q.dtype)
        v = tl.load(at_v[:, None] + dim[None, :], mask=populated[:, None], other=0.0)
        if q.dtype == tl.float32:
            v = v.to(tl.float32)
        visible = populated[None, :]
        if BOUNDED:
            visible = visible & (end + column[:, None] - key[None, :] < WINDOW)
        best, total, mixed = take_tile(q, k, v, visible, scale, best, total, mixed)
        if not ONE_PLACE:
            place = tl.load(places + (start + KEYS) // PLANE_TOKENS % place_count)

    if part == 0:
        distance = block_key[None, :] - column[:, None]
        visible = in_block[None, :] & (distance < WINDOW) & (distance > -WINDOW)
        if CAUSAL:
            visible = visible & (distance <= 0)
        best, total, mixed = take_tile(q, block_k, block_v, visible, scale, best, total, mixed)

    let_next_start(OVERLAPS)
    tl.store(best_ptr + slot_of_row, best, mask=real)
    tl.store(total_ptr + slot_of_row, total, mask=real)
    at_mixed = mixed_ptr + slot_of_row.to(tl.int64) * HEAD_DIM
    tl.store(at_mixed[:, None] + dim[None, :], mixed, mask=real[:, None])


@triton.jit
def combine_parts(
    best_ptr,
    total_ptr,
    mixed_ptr,
    valid_ptr,
    out_ptr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (tile of query rows, kv head, b). A part without a key has best = -inf and leaves the rest of it
    unwritten."""
    wait_for_earlier(OVERLAPS)
    let_next_start(OVERLAPS)
    kv_head, batch = tl.program_id(1), tl.program_id(2)
    kv_heads = tl.num_programs(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = row // GROUP
    real = row < WIDTH * GROUP
    live = real & (column < tl.load(valid_ptr + batch))
    dim, part = tl.arange(0, HEAD_DIM), tl.arange(0, PARTS_PADDED)
    first = ((batch * kv_heads + kv_head) * (WIDTH * GROUP) + row).to(tl.int64) * PARTS
    exists = live[:, None] & (part < PARTS)[None, :]
    best = tl.load(best_ptr + first[:, None] + part[None, :], mask=exists, other=float("-inf"))
    written = best > float("-inf")
    total = tl.load(total_ptr + first[:, None] + part[None, :], mask=written, other=0.0)
    highest = tl.max(best, axis=1)
    highest = tl.where(highest > float("-inf"), highest, 0.0)
    total = tl.sum(total * tl.exp2(best - highest[:, None]), axis=1)
    mixture = tl.zeros((ROWS, HEAD_DIM), tl.float32)
    for index in tl.static_range(PARTS):
        share = tl.load(best_ptr + first + index, mask=live, other=float("-inf"))
        some = (share > float("-inf"))[:, None]
        mixed = tl.load(mixed_ptr + (first + index)[:, None] * HEAD_DIM + dim[None, :], mask=some, other=0.0)
        mixture += mixed * tl.exp2(share - highest)[:, None]
    out = tl.where(live[:, None], mixture / tl.where(live, total, 1.0)[:, None], 0.0)
    head = kv_head * GROUP + row % GROUP
    at = ((batch * WIDTH + column) * (kv_heads * GROUP) + head).to(tl.int64) * HEAD_DIM
    tl.store(out_ptr + at[:, None] + dim[None, :], out.to(out_ptr.dtype.element_ty), mask=real[:, None])
