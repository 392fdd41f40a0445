"""What a round licenses: from the hidden of verified columns to tokens, logits being made a few lanes at a time.

Logits are FP32 over the public vocabulary: those of 64 lanes with 16 columns take a gigabyte, and as much again under
controls. So lanes are judged in slices whose logits take at most `SLICE_BYTES`; the memory of one slice serves the
next. A lane's verdict and logprobs are those of its own rows, whatever slice it is in.

Source: specification (verification); decisions 12, 14 and 15.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from deployment.engine.controls import controlled
from deployment.engine.errors import EngineError
from deployment.engine.grammar import Masks
from deployment.engine.lane import Lane
from deployment.engine.logprobs import licensed_logprobs
from deployment.engine.messages import TokenLogprob
from kernels.acceptance import Proposal, RowSampling, accept

SLICE_BYTES = 256_000_000


@dataclass(frozen=True)
class Judgement:
    """Of each lane: the tokens it may take, how many of them were drafts, and their logprobs if it asked for them.
    `dead_ends`: lanes whose grammar allows nothing after that."""

    licensed: tuple[tuple[int, ...], ...]
    accepted: tuple[int, ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...]
    dead_ends: tuple[tuple[Lane, EngineError], ...]


def judge(
    lanes: Sequence[Lane],
    hidden: torch.Tensor,
    logits: Callable[[torch.Tensor], torch.Tensor],
    vocabulary: int,
    proposal: Proposal | None,
    masks: Masks | None,
    extent: torch.Tensor,
    frontier: torch.Tensor,
    sampling: RowSampling,
) -> Judgement:
    """`hidden` [B, W, H] of the verified columns; `logits` maps [b, W, H] to FP32 [b, W, `vocabulary`]; the rest as in
    `kernels/acceptance.py`."""
    parts = [
        _judge_slice(
            lanes[part],
            logits(hidden[part]),
            proposal and proposal.rows(part),
            masks and masks.rows_of(part),
            extent[part],
            frontier[part],
            sampling.rows(part),
        )
        for part in lane_slices(len(lanes), hidden.shape[1], vocabulary)
    ]
    return Judgement(
        tuple(row for part in parts for row in part.licensed),
        tuple(row for part in parts for row in part.accepted),
        tuple(row for part in parts for row in part.logprobs),
        tuple(row for part in parts for row in part.dead_ends),
    )


def lane_slices(lanes: int, width: int, vocabulary: int) -> list[slice]:
    """Lanes one after the other, as many in a slice as `SLICE_BYTES` of logits hold, at least one."""
    step = max(1, SLICE_BYTES // (width * vocabulary * 4))
    return [slice(first, min(first + step, lanes)) for first in range(0, lanes, step)]


def _judge_slice(
    lanes: Sequence[Lane],
    logits: torch.Tensor,
    proposal: Proposal | None,
    masks: Masks | None,
    extent: torch.Tensor,
    frontier: torch.Tensor,
    sampling: RowSampling,
) -> Judgement:
    verdict = accept(controlled(lanes, logits, proposal, masks), proposal, extent, frontier, sampling)
    accepted = verdict.accepted.tolist()
    licensed = [tuple(row[: count + 1]) for row, count in zip(verdict.licensed.tolist(), accepted, strict=True)]
    ends = _cut_at_dead_ends(lanes, licensed, accepted, masks)
    return Judgement(tuple(licensed), tuple(accepted), licensed_logprobs(lanes, logits, licensed), ends)


def _cut_at_dead_ends(
    lanes: Sequence[Lane], licensed: list[tuple[int, ...]], accepted: list[int], masks: Masks | None
) -> tuple[tuple[Lane, EngineError], ...]:
    """A row ends before the first column that has no token: its drafts up to there stand, and nothing comes after.
    Changes `licensed` and `accepted` of such rows, and returns their lanes."""
    ends: list[tuple[Lane, EngineError]] = []
    for row, (column, error) in masks.dead.items() if masks else ():
        if accepted[row] >= column:
            accepted[row], licensed[row] = column, licensed[row][:column]
            ends.append((lanes[row], error))
    return tuple(ends)
