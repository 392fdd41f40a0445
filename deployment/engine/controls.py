"""What do the lanes ask of a round, beyond the model's own choice? Sampling, penalties, masks, log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deployment.engine.grammar import Masks
from deployment.engine.histories import penalised
from deployment.engine.lane import Lane
from deployment.engine.round_shape import Traits


def traits_of(lanes: Sequence[Lane]) -> Traits:
    controls = [lane.submit.sampling for lane in lanes]
    wanted = [c.logprobs for c in controls if c.logprobs is not None]
    return Traits(
        greedy=all(c.temperature <= 0 for c in controls),
        min_p=any(c.min_p for c in controls),
        reproducible=any(c.reproducible for c in controls),
        penalised=any(penalised(c) for c in controls),
        masks=len(masked_rows(lanes)),
        told=len(wanted),
        alternatives=max(wanted, default=0),
        processed=any(c.logprobs is not None and c.logprobs_mode == "processed_logprobs" for c in controls),
    )


def masked_rows(lanes: Sequence[Lane]) -> list[int]:
    """Rows that a mask is made for, in the order of their masks: those with a grammar first."""
    constrained = [row for row, lane in enumerate(lanes) if lane.matcher is not None]
    early = [row for row, lane in enumerate(lanes) if lane.matcher is None and _missing(lane) > 0]
    return [*constrained, *early]


def write_masks(lanes: Sequence[Lane], masks: Masks | None, allowed: np.ndarray) -> None:
    """Writes `allowed` uint8 [G, W, bytes] of the `masked_rows`: what the lanes' grammars allow, less end tokens and
    stop ids at columns before a lane's `min_tokens`. `masks`: of all rows with a grammar; None where there is none."""
    allowed.fill(0xFF)
    constrained = masks.rows if masks else ()
    if masks is not None:
        allowed[: len(constrained)] = masks.bits.view(np.uint8)
    for index, row in enumerate(masked_rows(lanes)):
        for token in lanes[row].stop_ids if _missing(lanes[row]) > 0 else ():
            if token // 8 < allowed.shape[2]:
                allowed[index, : _missing(lanes[row]), token // 8] &= 0xFF ^ (1 << token % 8)


def _missing(lane: Lane) -> int:
    """Tokens that must come before the turn may end."""
    return lane.submit.sampling.min_tokens - len(lane.published)
