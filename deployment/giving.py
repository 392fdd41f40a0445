"""How does a replica give a session to another one, and the turn that runs in it? The log decides what became of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from ray.exceptions import RayError

from deployment import wire
from deployment.cluster.not_owned import NotOwned
from deployment.cluster.owned_sessions import OwnedSessions
from deployment.engine.errors import EngineError
from deployment.engine.service import EngineService
from deployment.errors import session_busy
from deployment.metrics.transfers import Transfers
from deployment.moving import Departure, NotMoved, Send
from deployment.session import Session
from state.errors import StateError

log = logging.getLogger("ray.serve")


class Giving:
    """Of one replica. `send` reaches another one's `deployment/arrivals.py`; `forget` drops what is here of a session;
    `spawn` runs what goes on though who asked for it has left."""

    def __init__(
        self,
        replica: str,
        node: str,
        service: EngineService,
        owned: OwnedSessions,
        transfers: Transfers,
        send: Send,
        forget: Callable[[Session], Awaitable[None]],
        spawn: Callable[[Coroutine[Any, Any, wire.Movement | None]], asyncio.Task[wire.Movement | None]],
    ) -> None:
        self._replica = replica
        self._node = node
        self._service = service
        self._owned = owned
        self._transfers = transfers
        self._send = send
        self._forget = forget
        self._spawn = spawn

    async def move(self, session: Session, destination: str) -> wire.Movement | None:
        """None: it stayed, and its turn goes on here as if nothing had happened. RequestError (409) while it is being
        moved already."""
        if session.moving:
            raise session_busy(session.key.session, "it is being moved already")
        if destination == self._replica:
            return wire.Movement()
        session.moving = True
        # Who asked may leave; a session must not be left half moved.
        return await asyncio.shield(self._spawn(self._given(session, destination)))

    async def _given(self, session: Session, destination: str) -> wire.Movement | None:
        key, running = session.key, session.running
        departure = Departure(self._service, self._send, self._node, session, destination)
        given = False
        began = stopped = time.monotonic()
        try:
            await departure.ahead(running.id if running is not None else None)
            stopped = time.monotonic()
            if running is not None:
                await running.suspend()
            end = self._owned.end(key)
            session.order = end.sequence
            await departure.rest(end)
            self._owned.offer(key, destination)
            given = await self._owned.offered(key)
        except (NotOwned, NotMoved, StateError, EngineError, RayError, TimeoutError) as error:
            log.warning("session %s could not be moved to %s: %r", key, destination, error)
        finally:
            session.moving = False
            seconds = time.monotonic() - stopped
            moved = given or key not in self._owned
            if running is not None:
                running.go_on(wire.Moved(destination if given else None) if moved else None)
        if moved:
            await self._forget(session)  # before it can come back
        await (departure.arrived() if given else departure.stayed())
        movement = wire.Movement(departure.bytes_ahead, departure.bytes_in_pause, seconds) if moved else None
        self._transfers.departed(movement, time.monotonic() - began)
        return movement
