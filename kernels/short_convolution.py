"""Depthwise causal convolution over the projected q, k, v of a gated delta net layer, followed by SiLU.

    out[t, c] = SiLU(sum_j w[c, j] x[t - (n - 1) + j, c])        n taps; rows before the chunk come from the history

The history is the last n - 1 projected columns before the frontier, oldest first. Nothing is written here: prefill and
commit take the new history with `advance_history`, which is an exact gather of columns.

Source: specification (Fold, convolution history); research of the target's layer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def short_convolution(x: torch.Tensor, history: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x` [B, T, C], `history` [B, C, n - 1], `weight` [C, n] -> [B, T, C] in x's dtype."""
    columns = torch.cat((history.to(x.dtype), x.transpose(1, 2)), dim=-1)
    out = F.conv1d(columns, weight[:, None, :], groups=weight.shape[0])
    return F.silu(out).transpose(1, 2)


def advance_history(history: torch.Tensor, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The history after the first counts[b] columns of `x` [B, T, C]: last n - 1 of (history || accepted columns).

    `history` [B, C, n - 1], `counts` int64 [B] -> [B, C, n - 1] in history's dtype. counts[b] = 0 returns it unchanged.
    """
    taps = history.shape[-1]
    columns = torch.cat((history, x.transpose(1, 2).to(history.dtype)), dim=-1)
    index = counts[:, None] + torch.arange(taps, device=x.device)
    return columns.gather(-1, index[:, None, :].expand(-1, columns.shape[1], -1))
