"""Log-probabilities of chosen tokens and of their best alternatives: log-softmax of raw target logits over the public
rows, before any control.

Source: decision 12; order and ties of decision 9.
"""

from __future__ import annotations

import torch

from kernels.ordering import top_rows


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`logits` FP32 [R, V], `tokens` int64 [R] -> FP32 [R], and the k best: ids int64 [R, k], FP32 [R, k]."""
    logprobs = logits.float().log_softmax(-1)
    best, ids = top_rows(logprobs, k)
    return logprobs.gather(-1, tokens[:, None])[:, 0], ids, best
