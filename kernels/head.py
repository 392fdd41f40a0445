"""Scores of head rows: FP32 from here on, whatever the model's dtype.

    scores = hidden W^T, products of the represented inputs, accumulated and kept in FP32

Rounding them to BF16 first would tie neighbours 0.125 apart at 16 to 32 (decision 12).
"""

from __future__ import annotations

import torch

from kernels.linear import Product, linear, product

ALIGNED = 8
"""The library's products are several times slower where the number of rows of the weight is no multiple of this."""


def head_scores(hidden: torch.Tensor, weight: torch.Tensor, rows: int | None = None) -> torch.Tensor:
    """`hidden` [..., H], `weight` [N, H] of one dtype -> FP32 [..., rows], of the first `rows` rows (None: all N).

    On a card the scores may be a view of those of more rows: their last axis has no gaps, the others may.
    """
    rows = weight.shape[0] if rows is None else rows
    count = hidden.numel() // max(hidden.shape[-1], 1)
    taken, _ = head_product(count, rows, weight, hidden.is_cuda)
    return linear(hidden, weight[:taken], torch.float32)[..., :rows]


def head_product(count: int, rows: int, weight: torch.Tensor, card: bool) -> tuple[int, Product]:
    """How many rows of `weight` are taken to score the first `rows` of them for `count` hidden rows, and by what."""
    every, kind = len(weight), product(count, weight.dtype, card)
    whole = kind == "cuBLAS" and rows % ALIGNED != 0 and every % ALIGNED == 0
    return (every if whole else rows), kind
