"""Which replica owns a session, under which epoch, and where its Host replicas lie.

A pure state machine: messages and time in, answers out. `deployment/actors.py` puts it into a Ray actor. It is soft
state: host stores know enough (`restore`) to build it again, under a higher incarnation.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from deployment.ownership import Conflict, Copy, Epoch, Grant, Placement, SessionKey

TOMBSTONE_SECONDS = 7 * 24 * 3600.0
"""Longer than any copy of a deleted session is kept anywhere."""


@dataclass(frozen=True)
class _Tombstone:
    epoch: Epoch
    at: float


@dataclass
class Directory:
    """All sessions of one application. `incarnation` must be higher than that of every directory before it."""

    incarnation: int
    _counter: int = 0
    _sessions: dict[SessionKey, Placement] = field(default_factory=dict)
    _tombstones: dict[SessionKey, _Tombstone] = field(default_factory=dict)

    def locate(self, key: SessionKey) -> Placement | None:
        return self._sessions.get(key)

    def sessions(self, tenant: str) -> tuple[Placement, ...]:
        """A tenant's sessions, last used first."""
        mine = [placement for key, placement in self._sessions.items() if key.tenant == tenant]
        return tuple(sorted(mine, key=lambda placement: placement.updated, reverse=True))

    def claim(self, key: SessionKey, replica: str, expected: Epoch | None, now: float) -> Grant | Conflict:
        """Makes `replica` the owner under a new epoch, if the session is still at the epoch `expected`.

        `expected = None` claims a session that does not exist. The comparison is what keeps two replicas that both
        believe the owner dead from both getting a grant for the same state.
        """
        current = self._sessions.get(key)
        if (current.epoch if current else None) != expected:
            return Conflict(current)
        self._counter += 1
        epoch = Epoch(self.incarnation, self._counter)
        self._sessions[key] = Placement(
            key=key,
            epoch=epoch,
            owner=replica,
            copies=current.copies if current else (),
            created=current.created if current else now,
            updated=now,
        )
        return Grant(epoch, current)

    def abandon(self, key: SessionKey, epoch: Epoch) -> bool:
        """Forgets a session whose first turn never happened. It was never published, so it leaves no tombstone."""
        current = self._sessions.get(key)
        if current is None or current.epoch != epoch or current.copies:
            return False
        del self._sessions[key]
        return True

    def record_copy(self, key: SessionKey, copy: Copy, now: float) -> bool:
        """Notes where a Host replica lies. False if the writer is not the owner any more."""
        current = self._sessions.get(key)
        if current is None or copy.epoch != current.epoch:
            return False
        others = tuple(other for other in current.copies if other.node != copy.node)
        self._sessions[key] = replace(current, copies=(copy, *others), updated=now)
        return True

    def delete(self, key: SessionKey, now: float) -> Placement | None:
        """Removes a session and leaves a tombstone, so that no rebuild brings it back. None if there was none."""
        current = self._sessions.pop(key, None)
        if current is None:
            return None
        self._tombstones[key] = _Tombstone(current.epoch, now)
        self._tombstones = {
            dead: stone for dead, stone in self._tombstones.items() if now - stone.at < TOMBSTONE_SECONDS
        }
        return current

    def restore(self, key: SessionKey, owner: str | None, copy: Copy, now: float) -> None:
        """Takes over what a host store knows, after the directory's own restart."""
        stone = self._tombstones.get(key)
        if stone is not None and copy.epoch <= stone.epoch:
            return
        current = self._sessions.get(key)
        if current is None or copy.epoch > current.epoch:
            known = current.copies if current else ()
            created = current.created if current else now
            current = Placement(key, copy.epoch, owner, known, created, now)
        others = tuple(other for other in current.copies if other.node != copy.node)
        self._sessions[key] = replace(current, copies=(copy, *others))

    def restore_owner(self, key: SessionKey, owner: str, epoch: Epoch, now: float) -> None:
        """Takes over what a live replica says it owns, after the directory's own restart."""
        stone = self._tombstones.get(key)
        current = self._sessions.get(key)
        if (stone is not None and epoch <= stone.epoch) or (current is not None and epoch < current.epoch):
            return
        known, created = (current.copies, current.created) if current else ((), now)
        self._sessions[key] = Placement(key, epoch, owner, known, created, now)
