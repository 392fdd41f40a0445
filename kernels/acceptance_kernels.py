"""The verdicts of `kernels/acceptance.py` on a card, from the cuts of `kernels/cuts.py`: nothing is asked by the host.

    decide    what each column needs: nothing, its best token, or a race; a retained q's drafts are judged here, so that
              of such a lane one column races
    race      the first arrival of each span of a row's chunks that have a kept token     reads those chunks
    verdict   winners against drafts, and what is licensed

p is never stored: it is weight / Z down to the cut. q is not either: a token's q is the sum over the candidates that
are that token. Residuals race with p's own scale, which decides nothing but the last bits of a time.
"""

# Triton declares neither its launch options nor what constexpr parameters take.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.cut_search import BEST, FIELDS, STEEP
from kernels.cuts import RowControls, find_cuts
from kernels.launch_checks import require, require_contiguous
from kernels.logit_rows import CHUNK, load_whole, logits_at, span_of
from kernels.ordering import id_of, packed_key
from kernels.randomness import ACCEPT, CORRECTION, TARGET, noise_of, uniform_at, words_at
from kernels.sampling import weight_of

_ACCEPT, _TARGET, _CORRECTION = tl.constexpr(ACCEPT), tl.constexpr(TARGET), tl.constexpr(CORRECTION)
_NOTHING, _ARGMAX = tl.constexpr(-1), tl.constexpr(-2)
"""What a column may need besides a race of the purpose `_TARGET` or `_CORRECTION`."""
_NOBODY = tl.constexpr(0x7FFFFFFF00000000)
"""After every arrival."""
_TOKENS = tl.constexpr(CHUNK)
PART = 64
"""Blocks of four tokens that a program races at a time."""


@triton.jit
def _probability(logit, token, best, steep, cut, total, least):
    """p of tokens, FP32; `least` is min-p."""
    weight = weight_of(logit, best, steep)
    kept = (packed_key(logit, token) >= cut) & (weight >= least)
    return tl.where(kept, tl.div_rn(weight, total), 0.0)


