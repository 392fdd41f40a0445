"""How does a replica get the right to append to a session, and let go of what nobody wants?

A name that is asked for is taken over before anybody knows whether there is anything under it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from deployment.cluster.not_owned import NoCopyLeft, NotNow, NotOwned, OwnedElsewhere
from deployment.cluster.owned_sessions import OwnedSessions
from deployment.durable_copies import DurableCopies
from deployment.ending import Ending
from deployment.errors import RequestError, session_unavailable
from deployment.locks import Locks
from deployment.ownership.log import HeadMoved
from deployment.ownership.messages import Opened
from deployment.ownership.words import Epoch, SessionKey
from deployment.rebuilding import exists, unfinished
from deployment.session import Session
from deployment.session_log import deleted_under

log = logging.getLogger("ray.serve")


class Taking:
    """Of one replica's sessions. Raises RequestError (503) for one that cannot be had now."""

    def __init__(
        self,
        owned: OwnedSessions,
        durable: DurableCopies,
        ending: Ending,
        getting: Locks,
        held: Callable[[SessionKey], Session | None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        """`getting`: held by whoever brings a session here; `held`: one that is here; `spawn` runs what nobody waits
        for."""
        self._owned = owned
        self._durable = durable
        self._ending = ending
        self._getting = getting
        self._held = held
        self._spawn = spawn

    async def taken(
        self,
        key: SessionKey,
        anew: bool,
        holds: Epoch | None = None,
        *,
        alone: bool = False,
        first: HeadMoved | None = None,
    ) -> Opened:
        """What its copies say of a session that is this replica's now: see `OwnedSessions.take`. `OwnedElsewhere`,
        `NoCopyLeft`."""
        try:
            return await self._owned.take(key, anew=anew, holds=holds, alone=alone, first=first)
        except (OwnedElsewhere, NoCopyLeft):
            raise
        except (NotNow, NotOwned) as error:
            raise session_unavailable(key.session, str(error)) from None

    def is_loaded(self, opened: Opened) -> bool:
        """See `OwnedSessions.loaded`."""
        try:
            return self._owned.loaded(opened)
        except NotOwned as error:
            self._owned.forget(opened.key)
            raise session_unavailable(opened.key.session, str(error)) from None

    async def as_nothing(self, opened: Opened) -> Opened:
        """The right to append to a session that does not exist yet."""
        while not self.is_loaded(opened):
            opened = await self.taken(opened.key, anew=False)
        return opened

    async def is_durable_alone(self, opened: Opened) -> bool:
        """Whether its copies say nothing of a session that the durable tier has."""
        return unfinished(opened) and await self._durable.has(opened.key)

    # -------------------------------------------------------------------------------------------- letting go

    def give_back(self, key: SessionKey) -> None:
        """The right to append to a session, which nobody here has any use for."""
        self._owned.forget(key)

    @contextlib.contextmanager
    def for_somebody(self, key: SessionKey) -> Iterator[None]:
        """While a session is brought here or made. If who wants it leaves meanwhile, a name under which there is
        nothing is free again."""
        try:
            yield
        except asyncio.CancelledError:
            self._spawn(self._left(key))
            raise

    async def _left(self, key: SessionKey) -> None:
        async with self._getting.of(key):
            if self._held(key) is not None:
                return  # somebody else wanted it, too
            try:
                opened = await self.taken(key, anew=False)
                if exists(opened) or await self.is_durable_alone(opened):
                    self.give_back(key)
                else:
                    await self.take_back(opened)
            except (NotOwned, RequestError) as error:
                log.info("session %s, which nobody waits for any more, is not taken back: %s", key, error)

    async def take_back(self, opened: Opened) -> None:
        """A session that does not exist was asked for, and is this replica's now: as if nobody had asked."""
        await self.end_durable(opened)
        try:
            await self.as_nothing(opened)
            await self._ending.bury(opened.key, time.time())
        finally:
            self._owned.forget(opened.key)

    async def end_durable(self, opened: Opened) -> None:
        """Who deleted a session told its log first, in versions before this one, and may have been cut off before the
        durable tier had its end."""
        deleted = deleted_under(opened.records)
        try:
            # Not for one that was in a single store: a tombstone would say there that it was.
            if deleted is not None and await self._durable.has(opened.key):
                await self._ending.delete_durable(opened.key, deleted)
        except RequestError:
            self._owned.forget(opened.key)
            raise
