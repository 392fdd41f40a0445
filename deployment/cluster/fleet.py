"""Which replicas are here to stay, and which of them has room? The directory's view of the fleet, without an opinion on
any session."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from deployment.ownership.messages import Drain

FRESH_SECONDS = 3.0
"""A replica renews every second. One that has not for so long is given nothing."""


@dataclass(frozen=True)
class Load:
    """Of one replica: lanes without a turn, and turns without a lane."""

    lanes_free: int
    queued: int


@dataclass
class _Known:
    load: Load
    renewed: float


class Fleet:
    """Times are of a monotonic clock."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._leaving: frozenset[str] = frozenset()

    def renewed(self, replica: str, load: Load, now: float) -> None:
        self._known[replica] = _Known(load, now)

    def gone(self, replica: str) -> None:
        self._known.pop(replica, None)

    def leave(self, replicas: Collection[str]) -> None:
        """These are about to go, and no others."""
        self._leaving = frozenset(replicas)

    def staying(self, now: float, beside: str | None = None) -> tuple[str, ...]:
        """Those that may be given sessions."""
        return tuple(
            replica
            for replica, known in self._known.items()
            if now - known.renewed <= FRESH_SECONDS and replica not in self._leaving and replica != beside
        )

    def drains(self, now: float) -> list[tuple[str, Drain]]:
        """What those must be told that are about to go."""
        return [(replica, Drain(self.staying(now, replica))) for replica in self._known if replica in self._leaving]

    def with_room(self, beside: str, now: float) -> str | None:
        """The replica with most free lanes among those where nobody waits; None: there is no such one."""
        free = [
            (self._known[replica].load.lanes_free, replica)
            for replica in self.staying(now, beside)
            if self._known[replica].load.lanes_free > 0 and self._known[replica].load.queued == 0
        ]
        return max(free)[1] if free else None
