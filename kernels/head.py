"""Scores of head rows: FP32 from here on, whatever the model's dtype.

    scores = hidden W^T, products of the represented inputs, accumulated and kept in FP32

Rounding them to BF16 first would tie neighbours 0.125 apart at 16 to 32 (decision 12).
"""

from __future__ import annotations

import torch


def head_scores(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`hidden` [..., H], `weight` [N, H] of one dtype -> FP32 [..., N]."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    if rows.is_cuda and rows.dtype != torch.float32:
        scores = torch.mm(rows, weight.T, out_dtype=torch.float32)
    else:
        scores = rows.float() @ weight.float().T
    return scores.view(*hidden.shape[:-1], -1)
