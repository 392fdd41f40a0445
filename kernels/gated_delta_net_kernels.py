"""The one kernel of the gated delta rule, as `kernels/gated_delta_net.py` says it: a warp takes a tile of a head's
state through the columns, one after the other, with all of Dk in its registers.

Verification and Fold are this kernel with two of its parts present or absent. What moves the state is `_step`, which is
the same in both.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from kernels.overlap import ask_for, let_next_start, wait_for_earlier

NORM_EPS = tl.constexpr(1e-6)


@triton.jit
def _inverse_norm(x):
    return tl.rsqrt(tl.sum(x * x, 0) + NORM_EPS)


@triton.jit
def _step(state, k, v, g, beta):
    """`_step_reference` on a tile: `state` [Dk, T], raw `k` [Dk], `v` [T], scalars `g` and `beta`.

    The norm of k is a factor of T numbers then, not of Dk. The product that is added last is fused by name, or a
    compiler could choose to fuse it in one kernel and not in another.
    """
    k = k.to(tl.float32)
    norm = _inverse_norm(k)
    state = state * tl.exp(g)
    u = beta * (v.to(tl.float32) - norm * tl.sum(state * k[:, None], 0))
    return tl.fma(tl.broadcast_to(k[:, None], state.shape), tl.broadcast_to((norm * u)[None, :], state.shape), state)


@triton.jit
def recurrence_kernel(
    mixed_ptr,
    g_ptr,
    beta_ptr,
    states_ptr,
    slots_ptr,
    counts_ptr,
    out_ptr,
    width,
    slot_stride,
    layer_stride,
    scale,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE: tl.constexpr,
    ANSWERS: tl.constexpr,
    ADVANCES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (head and tile of Dv, b, layer). ANSWERS: y is written; ADVANCES: the state after counts[b] columns is.

    A column's inputs are asked for while the column before it is computed: they would be waited for otherwise.
    """
    tiles: tl.constexpr = VALUE_DIM // TILE
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    head, batch, layer = tl.program_id(0) // tiles, tl.program_id(1), tl.program_id(2)
    key = tl.arange(0, KEY_DIM)
    first_value = tl.program_id(0) % tiles * TILE
    value = first_value + tl.arange(0, TILE)
    states_ptr += tl.load(slots_ptr + batch) * slot_stride + layer.to(tl.int64) * layer_stride
    states_ptr += head * (KEY_DIM * VALUE_DIM)
    if ANSWERS:
        ask_for(states_ptr + key * VALUE_DIM + first_value, OVERLAPS)
    wait_for_earlier(OVERLAPS)
    let_next_start(OVERLAPS)
    row = (layer * tl.num_programs(1) + batch).to(tl.int64) * width
    live = tl.minimum(tl.load(counts_ptr + batch), width).to(tl.int32)
    out = out_ptr + row * (HEADS * VALUE_DIM) + head * VALUE_DIM + value
    if ANSWERS:
        for column in range(live, width):
            tl.store(out + column * (HEADS * VALUE_DIM), tl.zeros((TILE,), out_ptr.dtype.element_ty))
    if live <= 0:
        return
    at_state = states_ptr + key[:, None] * VALUE_DIM + value[None, :]
    at_q = mixed_ptr + row * channels + head // (HEADS // KEY_HEADS) * KEY_DIM + key
    at_k = at_q + KEY_HEADS * KEY_DIM
    at_v = mixed_ptr + row * channels + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + value
    at_g, at_beta = g_ptr + row * HEADS + head, beta_ptr + row * HEADS + head
    next_q, next_k, next_v = tl.load(at_q), tl.load(at_k), tl.load(at_v)
    next_g, next_beta = tl.load(at_g), tl.load(at_beta)
    state = tl.load(at_state)
    for column in range(live):
        q, k, v, g, beta = next_q, next_k, next_v, next_g, next_beta
        ahead = tl.minimum(column + 1, live - 1)
        next_k = tl.load(at_k + ahead * channels)
        next_v = tl.load(at_v + ahead * channels)
        next_g = tl.load(at_g + ahead * HEADS)
        next_beta = tl.load(at_beta + ahead * HEADS)
        state = _step(state, k, v, g, beta)
        if ANSWERS:
            next_q = tl.load(at_q + ahead * channels)
            q = q.to(tl.float32)
            y = tl.sum(state * q[:, None], 0) * (_inverse_norm(q) * scale)
            tl.store(out + column * (HEADS * VALUE_DIM), y.to(out_ptr.dtype.element_ty))
    if ADVANCES:
        tl.store(at_state, state)
