"""The kernels of the gated delta rule in chunks, as `kernels/delta_prefill.py` says it: `chunks_kernel` prepares what a
chunk needs that knows nothing of the state, `states_kernel` takes a tile of a head's state through the chunks.
"""

# Triton declares neither its launch options nor what constexpr parameters take.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gated_delta_net_kernels import NORM_EPS


@triton.jit
def _halves(x):
    """FP32 as two BF16 numbers, whose sum has 16 of its bits. The first is cut, not rounded: one instruction."""
    high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)


@triton.jit
def _dot_exact(a, b):
    """FP32 a b of columns a and FP32 b, which is halved where a is BF16."""
    if a.dtype == tl.bfloat16:
        high, low = _halves(b)
        return tl.dot(a, high, tl.dot(a, low))
    else:  # noqa: RET505 - Triton compiles what stands behind a return
        return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _dot_halves(a_high, a_low, b_high, b_low):
    return tl.dot(a_high, b_high, tl.dot(a_high, b_low, tl.dot(a_low, b_high)))


@triton.jit
def _block_inverses(lower):
    """Inverses of the 16 x 16 blocks on the diagonal of I + lower, FP32 [64, 64]: of all blocks at once, row by row,
    each row from those above it."""
    block, inner = tl.arange(0, 4), tl.arange(0, 16)
    diagonal = (block[:, None] == block[None, :])[:, None, :, None]
    rows = tl.sum(tl.where(diagonal, tl.reshape(-lower, (4, 16, 4, 16)), 0.0), 2)
    for index in range(2, 16):
        this = inner[None, :, None] == index
        row = tl.sum(tl.where(this, rows, 0.0), 1)
        row += tl.sum(row[:, :, None] * rows, 1)
        rows = tl.where(this, row[:, None, :], rows)
    rows += tl.where(inner[:, None] == inner[None, :], 1.0, 0.0)[None]
    return tl.reshape(tl.where(diagonal, rows[:, :, None, :], 0.0), (64, 64))


@triton.jit
def _unit_lower_inverse(lower, CHUNK: tl.constexpr, HALVED: tl.constexpr):
    """(I + lower)^-1 of a strictly lower [CHUNK, CHUNK]: blocks on the diagonal are inverted, two and two joined.

    Of [[A, 0], [C, B]] the inverse is [[A', 0], [-B' C A', B']], and powers of `lower`, which would grow, never appear.
    """
    tl.static_assert(CHUNK == 64)
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    inverse = _block_inverses(lower)
    lower_high, lower_low = _halves(lower)
    for size in tl.static_range(16, 33, 16):
        joined = (row // size == column // size + 1) & (row // (2 * size) == column // (2 * size))
        if HALVED:
            high, low = _halves(inverse)
            between = tl.where(joined, _dot_halves(lower_high, lower_low, high, low), 0.0)
            between_high, between_low = _halves(between)
            inverse -= _dot_halves(high, low, between_high, between_low)
        else:
            between = tl.where(joined, tl.dot(lower, inverse, input_precision="tf32x3"), 0.0)
            inverse -= tl.dot(inverse, between, input_precision="tf32x3")
    return inverse


@triton.jit
def _inverse_norm(x):
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + NORM_EPS)


