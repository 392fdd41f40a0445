"""The part of a manifest that is about the session: identity, ledger, transcript, turns, fork points. No tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import numpy as np

from state.errors import FormatError
from state.fields import Fields, Tokens
from state.media import Placed
from state.session_record import ForkPoint, Message, SessionRecord, TurnRecord

LEDGER_LIMIT = 1 << 21
"""Tokens of one ledger: twice the longest context of the models that this serves, with YaRN."""

ROLES = ("system", "developer", "user", "assistant", "tool")
MODES = ("history", "append")

SESSION_FIELDS = ("session", "ledger", "transcript", "turns", "fork_points")
_SESSION = ("id", "branch", "epoch", "order", "opener", "frontier")


@dataclass(frozen=True, eq=False)
class SessionFacts:
    """A `SessionRecord` whose ledger is still the document's bytes, and so are those of its fork points, which have
    none in `fork_points`; its media are apart."""

    id: str
    branch: str
    epoch: tuple[int, int]
    order: int
    opener: int
    frontier: int
    ledger: Tokens
    transcript: tuple[Message, ...]
    turns: tuple[TurnRecord, ...]
    fork_points: tuple[ForkPoint, ...]
    fork_ledgers: tuple[Tokens, ...]

    def record(self, media: Placed = ()) -> SessionRecord:
        return SessionRecord(
            id=self.id,
            ledger=_plain(self.ledger),
            branch=self.branch,
            epoch=self.epoch,
            order=self.order,
            opener=self.opener,
            frontier=self.frontier,
            transcript=self.transcript,
            turns=self.turns,
            fork_points=tuple(
                replace(point, ledger=_plain(own))
                for point, own in zip(self.fork_points, self.fork_ledgers, strict=True)
            ),
            media=media,
        )


def _plain(tokens: Tokens) -> tuple[int, ...]:
    return tuple(cast(list[int], tokens.tolist()))


def as_tokens(ledger: Sequence[int], place: str) -> Tokens:
    """Raises `FormatError` for a token id that is no unsigned number of 32 bits."""
    try:
        return np.asarray(ledger, dtype="<u4")
    except (OverflowError, ValueError, TypeError) as error:
        raise FormatError(place, f"holds what is no token id: {error}") from None


def session_fields(record: SessionRecord) -> dict[str, Any]:
    """The manifest's fields of a session. Raises `FormatError`."""
    return {
        "session": {
            "id": record.id,
            "branch": record.branch,
            "epoch": list(record.epoch),
            "order": record.order,
            "opener": record.opener,
            "frontier": record.frontier,
        },
        "ledger": as_tokens(record.ledger, "manifest.ledger").tobytes(),
        "transcript": list(record.transcript),
        "turns": [{field.name: getattr(turn, field.name) for field in fields(turn)} for turn in record.turns],
        "fork_points": [_fork_point_fields(number, point) for number, point in enumerate(record.fork_points)],
    }


def _fork_point_fields(number: int, point: ForkPoint) -> dict[str, Any]:
    plain = {field.name: getattr(point, field.name) for field in fields(point)}
    ledger = as_tokens(point.ledger, f"manifest.fork_points[{number}].ledger").tobytes()
    return plain | {"ledger": ledger, "transcript": list(point.transcript)}


def add_since_1_0(root: Fields) -> None:
    """What a document of version 1.0 does not say, as FORMAT.md has it."""
    root.values.setdefault("fork_points", [])
    for turn in root.children("turns"):
        turn.values.setdefault("ended_at", 0.0)


def parse_session(root: Fields) -> SessionFacts:
    """Takes the session out of a manifest. Raises `FormatError`."""
    session = root.child("session")
    session.allow_only(_SESSION)
    ledger = root.words("ledger", LEDGER_LIMIT)
    transcript = tuple(_parse_message(entry) for entry in root.children("transcript"))
    points = root.children("fork_points")
    return SessionFacts(
        id=session.visible("id"),
        branch=session.text("branch"),
        epoch=session.pair("epoch"),
        order=session.whole("order"),
        opener=session.whole("opener", limit=len(ledger) + 1),
        frontier=session.whole("frontier", limit=len(ledger) + 1),
        ledger=ledger,
        transcript=transcript,
        turns=tuple(_parse_turn(entry) for entry in root.children("turns")),
        fork_points=tuple(_parse_fork_point(entry, len(ledger), len(transcript)) for entry in points),
        fork_ledgers=tuple(entry.words("ledger", LEDGER_LIMIT) for entry in points),
    )


def _parse_message(entry: Fields) -> Message:
    """Beside role and content, a message is what its client made it."""
    entry.one_of("role", ROLES)
    content = entry.values.get("content")
    if isinstance(content, list):
        entry.maps("content")
    elif content is not None and not isinstance(content, str):
        raise entry.refuse("content", "text, a list of maps, or nil")
    return entry.values


def _parse_turn(entry: Fields) -> TurnRecord:
    entry.allow_only([field.name for field in fields(TurnRecord)])
    return TurnRecord(
        id=entry.text("id", 128),
        mode=entry.one_of("mode", MODES),
        replica=entry.text("replica", 128),
        request=entry.plain("request"),
        request_sha256=entry.octets("request_sha256", 32),
        seed=entry.whole("seed", limit=1 << 64),
        idempotency_key=entry.optional_text("idempotency_key", 255),
        start=entry.whole("start"),
        published=entry.whole("published"),
        finish_reason=entry.text("finish_reason"),
        frontier=entry.whole("frontier"),
        hit=entry.text("hit"),
        reused=entry.whole("reused"),
        prefilled=entry.whole("prefilled"),
        acceptance_length=entry.number("acceptance_length", "a number from 0"),
        ended_at=entry.number("ended_at", "seconds since 1970"),
    )


def _parse_fork_point(entry: Fields, tokens: int, messages: int) -> ForkPoint:
    """`tokens`, `messages`: what the session has. A point has a ledger of its own or the beginning of the session's."""
    entry.allow_only([field.name for field in fields(ForkPoint)])
    ledger = entry.words("ledger", LEDGER_LIMIT)
    transcript = tuple(_parse_message(message) for message in entry.children("transcript"))
    if len(ledger):
        tokens, messages = len(ledger), len(transcript)
    elif transcript:
        raise FormatError(f"{entry.place}.transcript", "is its own, but its ledger is the session's")
    point = ForkPoint(
        turn=entry.optional_text("turn", 128),
        tokens=entry.whole("tokens", 1, tokens + 1),
        messages=entry.whole("messages", limit=messages + 1),
        frontier=entry.whole("frontier", limit=tokens + 1),
        opener=entry.whole("opener", limit=tokens + 1),
        name=None if entry.raw("name") is None else entry.visible("name"),
        image=entry.whole("image", limit=tokens + 1),
        transcript=transcript,
    )
    if len(ledger) and (point.tokens, point.messages) != (tokens, messages):
        told = f"says {point.tokens} tokens and {point.messages} messages, but has {tokens} and {messages} of its own"
        raise FormatError(entry.place, told)
    return point
