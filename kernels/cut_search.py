"""The brackets of `kernels/cuts.py`: what a row surely keeps, and what it surely does not."""

# Triton declares neither its launch options nor what constexpr parameters take.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from kernels.logit_rows import LANES, load_chunk, logit_of, logits_at, tokens_of
from kernels.ordering import packed_key
from kernels.sampling import steepness_of

TRIES = tl.constexpr(8)
HELD = tl.constexpr(1024)
"""Keys of a bracket that are held apart; where there are more, the row is looked through again."""
TRUST = tl.constexpr(4e-6)
"""FP32 sums of a row are right to 2e-6: 32 additions from a weight to its sum, and weights counted in whole units."""
DEEPEST, DEEPEST_MASS = tl.constexpr(130.0), tl.constexpr(44.0)
"""Powers of two below the best token where no weight and no mass is left, with room for rounding."""

# What `Search.state` holds of a row, FP32.
FIELDS = tl.constexpr(12)
BEST, STEEP = tl.constexpr(0), tl.constexpr(1)
K, P = tl.constexpr(2), tl.constexpr(6)  # of each search: low, high, and the tokens down to them
LOW_MASS, HIGH_MASS = tl.constexpr(10), tl.constexpr(11)  # down to the brackets of top-k


@triton.jit
def best_kernel(logits_ptr, best_ptr, extent_ptr, lane_stride, column_stride, width, count):
    row, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    if row % width <= tl.load(extent_ptr + row // width):
        token = tokens_of(chunk)
        logit = load_chunk(logits_at(logits_ptr, lane_stride, column_stride, row, width), token, chunk, count)
        key = packed_key(logit, token)
        tl.store(best_ptr + row * tl.num_programs(0) + chunk, tl.max(tl.max(key, 0), 0))


@triton.jit
def _spread(low, high, tries, of):
    """Tries 1 .. `of` between two logits, evenly."""
    return low + (high - low) * ((tries + 1).to(tl.float32) / (of + 1).to(tl.float32))


@triton.jit
def _reached(keys, k, chunks):
    """A logit that at least k tokens reach, where there are as many chunks: the k-th of their best, `keys` [CHUNKS].
    -inf for k = 0 or more than there are chunks."""
    ordinal = (keys >> 32) + 2147483648
    kth = tl.full((), 0, tl.int64)
    for bit in range(32):
        tried = kth | (tl.full((), 2147483648, tl.int64) >> bit)
        kth = tl.where(tl.sum((ordinal >= tried).to(tl.int32), 0) >= k, tried, kth)
    return tl.where((k > 0) & (k <= chunks), logit_of((kth - 2147483648) << 32), float("-inf"))


@triton.jit
def open_kernel(
    best_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    extent_ptr,
    state_ptr,
    tries_ptr,
    wanted_ptr,
    held_ptr,
    width,
    chunks,
    CHUNKS: tl.constexpr,
):
    """`wanted` int32 [R]: the number of logits to be tried, -1 for a row without a search of any kind."""
    row = tl.program_id(0).to(tl.int64)
    lane = row // width
    temperature = tl.load(temperature_ptr + lane)
    tl.store(wanted_ptr + row, -1)
    if (row % width <= tl.load(extent_ptr + lane)) & (temperature > 0):
        spot = tl.arange(0, CHUNKS)
        keys = tl.load(best_ptr + row * chunks + spot, mask=spot < chunks, other=-9223372036854775808)
        best, steep = logit_of(tl.max(keys, 0)), steepness_of(temperature)
        by_count, by_mass = tl.load(top_k_ptr + lane) > 0, tl.load(top_p_ptr + lane) < 1
        everything = float("-inf")
        reached = _reached(keys, tl.load(top_k_ptr + lane), chunks)
        floor_k = tl.maximum(best - DEEPEST / steep, reached)
        floor_p = tl.maximum(best - DEEPEST_MASS / steep, reached)
        tries = tl.arange(0, TRIES)
        of_k = tl.where(by_count, tl.where(by_mass, TRIES // 2, TRIES), 0)
        of_p = tl.where(by_mass, TRIES - of_k, 0)
        # denser near the best token, as tokens are rarer there; the last of each kind is its floor
        down_k = (tries + 1).to(tl.float32) / tl.maximum(of_k, 1).to(tl.float32)
        down_p = (tries - of_k + 1).to(tl.float32) / tl.maximum(of_p, 1).to(tl.float32)
        tried = tl.where(
            tries < of_k,
            floor_k + (best - floor_k) * (1 - down_k * down_k),
            floor_p + (best - floor_p) * (1 - down_p * down_p),
        )
        tl.store(tries_ptr + row * TRIES + tries, tried)
        at = state_ptr + row * FIELDS
        tl.store(at + BEST, best)
        tl.store(at + STEEP, steep)
        unknown = float("inf")
        tl.store(at + K, tl.where(by_count, floor_k, everything))
        tl.store(at + K + 1, tl.where(by_count, unknown, everything))
        tl.store(at + K + 2, tl.where(by_count, unknown, 0.0))
        tl.store(at + K + 3, 0.0)
        tl.store(at + P, tl.where(by_mass, floor_p, everything))
        tl.store(at + P + 1, tl.where(by_mass, unknown, everything))
        tl.store(at + P + 2, tl.where(by_mass, unknown, 0.0))
        tl.store(at + P + 3, 0.0)
        tl.store(at + LOW_MASS, unknown)
        tl.store(at + HIGH_MASS, 0.0)
        tl.store(held_ptr + row * 2, 0)
        tl.store(held_ptr + row * 2 + 1, 0)
        tl.store(wanted_ptr + row, of_k + of_p)


@triton.jit(do_not_specialize=["chunks", "span"])
def measure_kernel(
    logits_ptr,
    best_ptr,
    state_ptr,
    tries_ptr,
    wanted_ptr,
    tokens_ptr,
    masses_ptr,
    lane_stride,
    column_stride,
    width,
    count,
    chunks,
    span,
):
    """`tokens`, `masses` FP32 [R, spans, TRIES]: each span's share down to each try."""
    row, first = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * span
    if tl.load(wanted_ptr + row) > 0:
        tries = tl.load(tries_ptr + row * TRIES + tl.arange(0, TRIES))
        lowest = tl.min(tries, 0)
        best, steep = tl.load(state_ptr + row * FIELDS + BEST), tl.load(state_ptr + row * FIELDS + STEEP)
        row_ptr = logits_at(logits_ptr, lane_stride, column_stride, row, width)
        tokens, masses = (), ()
        for _ in tl.static_range(TRIES):
            tokens += (tl.zeros((LANES,), tl.float32),)
            masses += (tl.zeros((LANES,), tl.float32),)
        for chunk in range(first, tl.minimum(first + span, chunks)):
            if logit_of(tl.load(best_ptr + row * chunks + chunk)) >= lowest:
                logit = load_chunk(row_ptr, tokens_of(chunk), chunk, count)
                weight = tl.exp2((logit - best) * steep)
                more_tokens, more_masses = (), ()
                for index in tl.static_range(TRIES):
                    above = logit >= tl.load(tries_ptr + row * TRIES + index)
                    more_tokens += (tokens[index] + tl.sum(tl.where(above, 1.0, 0.0), 0),)
                    more_masses += (masses[index] + tl.sum(tl.where(above, weight, 0.0), 0),)
                tokens, masses = more_tokens, more_masses
        at = (row * tl.num_programs(0) + tl.program_id(0)) * TRIES
        for index in tl.static_range(TRIES):
            tl.store(tokens_ptr + at + index, tl.sum(tokens[index], 0))
            tl.store(masses_ptr + at + index, tl.sum(masses[index], 0))


@triton.jit
def narrow_kernel(
    state_ptr,
    tries_ptr,
    wanted_ptr,
    tokens_ptr,
    masses_ptr,
    top_k_ptr,
    top_p_ptr,
    width,
    spans,
    SPANS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(wanted_ptr + row) > 0:
        at, tries = state_ptr + row * FIELDS, tl.arange(0, TRIES)
        tried = tl.load(tries_ptr + row * TRIES + tries)
        spot = tl.arange(0, SPANS)[:, None]
        parts = (row * spans + spot) * TRIES + tries[None, :]
        tokens = tl.sum(tl.load(tokens_ptr + parts, mask=spot < spans, other=0.0), 0)
        masses = tl.sum(tl.load(masses_ptr + parts, mask=spot < spans, other=0.0), 0)
        nothing, everything = float("inf"), float("-inf")
        k, top_p = tl.load(top_k_ptr + row // width), tl.load(top_p_ptr + row // width)
        by_count, by_mass = k > 0, top_p < 1

        low, high = tl.load(at + K), tl.load(at + K + 1)
        low_tokens, high_tokens = tl.load(at + K + 2), tl.load(at + K + 3)
        low_mass, high_mass = tl.load(at + LOW_MASS), tl.load(at + HIGH_MASS)
        if by_count:
            enough = (tokens >= k.to(tl.float32)) | (tried <= low)  # nothing below the floor has a weight
            few = tokens <= k.to(tl.float32)
            low = tl.maximum(low, tl.max(tl.where(enough, tried, everything), 0))
            low_tokens = tl.minimum(low_tokens, tl.min(tl.where(enough, tokens, nothing), 0))
            low_mass = tl.minimum(low_mass, tl.min(tl.where(enough, masses, nothing), 0))
            high = tl.maximum(tl.minimum(high, tl.min(tl.where(few, tried, nothing), 0)), low)
            high_tokens = tl.minimum(tl.maximum(high_tokens, tl.max(tl.where(few, tokens, 0.0), 0)), low_tokens)
            high_mass = tl.minimum(tl.maximum(high_mass, tl.max(tl.where(few, masses, 0.0), 0)), low_mass)
        elif high_mass == 0:
            low_mass = tl.max(masses, 0)  # the first tries go down to where no mass is left
            high_mass = low_mass

        p_low, p_high, p_low_tokens, p_high_tokens = low, high, low_tokens, high_tokens
        if by_mass:
            p_low, p_high = tl.load(at + P), tl.load(at + P + 1)
            p_low_tokens, p_high_tokens = tl.load(at + P + 2), tl.load(at + P + 3)
            enough = (masses * (1 - TRUST) >= top_p * low_mass * (1 + TRUST)) | (tried <= p_low)
            few = masses * (1 + TRUST) < top_p * high_mass * (1 - TRUST)
            p_low = tl.maximum(p_low, tl.max(tl.where(enough, tried, everything), 0))
            p_low_tokens = tl.minimum(p_low_tokens, tl.min(tl.where(enough, tokens, nothing), 0))
            if low > p_low:  # top-p keeps no more than top-k
                p_low, p_low_tokens = low, low_tokens
            p_high = tl.maximum(tl.minimum(p_high, tl.min(tl.where(few, tried, nothing), 0)), p_low)
            p_high_tokens = tl.minimum(tl.maximum(p_high_tokens, tl.max(tl.where(few, tokens, 0.0), 0)), p_low_tokens)

        tl.store(at + K, low)
        tl.store(at + K + 1, high)
        tl.store(at + K + 2, low_tokens)
        tl.store(at + K + 3, high_tokens)
        tl.store(at + P, p_low)
        tl.store(at + P + 1, p_high)
        tl.store(at + P + 2, p_low_tokens)
        tl.store(at + P + 3, p_high_tokens)
        tl.store(at + LOW_MASS, low_mass)
        tl.store(at + HIGH_MASS, high_mass)

        best = tl.load(at + BEST)
        wide_k = by_count & (low_tokens - high_tokens > HELD)
        wide_p = by_mass & (p_low_tokens - p_high_tokens > HELD)
        of_k = tl.where(wide_k, tl.where(wide_p, TRIES // 2, TRIES), 0)
        of_p = tl.where(wide_p, TRIES - of_k, 0)
        tl.store(
            tries_ptr + row * TRIES + tries,
            tl.where(
                tries < of_k,
                _spread(low, tl.minimum(high, best), tries, of_k),
                _spread(p_low, tl.minimum(p_high, best), tries - of_k, of_p),
            ),
        )
        tl.store(wanted_ptr + row, of_k + of_p)
