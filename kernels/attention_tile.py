"""One tile of keys into a running softmax: the step that every attention kernel repeats.

Source: Milakov and Gimelshein 2018 (online normaliser); Dao et al. 2022, "FlashAttention".
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def take_tile(q, k, v, visible, scale, best, total, mixed):
    """One tile of keys into the running softmax of base 2: `q` [M, D], `k`, `v` [N, D], `visible` [M, N]; `best`,
    `total` [M] and `mixed` [M, D] are the largest score, the sum of weights and of weighted values so far."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(visible, scores, float("-inf"))
    highest = tl.maximum(best, tl.max(scores, axis=1))
    # A query that has seen no key yet has no largest score, and -inf - -inf is not a number.
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - shift[:, None])
    kept = tl.exp2(best - shift)
    total = total * kept + tl.sum(weights, axis=1)
    mixed = tl.dot(weights.to(v.dtype), v, mixed * kept[:, None], input_precision="ieee")
    return highest, total, mixed
