"""The proposal head's shortlist: the stable top-k of the public rows of a head, for DFlash2's selector.

Scores are FP32. Order: descending score; exact ties go to the lower global token id. No temperature, penalty or filter
applies here. Rows at or above the public vocabulary are not among the scores.

On a card one program a row narrows the block maxima down: sixteen coarse sets of blocks, sixteen blocks, sixteen parts
of them, and so on to sixteen ids. Each step keeps what can hold a member of the top 16, so the result is exact whatever
the ties. Few numbers are left at each step, so that counting how many are better ranks them all at once.

Source: specification (unary top-16); decisions 5 and 9.
"""

# Triton declares neither its launch options nor what constexpr parameters take.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.ordering import BLOCKS_PER_CHUNK, DEPTH, LANES, RUN, block_maxima, id_of, load_keys, top_rows

MOST = tl.constexpr(16)


def shortlist_reference(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    available = min(k, scores.shape[-1])
    best, ids = top_rows(scores, available)
    missing = k - available
    if missing:
        best = torch.cat((best, best.new_full((best.shape[0], missing), -torch.inf)), dim=-1)
        ids = torch.cat((ids, ids[:, :1].expand(-1, missing)), dim=-1)
    return best, ids


@triton.jit
def _first_sixteen(keys, N: tl.constexpr):
    """The best 16 of `keys` [N] in order [16]; keys are distinct, but for those that stand for nothing."""
    better = tl.sum((keys[None, :] > keys[:, None]).to(tl.int32), 1)
    ranked = better[None, :] == tl.arange(0, MOST)[:, None]
    return tl.max(tl.where(ranked, keys[None, :], -9223372036854775808), 1)


@triton.jit
def _load_maxima(maxima_ptr, block, blocks):
    return tl.load(maxima_ptr + block, mask=block < blocks, other=-9223372036854775808)


@triton.jit
def _best_of_sets(keys, SETS: tl.constexpr, SIZE: tl.constexpr):
    """The best 16 of the maxima of `SETS` sets, each `SIZE` neighbours of `keys`."""
    return _first_sixteen(tl.max(tl.reshape(keys, (SETS, SIZE)), 1), SETS)


@triton.jit
def _best_blocks(maxima_ptr, blocks, BLOCKS: tl.constexpr):
    """The maxima of the best 16 blocks: from 64 coarse sets, to fours of blocks, to blocks."""
    coarse: tl.constexpr = BLOCKS // 64
    keys = _best_of_sets(_load_maxima(maxima_ptr, tl.arange(0, BLOCKS), blocks), 64, coarse)
    if coarse > 4:
        members = _block_of(keys)[:, None] // coarse * coarse + tl.arange(0, coarse)[None, :]
        keys = _best_of_sets(_load_maxima(maxima_ptr, members, blocks), 4 * coarse, 4)
    if coarse > 1:
        size: tl.constexpr = 4 if coarse > 4 else coarse
        members = _block_of(keys)[:, None] // size * size + tl.arange(0, size)[None, :]
        keys = _best_of_sets(_load_maxima(maxima_ptr, members, blocks), 16 * size, 1)
    return keys


@triton.jit
def _block_of(key):
    row_id = id_of(key)
    return row_id // (LANES * DEPTH) * (LANES // RUN) + row_id % LANES // RUN


@triton.jit
def _shortlist_kernel(
    scores_ptr, maxima_ptr, best_ptr, ids_ptr, row_stride, count, blocks, K: tl.constexpr, BLOCKS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    scores = scores_ptr + row * row_stride
    keys = _best_blocks(maxima_ptr + row * blocks, blocks, BLOCKS)
    # a block is 32 lines of 4 lanes: first 4 lines of it, then one line, then one lane
    first = id_of(keys)[:, None]
    first -= first // LANES % DEPTH * LANES + first % RUN
    member = tl.arange(0, DEPTH * RUN)[None, :]
    keys = _best_of_sets(load_keys(scores, first + member // RUN * LANES + member % RUN, count), 128, 16)
    first = id_of(keys)[:, None]
    first -= first // LANES % 4 * LANES + first % RUN
    member = tl.arange(0, 16)[None, :]
    keys = _best_of_sets(load_keys(scores, first + member // RUN * LANES + member % RUN, count), 64, 4)
    first = id_of(keys)[:, None]
    first -= first % RUN
    keys = _first_sixteen(tl.reshape(load_keys(scores, first + tl.arange(0, RUN)[None, :], count), (64,)), 64)
    rank = tl.arange(0, MOST)
    ids = id_of(keys)
    exists = ids < count
    best_id = tl.sum(tl.where(rank == 0, ids, 0), 0)
    best = tl.load(scores + ids, mask=exists, other=-float("inf"))
    tl.store(best_ptr + row * K + rank, best, mask=rank < K)
    tl.store(ids_ptr + row * K + rank, tl.where(exists, ids, best_id), mask=rank < K)


def shortlist_triton(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    if not 0 < k <= MOST.value:
        raise ValueError(f"k: {k}, must be 1 to {MOST.value}")
    maxima = block_maxima(scores)
    rows, count = scores.shape
    best = torch.empty(rows, k, dtype=torch.float32, device=scores.device)
    ids = torch.empty(rows, k, dtype=torch.int64, device=scores.device)
    if rows:
        blocks = maxima.shape[1]
        _shortlist_kernel[(rows,)](
            scores,
            maxima,
            best,
            ids,
            scores.stride(0),
            count,
            blocks,
            K=k,
            BLOCKS=triton.next_power_of_2(max(blocks, BLOCKS_PER_CHUNK)),
            num_warps=8,
        )
    return best, ids


def shortlist(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`scores` FP32 [R, V] over public rows -> (unary scores FP32 [R, k], token ids int64 [R, k]), best first.

    Where V < k the last k - V entries repeat the best id with score -inf, which the selector gives no probability.
    """
    run = shortlist_triton if scores.is_cuda and has_kernel(k) else shortlist_reference
    return run(scores, k)


def has_kernel(k: int) -> bool:
    """Whether our kernel lists so many."""
    return k <= MOST.value
