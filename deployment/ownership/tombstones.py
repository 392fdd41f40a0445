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
        self._stones: list[_Stone] = []

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
                heapq.heappush(self._stones, _stone(key, copy.tombstone.at, copy.seal, at))
        self._unseen.clear()
        while self._stones:
            first = self._stones[0]
            if first.until >= at and not (first.dispensable < at and crowded()):
                return
            heapq.heappop(self._stones)
            copy = copies.get(first.key)
            if copy is not None and copy.deleted and copy.seal == first.seal:
                yield first.key


def _stone(key: SessionKey, deleted: float, seal: Epoch, at: float) -> _Stone:
    """`deleted`: when, as the tombstone says; `at`: now."""
    soonest = at + UNASKED_SECONDS
    if not deleted:
        return _Stone(soonest, soonest, key, seal)
    return _Stone(max(soonest, deleted + TOMBSTONE_SECONDS), max(soonest, deleted + CROWDED_SECONDS), key, seal)
