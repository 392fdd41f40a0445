"""The host's preview of a round: of the licensed tokens, how many are kept, and whether the turn ends there.

Source: specification (preview, N), decisions 7 and 18.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deployment.engine.lane import Lane
from deployment.engine.messages import FinishReason


@dataclass(frozen=True)
class Preview:
    """`kept`: the N licensed tokens that are committed. `published`: those of them that the client sees, all but a
    hidden stop id, which is always the last. `finish_reason` is None while the turn goes on."""

    kept: tuple[int, ...]
    published: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_id: int | None


def preview(lane: Lane, licensed: Sequence[int]) -> Preview:
    """Cuts `licensed` at the first stop id or at the end of the budget, whichever comes first."""
    for index, token in enumerate(licensed):
        if token in lane.stop_ids:
            return Preview(tuple(licensed[: index + 1]), tuple(licensed[:index]), "stop", token)
        if index + 1 == lane.tokens_left:
            return Preview(tuple(licensed[: index + 1]), tuple(licensed[: index + 1]), "length", None)
    return Preview(tuple(licensed), tuple(licensed), None, None)
