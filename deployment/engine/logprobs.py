"""What does the target say of given tokens? Log-probabilities of a turn's prompt, and of what it published.

They are of the raw logits over the public rows, before any control (decision 12), or, of what a turn published, of
what all controls leave.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from deployment.engine.commands import TokenLogprob
from deployment.engine.lane import Lane
from kernels.logprobs import token_logprobs

MAX_LOGPROBS = 20
"""Alternatives that a turn may ask for beside each token."""

PROMPT_ROWS = 64
"""Positions of a prompt that have logits at the same time: 64 MB in FP32 at a vocabulary of 250k."""


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
    return scored(tokens, own.tolist(), ids.tolist(), best.tolist(), k)


def scored(
    tokens: Sequence[int],
    own: Sequence[float],
    ids: Sequence[Sequence[int]],
    best: Sequence[Sequence[float]],
    k: int,
) -> tuple[TokenLogprob, ...]:
    """Of each token its own log-probability and the first `k` of the best that are possible, of which there may be
    more."""
    rows = zip(tokens, own, ids, best, strict=False)
    return tuple(TokenLogprob(t, p, _possible(i[:k], b[:k])) for t, p, i, b in rows)


def _possible(ids: Sequence[int], logprobs: Sequence[float]) -> tuple[tuple[int, float], ...]:
    return tuple((token, logprob) for token, logprob in zip(ids, logprobs, strict=True) if logprob > -math.inf)
