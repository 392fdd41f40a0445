"""How long does a store remember that a session was deleted?

Longer than any copy of it is kept anywhere. One of which nobody asked for the end, since it never really was there or
was a turn's own, was never durable: only what is on its way says anything of it, and that for minutes. Where all of
them take too much room, those that somebody asked for are kept for an hour.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from deployment.ownership.log_copy import LogCopy
from deployment.ownership.words import Epoch, SessionKey

TOMBSTONE_SECONDS = 7 * 24 * 3600.0
CROWDED_SECONDS = 3600.0
UNASKED_SECONDS = 600.0


@dataclass(frozen=True, order=True)
class _Stone:
    """`until`: how long it is kept; from `dispensable` on only where there is room. `seal` of the copy: whoever has
    sealed it since may be about to make the session anew."""

    until: float
    dispensable: float
    key: SessionKey
    seal: Epoch


class Tombstones:
    """Those of one store. Times are in seconds since 1970."""

    def __init__(self) -> None:
        self._unseen: set[SessionKey] = set()
        # Each stone is in one of them: first by when it becomes dispensable, from then on by how long it is kept.
        self._needed: list[tuple[float, _Stone]] = []
        self._dispensable: list[_Stone] = []

    def buried(self, key: SessionKey) -> None:
        """A session was deleted, or is so still under another seal."""
        self._unseen.add(key)

    def over(
        self, copies: Mapping[SessionKey, LogCopy], crowded: Callable[[], bool], at: float
    ) -> Iterator[SessionKey]:
        """Those whose time is over. `crowded`: whether they take too much room, asked again after each."""
        for key in self._unseen:
            copy = copies.get(key)
            if copy is not None and copy.tombstone is not None:
                stone = _stone(key, copy.tombstone.at, copy.seal, at)
                heapq.heappush(self._needed, (stone.dispensable, stone))
        self._unseen.clear()
        while self._needed and self._needed[0][0] < at:
            heapq.heappush(self._dispensable, heapq.heappop(self._needed)[1])
        while self._dispensable and (self._dispensable[0].until < at or crowded()):
            first = heapq.heappop(self._dispensable)
            copy = copies.get(first.key)
            if copy is not None and copy.deleted and copy.seal == first.seal:
                yield first.key


def _stone(key: SessionKey, deleted: float, seal: Epoch, at: float) -> _Stone:
    """`deleted`: when, as the tombstone says; `at`: now."""
    soonest = at + UNASKED_SECONDS
    if not deleted:
        return _Stone(soonest, soonest, key, seal)
    return _Stone(max(soonest, deleted + TOMBSTONE_SECONDS), max(soonest, deleted + CROWDED_SECONDS), key, seal)
