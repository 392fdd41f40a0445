"""The cuts of `kernels/cuts.py` within their brackets, by exact sums."""

# Triton declares neither its launch options nor what constexpr parameters take.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from kernels.cut_search import BEST, FIELDS, HELD, STEEP, K, P
from kernels.logit_rows import LANES, first_key, load_chunk, logit_of, logits_at, tokens_of
from kernels.ordering import packed_key
from kernels.sampling import MASS_UNITS, mass_of, weight_of


@triton.jit
def _held(logit, low, high):
    return (logit >= low) & (logit < high)


@triton.jit
def _hold(logit, token, low, high, held_ptr, keys_ptr):
    """Puts the keys of a bracket's tokens where the next ones of the row go."""
    held = _held(logit, low, high)
    if tl.max(tl.max(held.to(tl.int32), 0), 0) > 0:
        place = tl.atomic_add(held_ptr + tl.zeros_like(token), 1, mask=held, sem="relaxed")
        tl.store(keys_ptr + place, packed_key(logit, token), mask=held)


@triton.jit(do_not_specialize=["chunks", "span"])
def gather_kernel(
    logits_ptr,
    best_ptr,
    state_ptr,
    wanted_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    above_ptr,
    held_ptr,
    keys_ptr,
    lane_stride,
    column_stride,
    width,
    count,
    chunks,
    span,
):
    """`above` int64 [R, spans, 4]: tokens and mass above top-k's bracket, mass above top-p's, and what min-p leaves of
    that. `keys` int64 [R, 2, HELD], in whatever order: nothing depends on it."""
    row, first = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * span
    if tl.load(wanted_ptr + row) >= 0:
        lane, state = row // width, state_ptr + row * FIELDS
        low, high = tl.load(state + K), tl.load(state + K + 1)
        p_low, p_high = tl.load(state + P), tl.load(state + P + 1)
        best, steep = tl.load(state + BEST), tl.load(state + STEEP)
        holds_k = (tl.load(top_k_ptr + lane) > 0) & (tl.load(state + K + 2) - tl.load(state + K + 3) <= HELD)
        holds_p = (tl.load(top_p_ptr + lane) < 1) & (tl.load(state + P + 2) - tl.load(state + P + 3) <= HELD)
        least = tl.full((), 0.0, tl.float32)
        if min_p_ptr is not None:
            least = tl.load(min_p_ptr + lane)
        row_ptr = logits_at(logits_ptr, lane_stride, column_stride, row, width)
        tokens = tl.zeros((LANES,), tl.int32)
        kept = tl.zeros((LANES,), tl.int64)
        p_above, p_kept = kept, kept
        for chunk in range(first, tl.minimum(first + span, chunks)):
            if logit_of(tl.load(best_ptr + row * chunks + chunk)) >= tl.minimum(low, p_low):
                token = tokens_of(chunk)
                logit = load_chunk(row_ptr, token, chunk, count)
                weight = weight_of(logit, best, steep)
                mass = mass_of(weight)
                tokens += tl.sum((logit >= high).to(tl.int32), 0)
                kept += tl.sum(tl.where(logit >= high, mass, 0), 0)
                mass = tl.where(logit >= p_high, mass, 0)
                p_above += tl.sum(mass, 0)
                p_kept += tl.sum(tl.where(weight >= least, mass, 0), 0)
                if holds_k:
                    _hold(logit, token, low, high, held_ptr + row * 2, keys_ptr + row * 2 * HELD)
                if holds_p:
                    _hold(logit, token, p_low, p_high, held_ptr + row * 2 + 1, keys_ptr + (row * 2 + 1) * HELD)
        at = above_ptr + (row * tl.num_programs(0) + tl.program_id(0)) * 4
        tl.store(at, tl.sum(tokens, 0).to(tl.int64))
        tl.store(at + 1, tl.sum(kept, 0))
        tl.store(at + 2, tl.sum(p_above, 0))
        tl.store(at + 3, tl.sum(p_kept, 0))


@triton.jit
def _load_keys(row_ptr, keys_ptr, held, start, low, high, count, TILE: tl.constexpr):
    """Keys of the bracket, from those held apart or, where `held` is more than that, from the row."""
    spot = start + tl.arange(0, TILE)
    nothing = -9223372036854775808
    if held <= HELD:
        key = tl.load(keys_ptr + spot, mask=spot < held, other=nothing)
    else:
        logit = tl.load(row_ptr + spot, mask=spot < count, other=float("-inf"))
        key = tl.where(_held(logit, low, high) & (spot < count), packed_key(logit, spot.to(tl.int64)), nothing)
    return key


