"""How does a session end, and what is known of one that has ended?

A tombstone in its log says so, for as long as a store has it. Some names are remembered here too, since the word of the
directory may be older.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from deployment.cluster.not_owned import NotOwned
from deployment.cluster.owned_sessions import OwnedSessions
from deployment.durable_copies import DurableCopies
from deployment.errors import RequestError, session_unavailable
from deployment.locks import Locks
from deployment.ownership.log import Deleted, Numbered
from deployment.ownership.words import NOTHING, Epoch, SessionKey
from deployment.session import Session
from state.errors import StateError

DELETED_KEPT = 4096
HEARD_SECONDS = 5.0

log = logging.getLogger("ray.serve")


class Ending:
    """Of those that one replica owns."""

    def __init__(
        self,
        owned: OwnedSessions,
        durable: DurableCopies,
        sessions: Mapping[SessionKey, Session],
        write: Callable[[SessionKey, Sequence[Numbered]], Awaitable[None]],
        forget: Callable[[Session], Awaitable[None]],
        spawn: Callable[[Coroutine[Any, Any, Exception | None]], asyncio.Task[Exception | None]],
    ) -> None:
        """`sessions`: all of the replica's, as they come and go; `write` adds to one's log; `forget` drops one here;
        `spawn` runs what goes on though who asked for it has left."""
        self._owned = owned
        self._durable = durable
        self._sessions = sessions
        self._write = write
        self._forget = forget
        self._spawn = spawn
        self._deleted: OrderedDict[SessionKey, Epoch] = OrderedDict()
        self._deleting = Locks()

    def deleted_under(self, key: SessionKey) -> Epoch | None:
        """The epoch of a session that was deleted here; None: none is known."""
        return self._deleted.get(key)

    def _note_deleted(self, key: SessionKey, epoch: Epoch) -> None:
        """For requests that were on their way while the session was deleted; the directory tells all later ones."""
        self._deleted[key] = epoch
        self._deleted.move_to_end(key)
        while len(self._deleted) > DELETED_KEPT:
            self._deleted.popitem(last=False)

    async def delete(self, session: Session, at: float) -> None:
        """A running turn is cancelled. The durable tier and all copies have its tombstone when this returns. `at`: as
        that says. `NotOwned` if it was given away meanwhile; RequestError (503): it is there still, or its copies hear
        of its end when they answer."""
        # Who asked may leave; a session must not be left with an end in one place and none in another.
        error = await asyncio.shield(self._spawn(self._tried(session, at)))
        if error is not None:
            raise error

    async def _tried(self, session: Session, at: float) -> Exception | None:
        """Why it is not deleted, which is no fault of this replica's."""
        try:
            await self._delete(session, at)
        except (NotOwned, RequestError) as error:
            return error
        return None

    async def _delete(self, session: Session, at: float) -> None:
        async with self._deleting.of(session.key):
            try:
                await self._rests(session)
                # A first turn that left nothing took its session along; and somebody else may have deleted it.
                if not session.buried:
                    self._must_be_here(session)
                    if not session.alone:  # a tombstone would say there that it was
                        # Before the log: as long as that goes on, whoever asks to delete the session again is heard.
                        await self.delete_durable(session.key, session.epoch)
                        await self._rests(session)
                        self._must_be_here(session)
                    self._note_deleted(session.key, session.epoch)
                    try:
                        await self.bury(session.key, at)
                    except BaseException:  # it may be there still, here or at another owner
                        self._deleted.pop(session.key, None)
                        raise
                    session.buried = True
                    await self._forget(session)
            finally:
                session.moving = False

    async def _rests(self, session: Session) -> None:
        session.moving = True  # no other turn begins in it, unless something else that waited lets go of it
        if session.running is not None:
            session.running.cancel()
            await session.running.ended()

    def _must_be_here(self, session: Session) -> None:
        if self._sessions.get(session.key) is not session:
            raise NotOwned(f"session {session.key} was moved while it was to be deleted")

    async def delete_durable(self, key: SessionKey, epoch: Epoch) -> None:
        try:
            await self._durable.delete(key, epoch)
        except StateError as error:
            why = f"the durable tier did not take its end: {error}"
            raise session_unavailable(key.session, why) from None

    async def end(self, session: Session) -> None:
        """The same of a turn's own, which nobody asked to delete. It stays where its copies do not answer."""
        try:
            await self.delete(session, 0.0)
        except (NotOwned, RequestError) as error:
            log.info("session %s is not ended: %s", session.key, error)

    async def abandon(self, session: Session) -> None:
        """A new session's first turn was refused, or it could not be made: as if it had never been asked for."""
        try:
            await self.bury(session.key, 0.0)
            session.buried = True
        except RequestError as error:
            log.info("session %s was not taken back: %s", session.key, error)
        await self._forget(session)

    async def bury(self, key: SessionKey, at: float) -> None:
        """Writes a tombstone, and lets the directory know, so that nobody is sent here any more."""
        await self._write(key, [Deleted(NOTHING, at)])
        with contextlib.suppress(TimeoutError):  # one that is being started again hears it later
            async with asyncio.timeout(HEARD_SECONDS):
                await self._owned.heard(key)
