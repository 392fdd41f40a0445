"""How long did a stream stand still, when its owner was killed or its session moved? From what its client saw."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence

from tests.e2e.chaos.faults import Kill, Move
from tests.e2e.chaos.workload import Talk

IN_FLIGHT_SECONDS = 0.5
"""What was under way when its sender died may come so much later."""


def seconds_after_kills(talks: Sequence[Talk], kills: Sequence[Kill]) -> dict[str, list[float]]:
    """From each kill to the end of the longest gap that began around it, in every stream whose owner died, by the
    kill's kind."""
    found: dict[str, list[float]] = defaultdict(list)
    for kill in kills:
        for talk, session, times in _streams(talks):
            around = [
                (after - before, after)
                for before, after in itertools.pairwise(times)
                if before <= kill.at + IN_FLIGHT_SECONDS and after > kill.at
            ]
            if (talk.key, session) in kill.victims and times[0] < kill.at and around:
                found[kill.kind].append(max(around)[1] - kill.at)
    return dict(found)


def seconds_of_moves(talks: Sequence[Talk], moves: Sequence[Move]) -> list[float]:
    """Of every move within a stream: the longest gap that overlaps it, less the stream's median gap."""
    pauses: list[float] = []
    for move in moves:
        for talk, session, times in _streams(talks):
            if (talk.key, session) != (move.key, move.session) or not times[0] < move.began < times[-1]:
                continue
            pairs = list(itertools.pairwise(times))
            around = [after - before for before, after in pairs if after > move.began and before < move.ended]
            if around:
                pauses.append(max(around) - statistics.median(after - before for before, after in pairs))
    return pauses


def _streams(talks: Sequence[Talk]) -> Iterator[tuple[Talk, str, list[float]]]:
    for talk in talks:
        for taken in talk.turns:
            times = [event.at for event in taken.answer.events]
            if len(times) > 2:
                yield talk, talk.conversation.session(taken.step.branch), times
