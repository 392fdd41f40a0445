"""Where do the sessions of a replica go that is about to end, and who takes the requests that still reach it?

Turns that run go first, since somebody waits for them, then idle sessions, several at a time. A session is moved as any
other (`SessionKeeper.move`): one that stays, because the way was not free, is tried again at the next word.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from deployment.errors import RequestError
from deployment.keeper import SessionKeeper
from deployment.ownership.messages import Drain
from deployment.ownership.words import SessionKey
from deployment.router import rendezvous
from deployment.session import Session

AT_ONCE = 4
"""Sessions on their way at the same time: one is sealed while another one's state is copied."""

BELIEVED_SECONDS = 3.0
"""The directory repeats its word every half second. A replica whose node is not drained after all works on."""

log = logging.getLogger("ray.serve")


class Drainer:
    """Of `replica`. `clock`: monotonic seconds."""

    def __init__(self, replica: str, keeper: SessionKeeper, clock: Callable[[], float] = time.monotonic) -> None:
        self._replica = replica
        self._keeper = keeper
        self._clock = clock
        self._to: tuple[str, ...] = ()
        self._told_at = float("-inf")
        self._moves: dict[SessionKey, asyncio.Task[None]] = {}
        self._lanes = asyncio.Semaphore(AT_ONCE)

    def told(self, drain: Drain) -> None:
        """From the replica's event loop."""
        if not self._destinations and drain.to:
            log.warning("this replica is about to go: its sessions move to %s", ", ".join(drain.to))
        self._to, self._told_at = drain.to, self._clock()
        for session in sorted(self._keeper.all() if drain.to else (), key=_urgency):
            self._give(session)

    def destination(self, affinity: str) -> str | None:
        """Who takes what comes here now. None: this replica itself."""
        to = self._destinations
        return rendezvous(affinity, to)[0] if to else None

    async def sent_on(self, key: SessionKey, owner: str | None) -> str | None:
        """The replica that has the session now, or is to have it. None: it is to be served here. `owner`: by the word
        of the directory."""
        to = self.destination(str(key))
        session = self._keeper.held(key)
        if session is None and owner == self._replica:
            return None  # nobody else is given it before it is here
        if to is None or session is None:
            return to
        await asyncio.wait([self._give(session)])
        return to if self._keeper.held(key) is None else None

    async def empty(self) -> None:
        """Returns when every session was moved that can be."""
        moves = [self._give(session) for session in sorted(self._keeper.all(), key=_urgency)]
        if moves:
            await asyncio.wait(moves)

    @property
    def _destinations(self) -> tuple[str, ...]:
        return self._to if self._clock() - self._told_at <= BELIEVED_SECONDS else ()

    def _give(self, session: Session) -> asyncio.Task[None]:
        """Its one move, running already or begun now."""
        key = session.key
        if key not in self._moves:
            self._moves[key] = asyncio.create_task(self._moved(session))
            self._moves[key].add_done_callback(lambda _: self._moves.pop(key, None))
        return self._moves[key]

    async def _moved(self, session: Session) -> None:
        async with self._lanes:
            to = self.destination(str(session.key))
            if to is None or self._keeper.held(session.key) is not session:
                return
            try:
                await self._keeper.move(session, to)
            except RequestError as error:  # it is on its way already
                log.info("session %s is not moved to %s now: %s", session.key, to, error)
            except Exception:
                log.exception("session %s could not be moved to %s", session.key, to)


def _urgency(session: Session) -> tuple[bool, int]:
    return session.running is None, -session.order
