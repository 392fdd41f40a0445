"""Triton kernels of `experts.py`: choices sorted by expert, and products of tiles of columns with their experts.

A *place* is where the product of a column with one of its experts stands: column * (K + 1) + choice.
"""

# Triton declares neither its launch options nor what constexpr parameters take.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from kernels.overlap import let_next_start, wait_for_earlier


@triton.jit
def sort_kernel(
    experts_ptr,
    places_ptr,
    begins_ptr,
    ended_ptr,
    count,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program e: the places of the choices of expert e, in order, behind those of all lower experts; and where they
    begin. None of its products has ended."""
    wait_for_earlier(OVERLAPS)
    let_next_start(OVERLAPS)
    expert = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    lower = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, count, BLOCK):
        lower += (tl.load(experts_ptr + first + i, mask=first + i < count, other=expert) < expert).to(tl.int32)
    to = tl.sum(lower, 0)
    tl.store(begins_ptr + expert, to)
    tl.store(ended_ptr + expert, 0)
    if expert == 0:
        tl.store(ended_ptr + tl.num_programs(0), 0)  # of the shared expert
    for first in range(0, count, BLOCK):
        choice = first + i
        own = (tl.load(experts_ptr + choice, mask=choice < count, other=-1) == expert).to(tl.int32)
        tl.store(places_ptr + to + tl.cumsum(own, 0) - 1, choice // K * (K + 1) + choice % K, mask=own > 0)
        to += tl.sum(own, 0)


@triton.jit
def _columns_of_tile(
    places_ptr, begins_ptr, columns, experts, K: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr
):
    """(expert of the tile `program_id(1)`, how many columns it has, places int32 [ROWS], -1 where there is none). The
    expert is -1 for the shared one, and `experts` or more where there is no such tile."""
    i = tl.arange(0, ROWS)
    column = tl.program_id(1) * ROWS + i
    tile = tl.program_id(1) - tl.cdiv(columns, ROWS)
    e = tl.arange(0, EXPERTS)
    begins = tl.load(begins_ptr + e, mask=e < experts, other=columns * K)
    ends = tl.load(begins_ptr + e + 1, mask=e + 1 < experts, other=columns * K)
    tiles = (ends - begins + ROWS - 1) // ROWS
    earlier = tl.cumsum(tiles, 0) <= tile
    expert = tl.sum(earlier.to(tl.int32), 0)
    mine = e == expert
    begin, end = tl.sum(tl.where(mine, begins, 0), 0), tl.sum(tl.where(mine, ends, 0), 0)
    at = begin + (tile - tl.sum(tl.where(earlier, tiles, 0), 0)) * ROWS + i
    exists = (tile >= 0) & (at < end)
    routed = tl.load(places_ptr + at, mask=exists, other=-1)
    shared = tl.where(column < columns, column * (K + 1) + K, -1)
    places = tl.where(tile < 0, shared, routed)
    size = tl.where(tile < 0, columns, end - begin)
    expert = tl.where(tile < 0, -1, expert)
    return expert, size, places


@triton.jit
def _gate_up_rows(expert, weight_ptr, shared_ptr, width, inner, shared_inner, WEIGHTS: tl.constexpr):
    """Where the rows of tile `program_id(0)` of an expert's gate and up begin [WEIGHTS], in turn one of each."""
    shared = expert < 0
    size = tl.where(shared, shared_inner, inner)
    matrix = tl.where(shared, shared_ptr, weight_ptr + expert.to(tl.int64) * 2 * inner * width)
    row = tl.arange(0, WEIGHTS)
    at = tl.minimum(tl.program_id(0) * (WEIGHTS // 2) + row // 2, size - 1)
    return matrix + (row % 2 * size + at).to(tl.int64) * width


@triton.jit
def _down_rows(expert, weight_ptr, shared_ptr, width, inner, shared_inner, WEIGHTS: tl.constexpr):
    """As `_gate_up_rows`, of its down."""
    shared = expert < 0
    size = tl.where(shared, shared_inner, inner)
    matrix = tl.where(shared, shared_ptr, weight_ptr + expert.to(tl.int64) * width * inner)
    at = tl.minimum(tl.program_id(0) * WEIGHTS + tl.arange(0, WEIGHTS), width - 1)
    return matrix + at.to(tl.int64) * size


@triton.jit
def _product(
    x_rows,
    weight_rows,
    exists,
    depth,
    ROWS: tl.constexpr,
    WEIGHTS: tl.constexpr,
    DEPTH: tl.constexpr,
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """FP32 [ROWS, WEIGHTS] of the rows at `x_rows` [ROWS] that exist with those at `weight_rows` [WEIGHTS]. WHOLE:
    DEPTH divides `depth`."""
    k = tl.arange(0, DEPTH)
    x_at = x_rows[:, None] + k[None, :]
    weights_at = weight_rows[None, :] + k[:, None]
    total = tl.zeros((ROWS, WEIGHTS), tl.float32)
    for at in tl.range(0, depth, DEPTH, num_stages=STAGES):
        if WHOLE:
            x = tl.load(x_at + at, mask=exists[:, None], other=0.0)
            w = tl.load(weights_at + at)
        else:
            inside = at + k < depth
            x = tl.load(x_at + at, mask=exists[:, None] & inside[None, :], other=0.0)
            w = tl.load(weights_at + at, mask=inside[:, None], other=0.0)
        total = tl.dot(x, w, total, input_precision="ieee")
    return total


@triton.jit
def gate_up_kernel(
    x_ptr,
    places_ptr,
    begins_ptr,
    ended_ptr,
    weight_ptr,
    shared_ptr,
    hidden_ptr,
    columns,
    experts,
    width,
    inner,
    shared_inner,
    hidden_stride,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    WEIGHTS: tl.constexpr,
    DEPTH: tl.constexpr,
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """SiLU(gate) * up at every place. A gate row and its up row are neighbours in a tile, so that a thread has both. A
    program that has ended is counted for its expert."""
    wait_for_earlier(OVERLAPS)
    let_next_start(OVERLAPS)
    expert, _, places = _columns_of_tile(places_ptr, begins_ptr, columns, experts, K, ROWS, EXPERTS)
    if expert >= experts:
        return
    weight_rows = _gate_up_rows(expert, weight_ptr, shared_ptr, width, inner, shared_inner, WEIGHTS)
    exists = places >= 0
    x_rows = x_ptr + (tl.maximum(places, 0) // (K + 1)).to(tl.int64) * width
    total = _product(x_rows, weight_rows, exists, width, ROWS, WEIGHTS, DEPTH, WHOLE, STAGES)
    gate, up = tl.split(tl.reshape(total, (ROWS, WEIGHTS // 2, 2)))
    dtype = hidden_ptr.dtype.element_ty
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    column = tl.program_id(0) * (WEIGHTS // 2) + tl.arange(0, WEIGHTS // 2)
    inside = column < tl.where(expert < 0, shared_inner, inner)
    to = hidden_ptr + places[:, None].to(tl.int64) * hidden_stride + column[None, :]
    tl.store(to, (activated * up).to(dtype), mask=exists[:, None] & inside[None, :])
    tl.debug_barrier()  # one thread counts, and all have written
    tl.atomic_add(ended_ptr + tl.where(expert < 0, experts, expert), 1, sem="release")


@triton.jit
def _wait_for_hidden(
    ended_ptr, expert, experts, size, hidden_stride, GATE_ROWS: tl.constexpr, GATE_WEIGHTS: tl.constexpr
):
    """Returns when all programs of `gate_up_kernel` have ended that are of this expert, which has `size` columns."""
    programs = tl.cdiv(2 * hidden_stride, GATE_WEIGHTS) * tl.cdiv(size, GATE_ROWS)
    at = ended_ptr + tl.where(expert < 0, experts, expert)
    while tl.atomic_add(at, 0, sem="acquire") < programs:
        pass


@triton.jit
def down_kernel(
    hidden_ptr,
    places_ptr,
    begins_ptr,
    ended_ptr,
    weight_ptr,
    shared_ptr,
    share_ptr,
    parts_ptr,
    columns,
    experts,
    width,
    inner,
    shared_inner,
    hidden_stride,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    WEIGHTS: tl.constexpr,
    DEPTH: tl.constexpr,
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
    GATE_ROWS: tl.constexpr,
    GATE_WEIGHTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Every place's output, times its weight in the routing (`share`).

    It begins when every program of gate and up has begun, which all have waited for the sort, and a tile when those of
    its expert have ended: the last of gate and up leave most of the card's bandwidth to it.
    """
    let_next_start(OVERLAPS)
    expert, size, places = _columns_of_tile(places_ptr, begins_ptr, columns, experts, K, ROWS, EXPERTS)
    if expert >= experts:
        return
    weight_rows = _down_rows(expert, weight_ptr, shared_ptr, width, inner, shared_inner, WEIGHTS)
    _wait_for_hidden(ended_ptr, expert, experts, size, hidden_stride, GATE_ROWS, GATE_WEIGHTS)
    exists = places >= 0
    at = tl.maximum(places, 0).to(tl.int64)
    depth = tl.where(expert < 0, shared_inner, inner)
    total = _product(hidden_ptr + at * hidden_stride, weight_rows, exists, depth, ROWS, WEIGHTS, DEPTH, WHOLE, STAGES)
    dtype = parts_ptr.dtype.element_ty
    share = tl.load(share_ptr + at, mask=exists, other=0.0).to(tl.float32)
    part = (total.to(dtype).to(tl.float32) * share[:, None]).to(dtype)
    column = tl.program_id(0) * WEIGHTS + tl.arange(0, WEIGHTS)
    tl.store(parts_ptr + at[:, None] * width + column[None, :], part, mask=exists[:, None] & (column < width)[None, :])
    wait_for_earlier(OVERLAPS)  # for those after it, which wait for it alone
