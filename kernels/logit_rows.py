"""How kernels read rows of logits [B, W, V], whose rows may lie at any stride: a chunk of tokens at a time.

Keys are those of `kernels/ordering.py`.
"""

# Triton's `where` has no types of its own.
# pyright: reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from kernels.ordering import packed_key

LANES, DEPTH = tl.constexpr(128), tl.constexpr(8)
CHUNK = LANES.value * DEPTH.value
"""Tokens of a row that a program reads at a time: of one warp, in whose registers every sum but the last is made."""
LONGEST_SPAN = 8
_PROGRAMS = 2112
"""Warps that a card has at one time, 16 a multiprocessor."""


def span_of(rows: int, chunks: int) -> int:
    """Chunks of a row that one program takes, one after the other, where most may be skipped: few programs that find
    nothing to do cost little, and few rows still fill the card."""
    return max(1, min(LONGEST_SPAN, rows * chunks // _PROGRAMS))


@triton.jit
def logits_at(logits_ptr, lane_stride, column_stride, row, width):
    return logits_ptr + (row // width) * lane_stride + (row % width) * column_stride


@triton.jit
def tokens_of(chunk):
    inside = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    return chunk * (LANES * DEPTH) + inside.to(tl.int64)


@triton.jit
def load_whole(row_ptr, token, whole, count):
    """Logits of `token`s; where they are not a `whole` chunk, -inf from `count` on. Without a mask words are wide."""
    if whole:  # noqa: SIM108
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
