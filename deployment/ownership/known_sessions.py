"""All sessions that the directory knows, and which of them have to be looked after.

What nobody has changed since it was found in order needs no look, so that a message costs what it changes, however many
sessions there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from deployment.ownership.known_session import KnownSession
from deployment.ownership.words import Member, SessionKey

GONE_SECONDS = 3600.0
"""How long a deleted session is known. Stores remember it for longer (`tombstones.py`); this is for replicas that may
still hold it for theirs, which renew their leases every second."""


class KnownSessions:
    """`get` and what gives several are for reading; who gets one to change it has it looked after."""

    def __init__(self) -> None:
        self._sessions: dict[SessionKey, KnownSession] = {}
        self._restless: dict[SessionKey, None] = {}
        self._gone: deque[tuple[SessionKey, float]] = deque()

    def get(self, key: SessionKey) -> KnownSession | None:
        return self._sessions.get(key)

    def items(self) -> Iterator[tuple[SessionKey, KnownSession]]:
        return iter(self._sessions.items())

    def values(self) -> Iterator[KnownSession]:
        return iter(self._sessions.values())

    def __contains__(self, key: SessionKey) -> bool:
        return key in self._sessions

    def __len__(self) -> int:
        return len(self._sessions)

    # -------------------------------------------------------------------------------------------- changes

    def change(self, key: SessionKey) -> KnownSession | None:
        """None: it is not known."""
        session = self._sessions.get(key)
        if session is not None:
            self._restless[key] = None
        return session

    def learn(self, key: SessionKey) -> KnownSession:
        """It is known from now on."""
        self._restless[key] = None
        return self._sessions.setdefault(key, KnownSession())

    def replace(self, key: SessionKey, session: KnownSession) -> None:
        """It begins anew: what was known of it is another session's."""
        self._restless[key] = None
        self._sessions[key] = session

    def lose(self, member: Member) -> None:
        """A store is void: those that may lie there are looked after at once."""
        for key, session in self._sessions.items():
            if member in session.suspects and not session.gone:
                session.sent = float("-inf")
                self._restless[key] = None

    def disturb(self) -> None:
        """Something has changed that may concern every session."""
        self._restless |= dict.fromkeys(key for key, session in self._sessions.items() if not session.gone)

    # -------------------------------------------------------------------------------------------- looking after

    def restless(self, now: float) -> list[tuple[SessionKey, KnownSession]]:
        """Those that have to be looked after. Nobody has to look after one that is gone."""
        restless: list[tuple[SessionKey, KnownSession]] = []
        for key in list(self._restless):
            session = self._sessions[key]
            if session.gone:
                session.sent = now
                self._gone.append((key, now))
                self.rests(key)
            else:
                restless.append((key, session))
        return restless

    def rests(self, key: SessionKey) -> None:
        """It is in order until somebody changes it."""
        self._restless.pop(key, None)

    def forget_gone(self, now: float) -> None:
        """Of those that were deleted long ago there is nothing to be known."""
        while self._gone and self._gone[0][1] + GONE_SECONDS < now:
            key, since = self._gone.popleft()
            session = self._sessions.get(key)
            if session is not None and session.gone and session.sent == since:
                del self._sessions[key]
                self.rests(key)