@triton.jit
def chunks_kernel(
    mixed_ptr,
    g_ptr,
    beta_ptr,
    counts_ptr,
    inverse_ptr,
    pairs_ptr,
    factors_ptr,
    width,
    scale,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (chunk, head, b): T, P, and the chunk's factors of k S, of q S, of k u^T and of S, [4, CHUNK] FP32."""
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    halved: tl.constexpr = mixed_ptr.dtype.element_ty == tl.bfloat16
    chunk, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    live = tl.minimum(tl.load(counts_ptr + batch), width).to(tl.int32)
    if chunk * CHUNK >= live:
        return
    t, key = tl.arange(0, CHUNK), tl.arange(0, KEY_DIM)
    inside = chunk * CHUNK + t < live
    first = batch.to(tl.int64) * width + chunk * CHUNK
    at_q = mixed_ptr + first * channels + head // (HEADS // KEY_HEADS) * KEY_DIM
    of_q = t[:, None] * channels + key[None, :]
    k = tl.load(at_q + KEY_HEADS * KEY_DIM + of_q, mask=inside[:, None], other=0.0)
    g = tl.load(g_ptr + first * HEADS + head + t * HEADS, mask=inside, other=0.0)
    beta = tl.load(beta_ptr + first * HEADS + head + t * HEADS, mask=inside, other=0.0)
    k_norm = _inverse_norm(k)
    below = t[:, None] > t[None, :]
    gates = tl.where(below, g[:, None], 0.0)
    decay = tl.where(t[:, None] >= t[None, :], tl.exp(tl.cumsum(gates, 0)), 0.0) * k_norm[None, :]

    place = (batch * HEADS + head).to(tl.int64) * tl.num_programs(0) + chunk
    square = t[:, None] * CHUNK + t[None, :]
    from_start = tl.exp(tl.cumsum(g, 0))
    factors = factors_ptr + place * (4 * CHUNK) + t
    tl.store(factors, from_start * k_norm)
    tl.store(factors + 2 * CHUNK, tl.exp(tl.sum(gates, 0)) * k_norm)
    tl.store(factors + 3 * CHUNK, tl.exp(tl.sum(g, 0)) + tl.zeros((CHUNK,), tl.float32))
    q = tl.load(at_q + of_q, mask=inside[:, None], other=0.0)
    q_norm = _inverse_norm(q) * scale
    tl.store(factors + CHUNK, from_start * q_norm)
    precision: tl.constexpr = "tf32x3"
    pairs = tl.dot(q, tl.trans(k), input_precision=precision) * decay * q_norm[:, None]
    tl.store(pairs_ptr + place * CHUNK * CHUNK + square, pairs.to(pairs_ptr.dtype.element_ty))
    lower = tl.dot(k, tl.trans(k), input_precision=precision) * decay * (beta * k_norm)[:, None]
    inverse = _unit_lower_inverse(tl.where(below, lower, 0.0), CHUNK, halved) * beta[None, :]
    if halved:
        high, low = _halves(inverse)
        tl.store(inverse_ptr + place * (2 * CHUNK * CHUNK) + square, high)
        tl.store(inverse_ptr + place * (2 * CHUNK * CHUNK) + CHUNK * CHUNK + square, low)
    else:
        tl.store(inverse_ptr + place * (CHUNK * CHUNK) + square, inverse)


@triton.jit
def _load(pointers, inside, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(pointers)
    else:  # noqa: RET505
        return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def _chunk(
    state,
    at_columns,
    of_q,
    of_k,
    of_v,
    at_inverse,
    at_pairs,
    at_factors,
    inside,
    CHUNK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """(S after a chunk, its y) from S before it. Columns that are not `inside` are not read, unless all are."""
    t = tl.arange(0, CHUNK)
    square = t[:, None] * CHUNK + t[None, :]
    q = _load(at_columns + of_q, inside, WHOLE)
    k = _load(at_columns + of_k, inside, WHOLE)
    v = _load(at_columns + of_v, inside, WHOLE)
    inverse, pairs = tl.load(at_inverse + square), tl.load(at_pairs + square)
    of_read, of_answer = tl.load(at_factors + t)[:, None], tl.load(at_factors + CHUNK + t)[:, None]
    of_write, kept = tl.load(at_factors + 2 * CHUNK + t)[:, None], tl.load(at_factors + 3 * CHUNK)
    if k.dtype == tl.bfloat16:
        # both products with the state stand together: its halves need not outlive them
        high, low = _halves(state)
        read, answer = tl.dot(k, high, tl.dot(k, low)), tl.dot(q, high, tl.dot(q, low))
        right_high, right_low = _halves(v.to(tl.float32) - of_read * read)
        inverse_low = tl.load(at_inverse + CHUNK * CHUNK + square)
        u = tl.dot(inverse, right_low, tl.dot(inverse_low, right_high))
        u = tl.dot(inverse, right_high, u)
    else:
        read, answer = _dot_exact(k, state), _dot_exact(q, state)
        u = _dot_exact(inverse, v - of_read * read)
    y = of_answer * answer + tl.dot(pairs, u.to(pairs.dtype), input_precision="tf32x3")
    return state * kept + _dot_exact(tl.trans(k), u * of_write), y


@triton.jit
def states_kernel(
    mixed_ptr,
    states_ptr,
    slots_ptr,
    counts_ptr,
    inverse_ptr,
    pairs_ptr,
    factors_ptr,
    out_ptr,
    width,
    slot_stride,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (head and tile of Dv, b): the state after `counts[b]` columns, and y of all columns."""
    tiles: tl.constexpr = VALUE_DIM // TILE
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    square: tl.constexpr = CHUNK * CHUNK
    parts: tl.constexpr = 2 if mixed_ptr.dtype.element_ty == tl.bfloat16 else 1
    head, batch = tl.program_id(0) // tiles, tl.program_id(1)
    live = tl.minimum(tl.load(counts_ptr + batch), width).to(tl.int32)
    t, key = tl.arange(0, CHUNK), tl.arange(0, KEY_DIM)
    value = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    first = batch.to(tl.int64) * width
    of_out = head * VALUE_DIM + t[:, None] * (HEADS * VALUE_DIM) + value[None, :]
    whole = tl.maximum(live, 0) // CHUNK
    for chunk in range(whole, tl.cdiv(width, CHUNK)):
        nothing = tl.zeros((CHUNK, TILE), out_ptr.dtype.element_ty)
        dead = (chunk * CHUNK + t >= live) & (chunk * CHUNK + t < width)
        tl.store(out_ptr + (first + chunk * CHUNK) * (HEADS * VALUE_DIM) + of_out, nothing, mask=dead[:, None])
    if live <= 0:
        return
    at_state = states_ptr + tl.load(slots_ptr + batch) * slot_stride + head * (KEY_DIM * VALUE_DIM)
    of_state = key[:, None] * VALUE_DIM + value[None, :]
    of_q = head // (HEADS // KEY_HEADS) * KEY_DIM + t[:, None] * channels + key[None, :]
    of_k = KEY_HEADS * KEY_DIM + of_q
    of_v = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + t[:, None] * channels + value[None, :]
    place = (batch * HEADS + head).to(tl.int64) * tl.cdiv(width, CHUNK)
    state = tl.load(at_state + of_state)
    for chunk in tl.range(0, whole, num_stages=STAGES):
        row = first + chunk * CHUNK
        at_inverse = inverse_ptr + (place + chunk) * (parts * square)
        at_pairs, at_factors = pairs_ptr + (place + chunk) * square, factors_ptr + (place + chunk) * (4 * CHUNK)
        state, y = _chunk(
            *(state, mixed_ptr + row * channels, of_q, of_k, of_v, at_inverse, at_pairs, at_factors, None),
            CHUNK=CHUNK,
            WHOLE=True,
        )
        tl.store(out_ptr + row * (HEADS * VALUE_DIM) + of_out, y.to(out_ptr.dtype.element_ty))
    if whole * CHUNK < live:
        row = first + whole * CHUNK
        inside = (whole * CHUNK + t < live)[:, None]
        at_inverse = inverse_ptr + (place + whole) * (parts * square)
        at_pairs, at_factors = pairs_ptr + (place + whole) * square, factors_ptr + (place + whole) * (4 * CHUNK)
        state, y = _chunk(
            *(state, mixed_ptr + row * channels, of_q, of_k, of_v, at_inverse, at_pairs, at_factors, inside),
            CHUNK=CHUNK,
            WHOLE=False,
        )
        tl.store(out_ptr + row * (HEADS * VALUE_DIM) + of_out, y.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(at_state + of_state, state)
