"""The two launches of block attention: a share of the context each, then the sum of the shares.

A part is one program's share of a row's keys: the PARTS divide the committed context evenly, by the frontier on the
device, and part 0 takes the block itself too. A query row is a (column, head of the group) of one kv head. Each part
leaves, for its query rows, the largest score (base 2), the sum of weights and the sum of weighted values. Query rows of
inactive columns are computed as they come, and the second launch leaves zeros instead.

Source: Dao et al. 2023, "Flash-Decoding" (splitting the keys of few queries); rounding as `kernels/block_attention.py`
says.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _take_tile(q, k, v, visible, scale, best, total, mixed):
    """One tile of keys into the running softmax of base 2: `q` [M, D], `k`, `v` [N, D], `visible` [M, N]; `best`,
    `total` [M] and `mixed` [M, D] are the largest score, the sum of weights and of weighted values so far."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(visible, scores, float("-inf"))
    highest = tl.maximum(best, tl.max(scores, axis=1))
    # A query that has seen no key yet has no largest score, and -inf - -inf is not a number.
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - shift[:, None])
    kept = tl.exp2(best - shift)
    total = total * kept + tl.sum(weights, axis=1)
    mixed = tl.dot(weights.to(v.dtype), v, mixed * kept[:, None], input_precision="ieee")
    return highest, total, mixed


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
    PLANE_TOKENS: tl.constexpr,
    CAUSAL: tl.constexpr,
    PARTS: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ONE_PLACE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (kv head and tile of query rows, part, b)."""
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

    if part == 0:
        key = tl.arange(0, COLUMNS)
        at_k = k_ptr + batch.to(tl.int64) * k_row + kv_head * k_head + key * k_column
        at_v = v_ptr + batch.to(tl.int64) * v_row + kv_head * v_head + key * v_column
        k = tl.load(at_k[:, None] + dim[None, :], mask=(key < live)[:, None], other=0.0)
        v = tl.load(at_v[:, None] + dim[None, :], mask=(key < live)[:, None], other=0.0)
        distance = key[None, :] - column[:, None]
        visible = (key < live)[None, :] & (distance < WINDOW) & (distance > -WINDOW)
        if CAUSAL:
            visible = visible & (distance <= 0)
        best, total, mixed = _take_tile(q, k, v, visible, scale, best, total, mixed)

    # Of pages, a tile lies in one: it begins at a multiple of KEYS, which divides a page. A ring is one plane, so that
    # the loop has nothing to look up and all its loads can be under way at once.
    for start in tl.range(begin, stop, KEYS, num_stages=STAGES):
        if not ONE_PLACE:
            place = tl.load(places + start // PLANE_TOKENS)
        key = start + tl.arange(0, KEYS)
        populated = key < stop
        token = key % PLANE_TOKENS
        at_k = keys_ptr + place * keys_plane + kv_head * keys_head + token * keys_token
        at_v = values_ptr + place * values_plane + kv_head * values_head + token * values_token
        k = tl.load(at_k[:, None] + dim[None, :], mask=populated[:, None], other=0.0).to(q.dtype)
        v = tl.load(at_v[:, None] + dim[None, :], mask=populated[:, None], other=0.0)
        if q.dtype == tl.float32:
            v = v.to(tl.float32)
        visible = populated[None, :] & (end + column[:, None] - key[None, :] < WINDOW)
        best, total, mixed = _take_tile(q, k, v, visible, scale, best, total, mixed)

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
):
    """Program (query row, kv head, b). A part without a key has best = -inf and leaves the rest of it unwritten."""
    row, kv_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_heads = tl.num_programs(1)
    column = row // GROUP
    dim, part = tl.arange(0, HEAD_DIM), tl.arange(0, PARTS_PADDED)
    first = ((batch * kv_heads + kv_head) * (WIDTH * GROUP) + row).to(tl.int64) * PARTS
    exists = part < PARTS
    best = tl.load(best_ptr + first + part, mask=exists, other=float("-inf"))
    total = tl.load(total_ptr + first + part, mask=exists, other=0.0)
    mixed = tl.load(mixed_ptr + (first + part)[:, None] * HEAD_DIM + dim[None, :], mask=exists[:, None], other=0.0)
    written = best > float("-inf")
    weight = tl.where(written, tl.exp2(best - tl.max(best, axis=0)), 0.0)
    mixture = tl.sum(tl.where(written[:, None], mixed * weight[:, None], 0.0), axis=0)
    weights = tl.sum(tl.where(written, total * weight, 0.0), axis=0)
    out = mixture / weights  # pyright: ignore[reportOperatorIssue]
    live = column < tl.load(valid_ptr + batch)
    head = kv_head * GROUP + row % GROUP
    at = ((batch * WIDTH + column) * (kv_heads * GROUP) + head).to(tl.int64) * HEAD_DIM
    tl.store(out_ptr + at + dim, tl.where(live, out, 0.0).to(out_ptr.dtype.element_ty))
