"""Log-probabilities of chosen tokens and of their best alternatives, of one of two distributions over the public rows:

    raw         log-softmax of the target's logits, before any control
    processed   log p, of what all controls leave (`kernels/sampling.py`); -inf for a token that cannot be drawn. A
                greedy row has neither temperature nor filters, and no p: log-softmax of its adjusted logits

Source: decision 12; order and ties of decision 9.
"""

from __future__ import annotations

import torch

from kernels.acceptance import RowSampling
from kernels.cut_search import BEST, STEEP
from kernels.cuts import RowControls, find_cuts
from kernels.ordering import keys_of, top_rows
from kernels.sampling import processed_distribution, weights_of


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`logits` FP32 [R, V], `tokens` int64 [R] -> FP32 [R], and the k best: ids int64 [R, k], FP32 [R, k]."""
    logprobs = logits.float().log_softmax(-1)
    best, ids = top_rows(logprobs, k)
    return logprobs.gather(-1, tokens[:, None])[:, 0], ids, best


def processed_logits(logits: torch.Tensor, sampling: RowSampling, extent: torch.Tensor) -> torch.Tensor:
    """Logits of the processed distribution in the first extent[b] + 1 columns of each row, FP32 [B, W, V]; the other
    columns may hold anything.

    `logits` FP32 [B, W, V], adjusted by what comes before the temperature; `extent` int64 [B]. On a card nothing waits
    for it."""
    if sampling.all_greedy:
        return logits
    if logits.is_cuda:
        return processed_logits_triton(logits, sampling, extent)
    return processed_logits_reference(logits, sampling)


def processed_logits_reference(logits: torch.Tensor, sampling: RowSampling) -> torch.Tensor:
    width, vocabulary = logits.shape[1:]
    p = processed_distribution(
        logits.reshape(-1, vocabulary),
        sampling.temperature.repeat_interleave(width),
        sampling.top_k.repeat_interleave(width),
        sampling.top_p.repeat_interleave(width),
        None if sampling.min_p is None else sampling.min_p.repeat_interleave(width),
    )
    return torch.where((sampling.temperature > 0)[:, None, None], p.log().view(logits.shape), logits)


def processed_logits_triton(logits: torch.Tensor, sampling: RowSampling, extent: torch.Tensor) -> torch.Tensor:
    """By the cuts that a verdict has, so that both keep the same tokens. Weights are logits of p."""
    width, vocabulary = logits.shape[1:]
    cuts = find_cuts(logits, RowControls(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, extent))
    rows = logits.reshape(-1, vocabulary)
    weight = weights_of(rows, cuts.state[:, BEST.value], cuts.state[:, STEEP.value])
    kept = keys_of(rows) >= cuts.cut[:, None]
    if sampling.min_p is not None:
        kept &= weight >= sampling.min_p.repeat_interleave(width)[:, None]
    p = torch.where(kept, weight / cuts.total[:, None], 0.0)
    return torch.where((sampling.temperature > 0)[:, None, None], p.log().view(logits.shape), logits)