@triton.jit
def _last_key(
    row_ptr,
    keys_ptr,
    held,
    low,
    high,
    best,
    steep,
    above,
    target,
    count,
    BY_MASS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The largest key down to which there are `target` tokens or that mass, `above` of it above the bracket; the least
    of the bracket, if there is less."""
    first, end = first_key(low), first_key(high)
    if above >= target:
        first = end
    step = tl.arange(0, 4).to(tl.int64) + 1
    size = tl.where(held <= HELD, held, count)
    while first + 1 < end:
        quarter = tl.maximum((end >> 2) - (first >> 2), 1)  # their difference may not fit
        tried = first + quarter * step
        found = tl.zeros((4,), tl.int64) + above
        for start in range(0, size, TILE):
            key = _load_keys(row_ptr, keys_ptr, held, start, low, high, count, TILE)
            worth = tl.full((TILE,), 1, tl.int64)
            if BY_MASS:
                worth = mass_of(weight_of(logit_of(key), best, steep))
            found += tl.sum(tl.where(key[None, :] >= tried[:, None], worth[None, :], 0), 1)
        enough = found >= target
        first = tl.max(tl.where(enough, tried, first), 0)
        end = tl.min(tl.where(enough, end, tried), 0)
    return first


@triton.jit
def _mass_from(row_ptr, keys_ptr, held, low, high, best, steep, cut, least, count, TILE: tl.constexpr):
    """Mass of the bracket's tokens from `cut` up whose weight is at least `least`."""
    total = tl.zeros((TILE,), tl.int64)
    for start in range(0, tl.where(held <= HELD, held, count), TILE):
        key = _load_keys(row_ptr, keys_ptr, held, start, low, high, count, TILE)
        weight = weight_of(logit_of(key), best, steep)
        total += tl.where((key >= cut) & (weight >= least), mass_of(weight), 0)
    return tl.sum(total, 0)


@triton.jit
def close_kernel(
    logits_ptr,
    state_ptr,
    wanted_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    above_ptr,
    keys_ptr,
    cut_ptr,
    total_ptr,
    lane_stride,
    column_stride,
    width,
    count,
    spans,
    SPANS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(wanted_ptr + row) >= 0:
        lane, state = row // width, state_ptr + row * FIELDS
        best, steep = tl.load(state + BEST), tl.load(state + STEEP)
        low, high = tl.load(state + K), tl.load(state + K + 1)
        held = (tl.load(state + K + 2) - tl.load(state + K + 3)).to(tl.int32)
        row_ptr = logits_at(logits_ptr, lane_stride, column_stride, row, width)
        k_keys, p_keys = keys_ptr + row * 2 * HELD, keys_ptr + (row * 2 + 1) * HELD
        spot = tl.arange(0, SPANS)
        parts = above_ptr + (row * spans + spot) * 4
        tokens = tl.sum(tl.load(parts, mask=spot < spans, other=0), 0)
        kept = tl.sum(tl.load(parts + 1, mask=spot < spans, other=0), 0)
        p_above = tl.sum(tl.load(parts + 2, mask=spot < spans, other=0), 0)
        total = tl.sum(tl.load(parts + 3, mask=spot < spans, other=0), 0)
        k, top_p = tl.load(top_k_ptr + lane), tl.load(top_p_ptr + lane)
        least = tl.full((), 0.0, tl.float32)
        if min_p_ptr is not None:
            least = tl.load(min_p_ptr + lane)
        cut = tl.full((), -9223372036854775808, tl.int64)
        if k > 0:
            cut = _last_key(row_ptr, k_keys, held, low, high, best, steep, tokens, k, count, False, TILE)
            kept += _mass_from(row_ptr, k_keys, held, low, high, best, steep, cut, 0.0, count, TILE)
        if top_p < 1:
            reach = tl.maximum((top_p.to(tl.float64) * kept.to(tl.float64)).to(tl.int64), 1)
            low, high = tl.load(state + P), tl.load(state + P + 1)
            held = (tl.load(state + P + 2) - tl.load(state + P + 3)).to(tl.int32)
            last = _last_key(row_ptr, p_keys, held, low, high, best, steep, p_above, reach, count, True, TILE)
            cut = tl.maximum(last, cut)
            total += _mass_from(row_ptr, p_keys, held, low, high, best, steep, cut, least, count, TILE)
        elif k > 0:
            total += _mass_from(row_ptr, k_keys, held, low, high, best, steep, cut, least, count, TILE)
        tl.store(cut_ptr + row, cut)
        tl.store(total_ptr + row, total.to(tl.float32) * (1 / MASS_UNITS))
