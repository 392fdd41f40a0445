"""Controls that act on logits, at every verified position with that position's own history.

Column i predicts the token after d_1 .. d_i, so its history is the committed one plus those drafts: column i counts
only if they were all accepted. Order (decision 12):

    bias        logit + bias
    repetition  logit / r if positive, else logit * r        tokens of the prompt or of the history
    presence    logit - presence * [count > 0]               counts of tokens generated in this turn
    frequency   logit - frequency * count
    forbidden   -inf                                         min_tokens and grammars

Source: decision 12; the usual definitions (Keskar et al. 2019 for repetition, OpenAI's interface for the others).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class RowPenalties:
    """Per row: `repetition`, `presence`, `frequency` FP32 [B] (1, 0, 0: none); `bias` FP32 [B, V]; `in_prompt` bool
    [B, V]; `counts` FP32 [B, V], committed tokens of this turn, the anchor included."""

    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    bias: torch.Tensor
    in_prompt: torch.Tensor
    counts: torch.Tensor


def adjust_logits(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    penalties: RowPenalties | None = None,
    forbidden: torch.Tensor | None = None,
) -> torch.Tensor:
    """`logits` FP32 [B, W, V] over public rows, `drafts` int64 [B, >= W - 1], `forbidden` bool [B, W, V] -> FP32
    [B, W, V]. Nothing is changed in place."""
    if penalties is not None:
        width, vocabulary = logits.shape[1:]
        added = F.one_hot(drafts[:, : width - 1], vocabulary).to(torch.float32).cumsum(1)
        counts = penalties.counts[:, None] + F.pad(added, (0, 0, 1, 0))
        logits = logits + penalties.bias[:, None]
        seen = penalties.in_prompt[:, None] | (counts > 0)
        repetition = penalties.repetition[:, None, None]
        logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
        logits = logits - penalties.presence[:, None, None] * (counts > 0)
        logits = logits - penalties.frequency[:, None, None] * counts
    return logits if forbidden is None else logits.masked_fill(forbidden, -torch.inf)
