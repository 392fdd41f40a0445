"""The exponential race: one token a row with probability proportional to its weight, from noise of its own per token.

    winner = argmin E_v / (w_v / max w)        weights are scaled a row, so that tiny ones do not overflow

E_v is `exponential` of `kernels/randomness.py`. Tokens of weight 0 never take part, and exact ties go to the lower id.
The kernel draws four tokens from one output of the generator, and nothing where no weight is positive; its logarithm
may differ from the reference's by a few units of the last place.

Source: decision 13.
"""

# Triton declares neither its launch options nor what constexpr parameters take.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.launch_checks import require, require_contiguous
from kernels.randomness import exponential, exponential_rows, noise_of, words_at

TOKENS_PER_PROGRAM = 1024
_WHOLE_ROWS = 8
"""Drawing a token of a whole row costs about so many times less than drawing it by itself."""


def race_reference(
    weights: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, purpose: int, sub: torch.Tensor
) -> torch.Tensor:
    """Where few tokens take part, as after top-k, only theirs are drawn; otherwise whole rows: less for each token."""
    runs = weights > 0
    scaled = weights / weights.max(-1, keepdim=True).values
    rows, tokens = runs.nonzero(as_tuple=True)
    if len(rows) * _WHOLE_ROWS > weights.numel():
        noise = exponential_rows(seeds, positions, purpose, sub, weights.shape[1])
        return _arrival(noise, scaled).masked_fill_(~runs, torch.inf).argmin(-1)
    noise = exponential(seeds[rows], positions[rows], purpose, sub[rows], tokens)
    time = torch.full_like(weights, torch.inf)
    time[rows, tokens] = _arrival(noise, scaled[rows, tokens])
    return time.argmin(-1)


def _arrival(noise: torch.Tensor, scaled: torch.Tensor) -> torch.Tensor:
    """Finite, however small the weight: after every other, and before those that do not take part."""
    return (noise / scaled).clamp(max=torch.finfo(torch.float32).max)


@triton.jit
def _race_kernel(
    weights_ptr,
    greatest_ptr,
    seeds_ptr,
    positions_ptr,
    sub_ptr,
    first_ptr,
    row_stride,
    count,
    PURPOSE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Program (chunk of tokens, row): the chunk's first arrival as (bits of its time, token id), int64."""
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0).to(tl.int64) * (TOKENS // 4) + tl.arange(0, TOKENS // 4)
    word = tl.arange(0, 4)[None, :]
    token = block[:, None] * 4 + word
    weight = tl.load(weights_ptr + row * row_stride + token, mask=token < count, other=0.0)
    at = first_ptr + row * tl.num_programs(0) + tl.program_id(0)
    if tl.max(tl.max(weight, 1), 0) > 0:  # pyright: ignore[reportOperatorIssue]
        seed, position, sub = tl.load(seeds_ptr + row), tl.load(positions_ptr + row), tl.load(sub_ptr + row)
        key = block * 0  # the generator takes tensors of one shape
        word0, word1, word2, word3 = words_at(key + seed, block, key + position, PURPOSE, key + sub)
        low = tl.where(word == 0, word0[:, None], word1[:, None])
        high = tl.where(word == 2, word2[:, None], word3[:, None])
        noise = noise_of(tl.where(word < 2, low, high))
        runs = weight > 0
        scaled = tl.div_rn(tl.where(runs, weight, 1.0), tl.load(greatest_ptr + row))
        time = tl.minimum(tl.div_rn(noise, scaled), 3.4028234663852886e38)
        arrival = (time.to(tl.int32, bitcast=True).to(tl.int64) << 32) | token
        arrival = tl.where(runs, arrival, 0x7FFFFFFF00000000)
        tl.store(at, tl.min(tl.min(arrival, 1), 0))
    else:
        tl.store(at, 0x7FFFFFFF00000000)  # after every arrival


def race_triton(
    weights: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, purpose: int, sub: torch.Tensor
) -> torch.Tensor:
    """Raises ValueError naming a tensor that does not fit."""
    rows, count = weights.shape
    require("weights", weights, (rows, count), torch.float32)
    if not 0 < count < 1 << 31:
        raise ValueError(f"weights: {count} columns, must be 1 to 2^31 - 1")
    for name, words in (("seeds", seeds), ("positions", positions), ("sub", sub)):
        require_contiguous(name, words, (rows,), torch.int64)
    chunks = triton.cdiv(count, TOKENS_PER_PROGRAM)
    first = torch.empty(rows, chunks, dtype=torch.int64, device=weights.device)
    if rows:
        _race_kernel[(chunks, rows)](
            weights,
            weights.amax(-1),
            seeds,
            positions,
            sub,
            first,
            weights.stride(0),
            count,
            PURPOSE=purpose,
            TOKENS=TOKENS_PER_PROGRAM,
            num_warps=4,
        )
    return first.amin(-1) & 0xFFFFFFFF


def race(
    weights: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, purpose: int, sub: torch.Tensor
) -> torch.Tensor:
    """`weights` FP32 [R, V], not negative, at least one positive a row; `seeds`, `positions`, `sub` int64 [R] -> int64
    [R]."""
    run = race_triton if weights.is_cuda else race_reference
    return run(weights, seeds, positions, purpose, sub)
