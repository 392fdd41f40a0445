"""What has come here of sessions that other replicas are about to give? The other side of `deployment/moving.py`.

Segments go to the engine, which checks and holds them; the document waits here until this replica is the owner, and is
used only if the log ends where it does. Nothing that came gives any right to the session.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass, field

from deployment.engine.commands import DropStaged, StageSegments, VerifyStaged
from deployment.engine.errors import EngineError
from deployment.engine.service import EngineService
from deployment.errors import RequestError
from deployment.moving import Coming, Digests, Document, NotComing, Sent, ToDestination, Welcome
from deployment.ownership.words import Order, SessionKey
from deployment.parcels import Assembly
from deployment.session import engine_id_of
from state.errors import StateError

log = logging.getLogger("ray.serve")


@dataclass(eq=False)
class Arrival:
    """`hashed`: all of its segments were checked when they came. `sound`: whether what was not is what left."""

    key: SessionKey
    migration: str
    expiry: asyncio.TimerHandle
    hashed: bool = True
    order: Order | None = None
    document: bytes = b""
    assembly: Assembly = field(default_factory=Assembly)
    sound: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Arrivals:
    """Of one session, the last migration that began; what nobody comes for goes after `seconds`."""

    def __init__(self, service: EngineService, node: str, seconds: float) -> None:
        self._service = service
        self._node = node
        self._seconds = seconds
        self._arrivals: dict[SessionKey, Arrival] = {}
        self._dropping: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._arrivals)

    async def receive(self, message: ToDestination) -> Welcome:
        """Raises RequestError for what cannot be taken, EngineError where the engine has no room for it."""
        if isinstance(message, Coming):
            self._forget(message.key)
            self._arrivals[message.key] = Arrival(message.key, message.migration, self._expiry(message.key))
            return Welcome(self._node)
        arrival = self._arrivals.get(message.key)
        if arrival is None or arrival.migration != message.migration:
            if isinstance(message, NotComing):
                return Welcome(self._node)
            raise RequestError(409, "not_expected", f"session {message.key} is not expected here any more")
        arrival.expiry.cancel()
        arrival.expiry = self._expiry(message.key)
        match message:
            case Sent():
                await self._sent(arrival, message)
            case Document():
                arrival.order, arrival.document = message.order, message.document.tobytes()
            case Digests():
                await self._verify(arrival, message)
            case NotComing():
                self._forget(message.key)
        return Welcome(self._node)

    def arrived(self, key: SessionKey, end: Order) -> Arrival | None:
        """The session whole, if that is how a log that ends at `end` says it: a source that went on after it sent this
        has made it worthless."""
        arrival = self._arrivals.get(key)
        return arrival if arrival is not None and arrival.order == end else None

    async def verified(self, arrival: Arrival) -> bool:
        """After the import: whether it was of what left the source. A source that says nothing is believed."""
        if arrival.hashed:
            self._forget(arrival.key)
            return True
        return await arrival.sound

    async def _sent(self, arrival: Arrival, message: Sent) -> None:
        try:
            segments = arrival.assembly.add(message.parcel)
        except StateError as error:
            raise RequestError(400, "bad_state", str(error), "parcel") from None
        arrival.hashed = arrival.hashed and message.hashed
        if segments:
            await self._service.call(StageSegments(secrets.token_hex(8), arrival.migration, segments, message.hashed))

    async def _verify(self, arrival: Arrival, message: Digests) -> None:
        call, engine_id = secrets.token_hex(8), engine_id_of(message.key)
        try:
            await self._service.call(VerifyStaged(call, arrival.migration, engine_id, message.digests))
        except EngineError as error:
            log.error("session %s was damaged on its way, and is rebuilt: %s", message.key, error)
            self._end(arrival, sound=False)
        else:
            self._end(arrival, sound=True)

    def _expiry(self, key: SessionKey) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._seconds, self._forget, key)

    def _forget(self, key: SessionKey) -> None:
        """A migration is over, whatever came of it."""
        arrival = self._arrivals.get(key)
        if arrival is not None:
            self._end(arrival, sound=True)
            task = asyncio.get_running_loop().create_task(self._drop(arrival.migration))
            self._dropping.add(task)
            task.add_done_callback(self._dropping.discard)

    def _end(self, arrival: Arrival, sound: bool) -> None:
        if self._arrivals.get(arrival.key) is arrival:
            del self._arrivals[arrival.key]
        arrival.expiry.cancel()
        if not arrival.sound.done():
            arrival.sound.set_result(sound)

    async def _drop(self, migration: str) -> None:
        try:
            await self._service.call(DropStaged(secrets.token_hex(8), migration))
        except EngineError as error:  # the engine ends, and all that it holds with it
            log.info("migration %s was not dropped: %s", migration, error)