@triton.jit
def _decide(
    logits_ptr,
    state_ptr,
    cut_ptr,
    total_ptr,
    temperature_ptr,
    min_p_ptr,
    reproducible_ptr,
    seeds_ptr,
    sub_ptr,
    positions_ptr,
    extent_ptr,
    drafts_ptr,
    candidates_ptr,
    law_ptr,
    need_ptr,
    lane_stride,
    column_stride,
    drafts_stride,
    width,
    CANDIDATES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """`need` int32 [B, W]. Without candidates every q is one-hot."""
    lane = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    row = lane * width + column
    extent = tl.load(extent_ptr + lane)
    exists = column < width
    need = tl.where(column <= extent, _TARGET, _NOTHING)
    if tl.load(temperature_ptr + lane) <= 0:
        need = tl.where(column <= extent, _ARGMAX, _NOTHING)
    else:
        retained = CANDIDATES > 0
        if reproducible_ptr is not None:
            retained = retained & (tl.load(reproducible_ptr + lane) == 0)
        if retained:
            checked = column < extent
            draft = tl.load(drafts_ptr + lane * drafts_stride + column, mask=checked, other=0)
            at = logits_ptr + lane * lane_stride + column.to(tl.int64) * column_stride
            least = tl.full((), 0.0, tl.float32)
            if min_p_ptr is not None:
                least = tl.load(min_p_ptr + lane)
            p = _probability(
                tl.load(at + draft, mask=checked, other=0.0),
                draft,
                tl.load(state_ptr + row * FIELDS + BEST, mask=checked, other=0.0),
                tl.load(state_ptr + row * FIELDS + STEEP, mask=checked, other=1.0),
                tl.load(cut_ptr + row, mask=checked, other=0),
                tl.load(total_ptr + row, mask=checked, other=1.0),
                least,
            )
            q = tl.zeros((WIDTH,), tl.float32)
            first = (lane * drafts_stride + column) * CANDIDATES
            for rank in tl.static_range(0, CANDIDATES):
                candidate = tl.load(candidates_ptr + first + rank, mask=checked, other=-1)
                share = tl.load(law_ptr + first + rank, mask=checked, other=0.0)
                q += tl.where(candidate == draft, share, 0.0)
            key = tl.zeros((WIDTH,), tl.int64)
            position = tl.load(positions_ptr + row, mask=exists, other=0)
            u = uniform_at(key + tl.load(seeds_ptr + lane), position, _ACCEPT, key + tl.load(sub_ptr + lane))
            stands = checked & (u * q < p)
            accepted = tl.min(tl.where(stands, WIDTH, column), 0)
            drawn = tl.where(accepted < extent, _CORRECTION, _TARGET)
            need = tl.where(column == accepted, drawn, _NOTHING)
    tl.store(need_ptr + row, need, mask=exists)


@triton.jit
def _arrivals(weight, scale, noise, token):
    """(Bits of its time, token id) of tokens with a positive weight, int64."""
    runs = weight > 0
    scaled = tl.div_rn(tl.where(runs, weight, 1.0), scale)
    time = tl.minimum(tl.div_rn(noise, scaled), 3.4028234663852886e38)
    arrival = (time.to(tl.int32, bitcast=True).to(tl.int64) << 32) | token
    return tl.where(runs, arrival, _NOBODY)


@triton.jit(do_not_specialize=["chunks", "span"])
def _race(
    logits_ptr,
    best_ptr,
    state_ptr,
    cut_ptr,
    total_ptr,
    min_p_ptr,
    seeds_ptr,
    sub_ptr,
    positions_ptr,
    need_ptr,
    candidates_ptr,
    law_ptr,
    arrivals_ptr,
    lane_stride,
    column_stride,
    drafts_stride,
    width,
    count,
    chunks,
    span,
    CANDIDATES: tl.constexpr,
    PART: tl.constexpr,
):
    """`arrivals` int64 [R, 2, spans]: of the race, and of the one over p for a correction that has no residual."""
    row, begin, spans = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * span, tl.num_programs(0)
    need = tl.load(need_ptr + row)
    if need >= 0:
        cut, lane, state = tl.load(cut_ptr + row), row // width, state_ptr + row * FIELDS
        row_ptr = logits_at(logits_ptr, lane_stride, column_stride, row, width)
        best, steep, total = tl.load(state + BEST), tl.load(state + STEEP), tl.load(total_ptr + row)
        scale = tl.div_rn(1.0, total)
        least = tl.full((), 0.0, tl.float32)
        if min_p_ptr is not None:
            least = tl.load(min_p_ptr + lane)
        seed, sub, position = tl.load(seeds_ptr + lane), tl.load(sub_ptr + lane), tl.load(positions_ptr + row)
        proposed = (lane * drafts_stride + row % width) * CANDIDATES
        word = tl.arange(0, 4)[None, :]
        first = tl.full((PART,), _NOBODY, tl.int64)
        over_p = first
        for chunk in range(begin, tl.minimum(begin + span, chunks)):
            if tl.load(best_ptr + row * chunks + chunk) >= cut:
                for part in range(0, _TOKENS // 4, PART):
                    block = chunk * (_TOKENS // 4) + part + tl.arange(0, PART).to(tl.int64)
                    token = block[:, None] * 4 + word
                    logit = load_whole(row_ptr, token, (chunk + 1) * _TOKENS <= count, count)
                    p = _probability(logit, token, best, steep, cut, total, least)
                    key = block * 0  # the generator takes tensors of one shape
                    word0, word1, word2, word3 = words_at(key + seed, block, key + position, need, key + sub)
                    low = tl.where(word == 0, word0[:, None], word1[:, None])
                    high = tl.where(word == 2, word2[:, None], word3[:, None])
                    noise = noise_of(tl.where(word < 2, low, high))
                    arrival = tl.min(_arrivals(p, scale, noise, token), 1)
                    over_p = tl.minimum(over_p, arrival)
                    if CANDIDATES > 0:  # noqa: SIM102
                        if need == _CORRECTION:
                            q = tl.zeros((PART, 4), tl.float32)
                            for rank in tl.static_range(0, CANDIDATES):
                                share = tl.load(law_ptr + proposed + rank)
                                q += tl.where(token == tl.load(candidates_ptr + proposed + rank), share, 0.0)
                            arrival = tl.min(_arrivals(tl.maximum(p - q, 0.0), scale, noise, token), 1)
                    first = tl.minimum(first, arrival)
        at = arrivals_ptr + row * 2 * spans + tl.program_id(0)
        tl.store(at, tl.min(first, 0))
        tl.store(at + spans, tl.min(over_p, 0))


@triton.jit
def _verdict(
    best_ptr,
    need_ptr,
    arrivals_ptr,
    extent_ptr,
    drafts_ptr,
    licensed_ptr,
    accepted_ptr,
    drafts_stride,
    width,
    chunks,
    spans,
    CHUNKS: tl.constexpr,
    SPANS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    lane = tl.program_id(0).to(tl.int64)
    column, spot = tl.arange(0, WIDTH), tl.arange(0, CHUNKS)[None, :]
    exists, extent = column < width, tl.load(extent_ptr + lane)
    row = lane * width + column
    need = tl.load(need_ptr + row, mask=exists, other=_NOTHING)
    best = tl.load(
        best_ptr + row[:, None] * chunks + spot,
        mask=(need != _NOTHING)[:, None] & (spot < chunks),
        other=-9223372036854775808,
    )
    token = id_of(tl.max(best, 1))
    spot = tl.arange(0, SPANS)[None, :]
    races = (need >= 0)[:, None] & (spot < spans)
    at = arrivals_ptr + row[:, None] * 2 * spans + spot
    winner = tl.min(tl.load(at, mask=races, other=_NOBODY), 1)
    over_p = tl.min(tl.load(at + spans, mask=races, other=_NOBODY), 1)
    winner = tl.where(winner == _NOBODY, over_p, winner)
    token = tl.where(winner == _NOBODY, token, winner & 0xFFFFFFFF)
    draft = column.to(tl.int64) * 0 - 1
    if drafts_ptr is not None:
        draft = tl.load(drafts_ptr + lane * drafts_stride + column, mask=column < extent, other=-1)
    # a column without need stands: a retained q's draft was judged before
    stands = (column < extent) & ((need == _NOTHING) | ((need != _CORRECTION) & (token == draft)))
    accepted = tl.min(tl.where(stands, WIDTH, column), 0)
    tl.store(accepted_ptr + lane, accepted.to(tl.int64))
    token = tl.where(need == _NOTHING, draft, token)
    tl.store(licensed_ptr + row, tl.where(column <= accepted, token, 0), mask=exists)


def verdicts(
    logits: torch.Tensor,
    controls: RowControls,
    reproducible: torch.Tensor | None,
    seeds: torch.Tensor,
    sub: torch.Tensor,
    positions: torch.Tensor,
    drafts: torch.Tensor | None,
    candidates: torch.Tensor | None,
    law: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`logits` FP32 [B, W, V], `positions` int64 [B, W], `drafts` int64 [B, >= W - 1], the rest as in
    `kernels/acceptance.py` -> (licensed int64 [B, W], accepted int64 [B])."""
    batch, width, count = logits.shape
    cuts = find_cuts(logits, controls)
    require_contiguous("positions", positions, (batch, width), torch.int64)
    for name, words in (("seeds", seeds), ("sub", sub)):
        require_contiguous(name, words, (batch,), torch.int64)
    columns, choices = 0, 0
    if drafts is not None:
        drafts, columns = drafts.contiguous(), drafts.shape[1]
        require("drafts", drafts, (batch, max(columns, width - 1)), torch.int64)
    if candidates is not None and law is not None:
        candidates, law, choices = candidates.contiguous(), law.contiguous(), candidates.shape[2]
        require("candidates", candidates, (batch, columns, choices), torch.int64)
        require("law", law, (batch, columns, choices), torch.float32)
    chunks = cuts.best.shape[1]
    span = span_of(batch * width, chunks)
    spans = triton.cdiv(chunks, span)
    need = torch.empty(batch, width, dtype=torch.int32, device=logits.device)
    arrivals = torch.empty(batch * width, 2, spans, dtype=torch.int64, device=logits.device)
    licensed, accepted = torch.empty_like(positions), torch.empty_like(seeds)
    if batch == 0:
        return licensed, accepted
    strides = logits.stride(0), logits.stride(1), columns, width
    padded = triton.next_power_of_2(width)
    judged = seeds if drafts is None else drafts  # without drafts nobody follows the pointer, but it must have a type
    _decide[(batch,)](
        *(logits, cuts.state, cuts.cut, cuts.total, controls.temperature, controls.min_p, reproducible),
        *(seeds, sub, positions, controls.extent, judged, candidates, law, need),
        *strides,
        CANDIDATES=choices,
        WIDTH=padded,
        num_warps=1,
        enable_fp_fusion=False,
    )
    _race[(spans, batch * width)](
        *(logits, cuts.best, cuts.state, cuts.cut, cuts.total, controls.min_p, seeds, sub, positions, need),
        *(candidates, law, arrivals),
        *strides,
        count,
        chunks,
        span,
        CANDIDATES=choices,
        PART=PART,
        num_warps=1,
        enable_fp_fusion=False,
    )
    _verdict[(batch,)](
        *(cuts.best, need, arrivals, controls.extent, drafts, licensed, accepted, columns, width, chunks, spans),
        CHUNKS=triton.next_power_of_2(chunks),
        SPANS=triton.next_power_of_2(spans),
        WIDTH=padded,
        num_warps=4,
    )
    return licensed, accepted
