"""What the directory knows of the host stores: which of them it has not heard of yet, and which count for nothing."""

from __future__ import annotations

from collections.abc import Iterable

from deployment.ownership.registry import Registry
from deployment.ownership.standing import UNBELIEVED_SECONDS
from deployment.ownership.words import Member

WRITE_SECONDS = 60.0
"""The key-value store may take so long to write that a store is void."""


class KnownStores:
    """`unheard`: those that count, and may know of sessions that the directory does not. Times are of a monotonic clock
    that all directories of the cluster share."""

    def __init__(self, registry: Registry, now: float) -> None:
        self._registry = registry
        # A later time than this is of a head that was started again, as its clock was.
        self._void = {member: at if at < now - WRITE_SECONDS else now for member, at in registry.voided().items()}
        self.unheard = set(registry.stores())
        self._missed = max(self._void.values(), default=float("-inf"))

    def heard(self, member: Member) -> None:
        """It has told all that it holds."""
        self.unheard.discard(member)

    def make_void(self, member: Member, now: float) -> None:
        if member in self._void:
            return
        self._registry.make_void(member, now)
        self._void[member] = float("inf")  # that may have taken long: until `look`
        if member in self.unheard:
            self.unheard.discard(member)
            self._missed = float("inf")

    def look(self, now: float) -> None:
        """What was made void is so by now for everybody who asks."""
        for member, since in self._void.items():
            if since > now:
                self._void[member] = now
        self._missed = min(self._missed, now)

    def counting(self, members: Iterable[Member]) -> tuple[Member, ...]:
        return tuple(member for member in members if member not in self._void)

    def any_void(self, members: Iterable[Member]) -> bool:
        return not self._void.keys().isdisjoint(members)

    def believed_until(self, members: Iterable[Member], all_known: bool) -> float:
        """Until when somebody may publish what stores acknowledged that are void by now: one of `members`, or, unless
        these are `all_known`, one that the directory never heard of."""
        times = [self._void[member] for member in members if member in self._void]
        missed = float("-inf") if all_known else self._missed
        return max([missed, *times]) + UNBELIEVED_SECONDS
