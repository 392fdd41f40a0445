"""May an owner still say to its clients what its stores have acknowledged?

Where a store of its set is left, whoever takes over seals it, and nothing that was acknowledged is lost. Where all are
void nobody can be sealed, and a session begins anew without them: so an owner that was cut off, or slept, must not
publish what they acknowledged. It does so only while it has lately seen, in the cluster's key-value store, that one of
them counts; and the directory lets a session begin anew only when nobody can believe that any more.
"""

from __future__ import annotations

from collections.abc import Iterable

from deployment.ownership.liveness import LEASE_SLACK
from deployment.ownership.words import Member

STANDING_SECONDS = 5.0
"""For so long an owner believes what it has seen. It looks every second, so that streams go on while the directory is
started again."""

UNBELIEVED_SECONDS = STANDING_SECONDS + LEASE_SLACK
"""After so long nobody believes that a void store counts."""


class Standing:
    """The stores that count, as a replica has last seen them. Times are of its own monotonic clock."""

    def __init__(self) -> None:
        self._counting: frozenset[Member] = frozenset()
        self._asked = float("-inf")

    def seen(self, counting: Iterable[Member], asked: float) -> None:
        """All stores that count, as an answer to what was asked then."""
        if asked > self._asked:
            self._counting, self._asked = frozenset(counting), asked

    def holds(self, members: Iterable[Member], now: float) -> bool:
        """Whether one of them is known to count."""
        return now - self._asked <= STANDING_SECONDS and not self._counting.isdisjoint(members)
