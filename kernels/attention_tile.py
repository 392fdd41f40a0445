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


@triton.jit
def take_seen_tile(q, k, v, scale, best, total, mixed):
    """As `take_tile`, of keys that every query sees: nothing is masked, and `scale`, positive, goes into the exponent's
    multiplication."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    highest = tl.maximum(best, tl.max(scores, axis=1) * scale)
    weights = tl.exp2(scores * scale - highest[:, None])
    kept = tl.exp2(best - highest)
    total = total * kept + tl.sum(weights, axis=1)
    mixed = tl.dot(weights.to(v.dtype), v, mixed * kept[:, None], input_precision="ieee")
    return highest, total, mixed
