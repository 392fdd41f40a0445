"""The one order of scores that everything uses: descending score, exact ties to the lower id; +0 and -0 are equal.

Score and id are packed into one int64 key, larger for what comes first, so that no tie is left: the score's bits as an
ordinal above, the id reversed below.

On a card the best rows of a wide table are found through block maxima: one kernel reads the scores once and keeps the
best key of every block of 128 ids; the k best scores are in the k blocks whose maxima are best, and nowhere else.

Source: decision 9.
"""

# Triton declares neither its launch options nor what constexpr parameters take.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.launch_checks import require


def top_rows(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `k` of each row of `scores` FP32 [R, V], k <= V -> (scores FP32 [R, k], ids int64 [R, k])."""
    bits = (scores.float() + 0.0).view(torch.int32)
    ordinal = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    reversed_id = torch.arange(scores.shape[-1] - 1, -1, -1, device=scores.device)
    key = (ordinal << 32) | reversed_id
    ids = scores.shape[-1] - 1 - (key.topk(k, dim=-1).values & 0xFFFFFFFF)
    return scores.gather(-1, ids), ids


def keys_of(scores: torch.Tensor) -> torch.Tensor:
    """`packed_key` of every score of `scores` FP32 [R, V] and its column, int64 [R, V]."""
    bits = (scores + 0.0).view(torch.int32)
    ordinal = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    return (ordinal << 32) | (0xFFFFFFFF - torch.arange(scores.shape[-1], device=scores.device))


def argmax_rows_reference(scores: torch.Tensor) -> torch.Tensor:
    return scores.argmax(-1)  # the first of equal ones


# ------------------------------------------------------------------------------------------------ kernels

# A chunk is one program's share of a row: DEPTH lines of LANES scores. A block of it is RUN neighbouring lanes over all
# lines, so that each thread first reduces what it has loaded itself: 4 * 32 = 128 ids.
LANES, DEPTH, RUN = tl.constexpr(256), tl.constexpr(32), tl.constexpr(4)
CHUNK = LANES.value * DEPTH.value
BLOCKS_PER_CHUNK = LANES.value // RUN.value


@triton.jit
def packed_key(score, row_id):
    """The key of FP32 scores and their ids, int64 [...]."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    ordinal = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (ordinal << 32) | (0xFFFFFFFF - row_id)


@triton.jit
def load_keys(scores_ptr, row_id, count):
    """Keys of the scores at `row_id`; ids from `count` on come after every score, and their key's id is 2^32 - 1."""
    exists = row_id < count
    score = tl.load(scores_ptr + row_id, mask=exists, other=0.0)
    return tl.where(exists, packed_key(score, row_id), -9223372036854775808)


@triton.jit
def id_of(key):
    return 0xFFFFFFFF - (key & 0xFFFFFFFF)


@triton.jit
def _block_maxima_kernel(scores_ptr, maxima_ptr, row_stride, count):
    row, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    blocks: tl.constexpr = LANES // RUN
    row_id = chunk * (LANES * DEPTH) + tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    keys = load_keys(scores_ptr + row * row_stride, row_id, count)
    maxima = tl.max(tl.reshape(tl.max(keys, 0), (blocks, RUN)), 1)
    tl.store(maxima_ptr + (row * tl.num_programs(0) + chunk) * blocks + tl.arange(0, blocks), maxima)


@triton.jit
def _best_block_kernel(maxima_ptr, ids_ptr, blocks, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    best = tl.full((BLOCK,), -9223372036854775808, tl.int64)
    for start in range(0, blocks, BLOCK):
        block = start + tl.arange(0, BLOCK)
        maxima = tl.load(maxima_ptr + row * blocks + block, mask=block < blocks, other=-9223372036854775808)
        best = tl.maximum(best, maxima)
    tl.store(ids_ptr + row, id_of(tl.max(best, 0)))


def block_maxima(scores: torch.Tensor) -> torch.Tensor:
    """`scores` FP32 [R, V], rows at any stride -> the best key of each block, int64 [R, blocks]."""
    rows, count = scores.shape
    require("scores", scores, (rows, count), torch.float32)
    if not 0 < count < 1 << 31:
        raise ValueError(f"scores: {count} columns, must be 1 to 2^31 - 1")
    chunks = triton.cdiv(count, CHUNK)
    maxima = torch.empty(rows, chunks * BLOCKS_PER_CHUNK, dtype=torch.int64, device=scores.device)
    if rows:
        _block_maxima_kernel[(chunks, rows)](scores, maxima, scores.stride(0), count, num_warps=8)
    return maxima


def argmax_rows_triton(scores: torch.Tensor) -> torch.Tensor:
    maxima = block_maxima(scores)
    ids = torch.empty(scores.shape[0], dtype=torch.int64, device=scores.device)
    if scores.shape[0]:
        _best_block_kernel[(scores.shape[0],)](maxima, ids, maxima.shape[1], BLOCK=1024, num_warps=4)
    return ids


def argmax_rows(scores: torch.Tensor) -> torch.Tensor:
    """The first id of each row of `scores` FP32 [R, V], V >= 1 -> int64 [R]."""
    return argmax_rows_triton(scores) if scores.is_cuda else argmax_rows_reference(scores)
