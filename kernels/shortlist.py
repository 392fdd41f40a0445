"""The proposal head's shortlist: the stable top-k of the public rows of a head, for DFlash2's selector.

Scores are FP32. Order: descending score; exact ties go to the lower global token id. No temperature, penalty or filter
applies here. Rows at or above the public vocabulary are not among the scores.

Source: specification (unary top-16); decisions 5 and 9.
"""

from __future__ import annotations

import torch

from kernels.ordering import top_rows


def shortlist(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`scores` FP32 [R, V] over public rows -> (unary scores FP32 [R, k], token ids int64 [R, k]), best first.

    Where V < k the last k - V entries repeat the best id with score -inf, which the selector gives no probability.
    """
    available = min(k, scores.shape[-1])
    best, ids = top_rows(scores, available)
    missing = k - available
    if missing:
        best = torch.cat((best, best.new_full((best.shape[0], missing), -torch.inf)), dim=-1)
        ids = torch.cat((ids, ids[:, :1].expand(-1, missing)), dim=-1)
    return best, ids
