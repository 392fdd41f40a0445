"""Where did a session stand, and what was it there? What a fork of its past begins with.

Every turn's end is such a point as long as the session goes on from it. A request with another history leaves a part of
the past behind: then an explicit checkpoint keeps what it had as its own, and a turn's end is none any more; nor is a
checkpoint of a past with images or videos.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from deployment.common_prefix import common_prefix
from deployment.errors import RequestError
from state.media import begun, shared_tokens, without_pixels
from state.session_record import ForkPoint, SessionRecord


@dataclass(frozen=True)
class ForkAt:
    """Which point a client means: exactly one of these."""

    checkpoint: str | None = None
    turn: str | None = None
    frontier: int | None = None


def of_turn(record: SessionRecord, turn: str | None) -> ForkPoint:
    """Where a session stands now, after that turn."""
    return ForkPoint(turn, len(record.ledger), len(record.transcript), record.frontier, record.opener)


def left_behind(past: SessionRecord, now: SessionRecord) -> list[ForkPoint]:
    """A session's points after a turn that may have left the way that it was on."""
    whole = now.ledger[: len(past.ledger)] == past.ledger
    shared = len(past.ledger) if whole else common_prefix(past.ledger, now.ledger)
    then, since = (tuple(map(without_pixels, begun(one.media, len(past.ledger)))) for one in (past, now))
    parted = shared_tokens(then, since)
    shared = shared if parted is None else min(shared, parted)
    return [point for old in past.fork_points if (point := _after(old, past, now, shared)) is not None]


def past_of(record: SessionRecord, point: ForkPoint) -> SessionRecord:
    """The session as it was at one of its points, with the points that led there."""
    ledger = point.ledger or record.ledger[: point.tokens]
    transcript = point.transcript if point.ledger else record.transcript[: point.messages]
    ended = next((n for n, turn in enumerate(record.turns, 1) if turn.id == point.turn), 0)
    return replace(
        record,
        ledger=ledger,
        opener=point.opener,
        frontier=point.frontier,
        transcript=transcript,
        turns=record.turns[:ended],
        fork_points=tuple(_on_the_way(record, ledger, point.messages)),
        media=() if point.ledger else begun(record.media, len(ledger)),
    )


def found(record: SessionRecord, at: ForkAt) -> ForkPoint:
    """RequestError (404) if the session has no such point, with those that it has."""
    points = record.fork_points
    if at.checkpoint is not None:
        named = [point for point in points if point.name == at.checkpoint]
        known = ", ".join(sorted(point.name for point in points if point.name is not None)) or "it has none"
        return _only(named, f"checkpoint: {at.checkpoint!r} is none of the session's: {known}", "checkpoint")
    if at.turn is not None:
        ended = [point for point in points if point.turn == at.turn]
        if not ended and any(turn.id == at.turn for turn in record.turns):
            raise _left(at.turn)
        return _only(ended, f"turn: session {record.id!r} has no turn {at.turn!r}", "turn")
    there = [point for point in points if point.frontier == at.frontier]
    known = ", ".join(map(str, sorted({point.frontier for point in points}))) or "there is none yet"
    return _only(there, f"frontier: a fork begins where a turn ended: {known}; not at {at.frontier}", "frontier")


def _only(points: Sequence[ForkPoint], why_not: str, param: str) -> ForkPoint:
    """The newest; several are the same place, or the later one is what the session went on from."""
    if not points:
        raise RequestError(404, "turn_not_found" if param == "turn" else "checkpoint_not_found", why_not, param)
    return points[-1]


def _left(turn: str) -> RequestError:
    message = f"turn: the session's history does not go on from turn {turn!r} any more; a checkpoint would have kept it"
    return RequestError(409, "turn_left", message, "turn")


def _after(point: ForkPoint, past: SessionRecord, now: SessionRecord, shared: int) -> ForkPoint | None:
    if point.ledger:
        return point
    told = now.transcript[: point.messages]
    answered = not point.messages or (len(told) == point.messages and told[-1].get("role") == "assistant")
    if point.tokens <= shared and answered:
        return point
    if point.name is None or begun(past.media, point.tokens):
        return None  # nor is one with media of its own, whose pixels only the session keeps
    return replace(point, ledger=past.ledger[: point.tokens], transcript=past.transcript[: point.messages])


def _on_the_way(record: SessionRecord, ledger: tuple[int, ...], messages: int) -> Iterable[ForkPoint]:
    for point in record.fork_points:
        then = point.ledger or record.ledger[: point.tokens]
        if then == ledger[: point.tokens] and point.messages <= messages:
            yield replace(point, ledger=(), transcript=())
