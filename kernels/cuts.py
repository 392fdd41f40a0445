"""Where does each row's processed distribution end? Top-k, top-p and min-p without a sort (`kernels/sampling.py`).

What a row keeps are its first tokens in the one order of `kernels/ordering.py`, so that its last one's key, the *cut*,
says it all. Both top-k and top-p ask for the largest key whose tokens down to it reach a target: k tokens, or top_p of
the mass that top-k kept. The search keeps a bracket [low, high) of logits for each of the two:

    best      the best key of each chunk of a row                                      reads the row
    open      the first brackets, and 16 logits to try in them
    measure   tokens and mass down to each of them, mass in FP32                       reads the row, up to ROUNDS times
    narrow    the brackets that follow; FP32 sums are not believed within TRUST, so a bracket never loses its end
    gather    exact tokens and masses above the brackets, and the keys within          reads the row
    close     the cut among those keys, 16 tries at a time; what is left is the mass Z

Later rounds skip chunks whose best token is below all that is tried, and rows whose brackets hold few enough keys.
Where a bracket stays wider than that after all rounds (thousands of equal logits, or a top-p next to 1), `close` looks
through the row itself, exact as ever and slower. All of this is data of the device: nothing is asked by the host, and
a row does not depend on its neighbours.

Source: decision 12; `kernels/sampling.py` is the rule.
"""

# Triton declares neither its launch options nor what constexpr parameters take.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.launch_checks import require
from kernels.ordering import packed_key
from kernels.sampling import MASS_UNITS, MAX_TOKENS, mass_of, steepness_of, weight_of

LANES, DEPTH = tl.constexpr(256), tl.constexpr(16)
CHUNK = LANES.value * DEPTH.value
TRIES = tl.constexpr(16)
ROUNDS = 3
HELD = tl.constexpr(4096)
"""Keys of a bracket that are held apart; where there are more, the row is looked through again."""
TRUST = tl.constexpr(4e-6)
"""FP32 sums of a row are right to 2e-6: 30 additions from a weight to its sum, and weights counted in whole units."""
DEEPEST, DEEPEST_MASS = tl.constexpr(130.0), tl.constexpr(44.0)
"""Powers of two below the best token where no weight and no mass is left, with room for rounding."""

# What `Search.state` holds of a row, FP32.
FIELDS = tl.constexpr(12)
BEST, STEEP = tl.constexpr(0), tl.constexpr(1)
K, P = tl.constexpr(2), tl.constexpr(6)  # of each search: low, high, and the tokens down to them
LOW_MASS, HIGH_MASS = tl.constexpr(10), tl.constexpr(11)  # down to the brackets of top-k


@dataclass(frozen=True)
class RowControls:
    """`temperature`, `top_p` FP32 [B], `top_k` int64 [B], `min_p` FP32 [B] or None, of lanes with W columns each, of
    which the first `extent[b]` + 1 are looked at."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor | None
    extent: torch.Tensor


@dataclass(frozen=True)
class Cuts:
    """Of each row b W + i: `best` int64 [R, chunks], the best keys; `state` FP32 [R, 12], of which BEST and STEEP
    give weights; `cut` int64 [R], the last kept key before min-p; `total` FP32 [R], Z. Rows that are greedy or beyond
    their lane's extent have only `best`."""

    best: torch.Tensor
    state: torch.Tensor
    cut: torch.Tensor
    total: torch.Tensor


@triton.jit
def logits_at(logits_ptr, lane_stride, column_stride, row, width):
    return logits_ptr + (row // width) * lane_stride + (row % width) * column_stride


@triton.jit
def tokens_of(chunk):
    return chunk * (LANES * DEPTH) + tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]


@triton.jit
def load_whole(row_ptr, token, whole, count):
    """Logits of `token`s; where they are not a `whole` chunk, -inf from `count` on. Without a mask words are wide."""
    if whole:
        logit = tl.load(row_ptr + token)
    else:
        logit = tl.load(row_ptr + token, mask=token < count, other=float("-inf"))
    return logit


@triton.jit
def load_chunk(row_ptr, token, chunk, count):
    return load_whole(row_ptr, token, (chunk + 1) * (LANES * DEPTH) <= count, count)


@triton.jit
def logit_of(key):
    """The logit in a key."""
    ordinal = (key >> 32).to(tl.int32)
    return tl.where(ordinal < 0, ordinal ^ 0x7FFFFFFF, ordinal).to(tl.float32, bitcast=True)


@triton.jit
def first_key(logit):
    """The least key of all tokens with this logit."""
    return packed_key(logit, tl.full((), 0xFFFFFFFF, tl.int64))


