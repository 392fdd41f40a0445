"""The one order of scores that everything uses: descending score, exact ties to the lower id; +0 and -0 are equal.

Source: decision 9.
"""

from __future__ import annotations

import torch


def top_rows(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `k` of each row of `scores` FP32 [R, V], k <= V -> (scores FP32 [R, k], ids int64 [R, k]).

    Score and id are packed into one integer key, so that a partial selection is exact at a tied boundary too.
    """
    bits = (scores.float() + 0.0).view(torch.int32)
    ordinal = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    reversed_id = torch.arange(scores.shape[-1] - 1, -1, -1, device=scores.device)
    key = ordinal * (1 << 32) + reversed_id
    ids = scores.shape[-1] - 1 - (key.topk(k, dim=-1).values & 0xFFFFFFFF)
    return scores.gather(-1, ids), ids
