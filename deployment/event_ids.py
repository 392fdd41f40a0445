"""Which place in a turn's stream does an event id name? The one after all text that the event and those before brought.

    turn.position.hash8           turn.choice.position.hash8   where a request has several choices

`turn` is 32 hex digits, `position` the ledger position after the last published id, `hash8` the first 8 hex digits of
the sha256 of all ids that were published so far, each as a little-endian u32. Who holds the ids can tell whether a
reader has seen this turn's text, and not another one's.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deployment.errors import invalid

_FORM = re.compile(r"([0-9a-f]{32})(?:\.([0-9]{1,2}))?\.([0-9]{1,16})\.([0-9a-f]{8})")


@dataclass(frozen=True)
class EventId:
    """`choice` is None where a request has one."""

    turn: str
    position: int
    digest: str
    choice: int | None = None

    def __str__(self) -> str:
        choice = () if self.choice is None else (str(self.choice),)
        return ".".join((self.turn, *choice, str(self.position), self.digest))


def parse_event_id(text: str, param: str) -> EventId:
    """Raises RequestError (400) for text that is no event id."""
    found = _FORM.fullmatch(text)
    if found is None:
        raise invalid(
            f"{param}: {text[:80]!r} is no event id (turn.position.hash, as a stream's id lines have it)", param
        )
    turn, choice, position, digest = found.groups()
    return EventId(turn, int(position), digest, None if choice is None else int(choice))


class PublishedIds:
    """The ids that were published of one choice, and their digest at every length."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._hash = hashlib.sha256()

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, span: slice) -> list[int]:
        return self._ids[span]

    def add(self, ids: Sequence[int]) -> None:
        self._ids.extend(ids)
        self._hash.update(_bytes(ids))

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()[:8]

    def digest_at(self, length: int) -> str:
        return digest_of(self._ids[:length])


def digest_of(ids: Sequence[int]) -> str:
    return hashlib.sha256(_bytes(ids)).hexdigest()[:8]


def _bytes(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype="<u4").tobytes()