@triton.jit
def _best(logits_ptr, best_ptr, extent_ptr, lane_stride, column_stride, width, count):
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
def _open(
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
        floor_k, floor_p = best - DEEPEST / steep, best - DEEPEST_MASS / steep
        tries = tl.arange(0, TRIES)
        of_k = tl.where(by_count, tl.where(by_mass, TRIES // 2, TRIES), 0)
        of_p = tl.where(by_mass, TRIES - of_k, 0)
        # denser near the best token, as tokens are rarer there; the last of each kind is its floor
        down_k = (tries + 1).to(tl.float32) / tl.maximum(of_k, 1).to(tl.float32)
        down_p = (tries - of_k + 1).to(tl.float32) / tl.maximum(of_p, 1).to(tl.float32)
        tried = tl.where(
            tries < of_k, best + (floor_k - best) * (down_k * down_k), best + (floor_p - best) * (down_p * down_p)
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


@triton.jit
def _measure(
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
):
    """`tokens`, `masses` FP32 [R, chunks, TRIES]: each chunk's share down to each try."""
    row, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    if tl.load(wanted_ptr + row) > 0:
        at = (row * tl.num_programs(0) + chunk) * TRIES
        lowest = tl.min(tl.load(tries_ptr + row * TRIES + tl.arange(0, TRIES)), 0)
        if logit_of(tl.load(best_ptr + row * tl.num_programs(0) + chunk)) < lowest:
            tl.store(tokens_ptr + at + tl.arange(0, TRIES), tl.zeros((TRIES,), tl.float32))
            tl.store(masses_ptr + at + tl.arange(0, TRIES), tl.zeros((TRIES,), tl.float32))
        else:
            best, steep = tl.load(state_ptr + row * FIELDS + BEST), tl.load(state_ptr + row * FIELDS + STEEP)
            row_ptr = logits_at(logits_ptr, lane_stride, column_stride, row, width)
            logit = load_chunk(row_ptr, tokens_of(chunk), chunk, count)
            weight = tl.exp2((logit - best) * steep)
            for index in tl.static_range(0, TRIES):
                above = logit >= tl.load(tries_ptr + row * TRIES + index)
                tl.store(tokens_ptr + at + index, tl.sum(tl.sum(above.to(tl.int32), 0), 0).to(tl.float32))
                tl.store(masses_ptr + at + index, tl.sum(tl.sum(tl.where(above, weight, 0.0), 0), 0))


@triton.jit
def _narrow(
    state_ptr,
    tries_ptr,
    wanted_ptr,
    tokens_ptr,
    masses_ptr,
    top_k_ptr,
    top_p_ptr,
    width,
    chunks,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(wanted_ptr + row) > 0:
        at, tries = state_ptr + row * FIELDS, tl.arange(0, TRIES)
        tried = tl.load(tries_ptr + row * TRIES + tries)
        spot = tl.arange(0, CHUNKS)[:, None]
        parts = (row * chunks + spot) * TRIES + tries[None, :]
        tokens = tl.sum(tl.load(tokens_ptr + parts, mask=spot < chunks, other=0.0), 0)
        masses = tl.sum(tl.load(masses_ptr + parts, mask=spot < chunks, other=0.0), 0)
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


@triton.jit
def _held(logit, low, high):
    return (logit >= low) & (logit < high)


@triton.jit
def _gather(
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
):
    """`above` int64 [R, chunks, 4]: tokens and mass above top-k's bracket, mass above top-p's, and what min-p leaves of
    that. `keys` int64 [R, 2, HELD], in whatever order: nothing depends on it."""
    row, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    if tl.load(wanted_ptr + row) >= 0:
        at, state = above_ptr + (row * tl.num_programs(0) + chunk) * 4, state_ptr + row * FIELDS
        low, high, p_low, p_high = (
            tl.load(state + K),
            tl.load(state + K + 1),
            tl.load(state + P),
            tl.load(state + P + 1),
        )
        if logit_of(tl.load(best_ptr + row * tl.num_programs(0) + chunk)) < tl.minimum(low, p_low):
            tl.store(at + tl.arange(0, 4), tl.zeros((4,), tl.int64))
        else:
            token = tokens_of(chunk)
            logit = load_chunk(logits_at(logits_ptr, lane_stride, column_stride, row, width), token, chunk, count)
            weight = weight_of(logit, tl.load(state + BEST), tl.load(state + STEEP))
            mass = mass_of(weight)
            kept = tl.where(logit >= p_high, mass, 0)
            tl.store(at, tl.sum(tl.sum((logit >= high).to(tl.int32), 0), 0).to(tl.int64))
            tl.store(at + 1, tl.sum(tl.sum(tl.where(logit >= high, mass, 0), 0), 0))
            tl.store(at + 2, tl.sum(tl.sum(kept, 0), 0))
            if min_p_ptr is not None:
                kept = tl.where(weight >= tl.load(min_p_ptr + row // width), kept, 0)
            tl.store(at + 3, tl.sum(tl.sum(kept, 0), 0))
            key = packed_key(logit, token)
            if (tl.load(top_k_ptr + row // width) > 0) & (tl.load(state + K + 2) - tl.load(state + K + 3) <= HELD):
                held = _held(logit, low, high)
                place = tl.atomic_add(held_ptr + row * 2 + tl.zeros_like(token), 1, mask=held, sem="relaxed")
                tl.store(keys_ptr + row * 2 * HELD + place, key, mask=held)
            if (tl.load(top_p_ptr + row // width) < 1) & (tl.load(state + P + 2) - tl.load(state + P + 3) <= HELD):
                held = _held(logit, p_low, p_high)
                place = tl.atomic_add(held_ptr + row * 2 + 1 + tl.zeros_like(token), 1, mask=held, sem="relaxed")
                tl.store(keys_ptr + (row * 2 + 1) * HELD + place, key, mask=held)


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
    step, sixteenth = tl.arange(0, 16).to(tl.int64) + 1, 0 * first
    size = tl.where(held <= HELD, held, count)
    while first + 1 < end:
        sixteenth = tl.maximum((end >> 4) - (first >> 4), 1)  # their difference may not fit
        tried = first + sixteenth * step
        found = tl.zeros((16,), tl.int64) + above
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
def _close(
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
    chunks,
    CHUNKS: tl.constexpr,
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
        spot = tl.arange(0, CHUNKS)
        parts = above_ptr + (row * chunks + spot) * 4
        tokens = tl.sum(tl.load(parts, mask=spot < chunks, other=0), 0)
        kept = tl.sum(tl.load(parts + 1, mask=spot < chunks, other=0), 0)
        p_above = tl.sum(tl.load(parts + 2, mask=spot < chunks, other=0), 0)
        total = tl.sum(tl.load(parts + 3, mask=spot < chunks, other=0), 0)
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


def find_cuts(logits: torch.Tensor, controls: RowControls) -> Cuts:
    """`logits` FP32 [B, W, V], V <= 2^22, on a card (or in Triton's interpreter)."""
    batch, width, count = logits.shape
    require("logits", logits, (batch, width, count), torch.float32)
    if not 0 < count <= MAX_TOKENS:
        raise ValueError(f"logits: {count} columns, must be 1 to {MAX_TOKENS}")
    rows, chunks = batch * width, triton.cdiv(count, CHUNK)
    padded = triton.next_power_of_2(chunks)

    def buffer(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(rows, *shape, dtype=dtype, device=logits.device)

    cuts = Cuts(
        buffer(chunks, dtype=torch.int64),
        buffer(FIELDS.value, dtype=torch.float32),
        buffer(dtype=torch.int64),
        buffer(dtype=torch.float32),
    )
    if rows == 0:
        return cuts
    tries, wanted = buffer(TRIES.value, dtype=torch.float32), buffer(dtype=torch.int32)
    tokens, masses = (buffer(chunks, TRIES.value, dtype=torch.float32) for _ in range(2))
    above, held = buffer(chunks, 4, dtype=torch.int64), buffer(2, dtype=torch.int32)
    keys = buffer(2, HELD.value, dtype=torch.int64)
    place = logits.stride(0), logits.stride(1), width, count
    k, p = controls.top_k, controls.top_p
    _best[(chunks, rows)](logits, cuts.best, controls.extent, *place, num_warps=4)
    _open[(rows,)](
        *(cuts.best, controls.temperature, k, p, controls.extent, cuts.state, tries, wanted, held, width, chunks),
        CHUNKS=padded,
        num_warps=1,
    )
    for _ in range(ROUNDS):
        _measure[(chunks, rows)](
            logits, cuts.best, cuts.state, tries, wanted, tokens, masses, *place, num_warps=4, enable_fp_fusion=False
        )
        _narrow[(rows,)](cuts.state, tries, wanted, tokens, masses, k, p, width, chunks, CHUNKS=padded, num_warps=4)
    _gather[(chunks, rows)](
        *(logits, cuts.best, cuts.state, wanted, k, p, controls.min_p, above, held, keys),
        *place,
        num_warps=4,
        enable_fp_fusion=False,
    )
    _close[(rows,)](
        *(logits, cuts.state, wanted, k, p, controls.min_p, above, keys, cuts.cut, cuts.total),
        *place,
        chunks,
        CHUNKS=padded,
        TILE=512,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return cuts
