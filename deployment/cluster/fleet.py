"""Which replicas are here to stay, and which of them has room? The directory's view of the fleet, without an opinion on
any session."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from deployment.cluster.serve_states import ServeReplica
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

    def look(self, replicas: Collection[ServeReplica]) -> None:
        """All that Serve has now. Whom it does not name, as when the application ends, is about to go too."""
        staying = {one.replica for one in replicas if not one.leaving}
        self._leaving = frozenset(replica for replica in self._known if replica not in staying)

    def has_all(self, replicas: Collection[ServeReplica]) -> bool:
        """Whether all engines of the application renew here. Those of another version renew with another directory."""
        engines = {one.deployment for one in replicas if one.replica in self._known}
        return bool(engines) and all(one.replica in self._known for one in replicas if one.deployment in engines)

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
