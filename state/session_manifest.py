"""The part of a manifest that is about the session: identity, ledger, transcript, turns. No tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import numpy as np

from state.errors import FormatError
from state.fields import Fields, Tokens
from state.media import Placed
from state.session_record import Message, SessionRecord, TurnRecord

LEDGER_LIMIT = 1 << 21
"""Tokens of one ledger: twice the longest context of the models that this serves, with YaRN."""

ROLES = ("system", "developer", "user", "assistant", "tool")
MODES = ("history", "append")

SESSION_FIELDS = ("session", "ledger", "transcript", "turns")
_SESSION = ("id", "branch", "epoch", "order", "opener", "frontier")


@dataclass(frozen=True, eq=False)
class SessionFacts:
    """A `SessionRecord` whose ledger is still the document's bytes, and whose media are apart."""

    id: str
    branch: str
    epoch: tuple[int, int]
    order: int
    opener: int
    frontier: int
    ledger: Tokens
    transcript: tuple[Message, ...]
    turns: tuple[TurnRecord, ...]

    def record(self, media: Placed = ()) -> SessionRecord:
        return SessionRecord(
            id=self.id,
            ledger=tuple(cast(list[int], self.ledger.tolist())),
            branch=self.branch,
            epoch=self.epoch,
            order=self.order,
            opener=self.opener,
            frontier=self.frontier,
            transcript=self.transcript,
            turns=self.turns,
            media=media,
        )


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
    }


def parse_session(root: Fields) -> SessionFacts:
    """Takes the session out of a manifest. Raises `FormatError`."""
    session = root.child("session")
    session.allow_only(_SESSION)
    ledger = root.words("ledger", LEDGER_LIMIT)
    return SessionFacts(
        id=session.visible("id"),
        branch=session.text("branch"),
        epoch=session.pair("epoch"),
        order=session.whole("order"),
        opener=session.whole("opener", limit=len(ledger) + 1),
        frontier=session.whole("frontier", limit=len(ledger) + 1),
        ledger=ledger,
        transcript=tuple(_parse_message(entry) for entry in root.children("transcript")),
        turns=tuple(_parse_turn(entry) for entry in root.children("turns")),
    )


def _parse_message(entry: Fields) -> Message:
    """Beside role and content, a message is what its client made it."""
    entry.one_of("role", ROLES)
    content = entry.values.get("content")
    if isinstance(content, list):
        entry.children("content")
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
    )
