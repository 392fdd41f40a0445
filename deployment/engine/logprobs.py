"""What does the target say of given tokens? Log-probabilities of what a turn published, and of its prompt.

They are of the raw logits over the public rows, before any control (decision 12).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from deployment.engine.lane import Lane
from deployment.engine.messages import TokenLogprob
from kernels.logprobs import token_logprobs

PROMPT_ROWS = 64
"""Positions of a prompt that have logits at the same time: 64 MB in FP32 at a vocabulary of 250k."""


def licensed_logprobs(
    lanes: Sequence[Lane], logits: torch.Tensor, licensed: Sequence[Sequence[int]]
) -> tuple[tuple[TokenLogprob, ...], ...]:
    """Of each lane's licensed tokens, from raw `logits` FP32 [B, W, V]; empty for a lane that asked for none or
    that has no token."""
    told: list[tuple[TokenLogprob, ...]] = []
    for row, (lane, tokens) in enumerate(zip(lanes, licensed, strict=True)):
        k = lane.submit.sampling.logprobs
        told.append(() if k is None or not tokens else _told(logits[row, : len(tokens)], tokens, k))
    return tuple(told)


def prompt_logprobs(
    lane: Lane, hidden: torch.Tensor, start: int, logits: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[TokenLogprob, ...]:
    """Of the prompt's tokens that a slice predicts, from the first that is not scored yet; empty for a lane that asked
    for none. `hidden` [T, H] of positions `start` and after; `logits` maps [R, H] to FP32 [R, V]."""
    k = lane.submit.sampling.prompt_logprobs
    if k is None:
        return ()
    end = min(start + len(hidden) + 1, lane.prompt_tokens)
    told: list[TokenLogprob] = []
    for first in range(lane.scored, end, PROMPT_ROWS):
        tokens = lane.ledger[first : min(first + PROMPT_ROWS, end)]
        begin = first - 1 - start
        told += _told(logits(hidden[begin : begin + len(tokens)]), tokens, k)
    return tuple(told)


def _told(logits: torch.Tensor, tokens: Sequence[int], k: int) -> tuple[TokenLogprob, ...]:
    """`logits` FP32 [R, V] of R tokens, with the `k` best of each."""
    own, ids, best = token_logprobs(logits, torch.tensor(tokens, device=logits.device), k)
    rows = zip(tokens, own.tolist(), ids.tolist(), best.tolist(), strict=True)
    return tuple(TokenLogprob(t, p, tuple(zip(i, b, strict=True))) for t, p, i, b in rows)
