"""How does a session's state get to another replica, and how little of it in the pause? What the source does.

ahead      the destination is asked; it gets the turn's full pages and the session's older images while it decodes
the pause  the turn stands at a commit boundary: `rest` sends what has not gone yet, and the document. On one node
           nothing is hashed now
after      `arrived` tells what the sha256 of those are; `stayed` takes back what was sent

Who owns the session is decided elsewhere (`deployment/ownership/`): what is sent here is of use to no one but an owner
whose log ends where the document does. The destination's part is `deployment/arrivals.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np
from ray.exceptions import RayError

from deployment.engine.commands import Export, ExportPages, SegmentBytes
from deployment.engine.errors import UNKNOWN_SESSION, UNKNOWN_TURN, EngineError
from deployment.engine.events import Exported, Pages
from deployment.engine.service import EngineService
from deployment.errors import Refused
from deployment.ownership.words import Order, SessionKey
from deployment.parcels import Parcel, parcels
from deployment.session import Session
from deployment.wire import NotHere

AHEAD_SECONDS = 30.0
"""How long pages go ahead, if the turn makes them as fast as they go; the rest goes in the pause."""

SEND_SECONDS = 10.0
"""How long a destination may take for one message: clients of the turn may be waiting."""

IN_FLIGHT = 3
"""One parcel is copied here, one there, while one is between."""

log = logging.getLogger("ray.serve")


@dataclass(frozen=True)
class Coming:
    """A session may come: is there somebody to take it?"""

    key: SessionKey
    migration: str


@dataclass(frozen=True)
class Sent:
    """`hashed`: names are sha256, to be checked on arrival."""

    key: SessionKey
    migration: str
    parcel: Parcel
    hashed: bool


@dataclass(frozen=True)
class Document:
    """The session as of the log's record at `order`, detached: its segments went before. uint8."""

    key: SessionKey
    migration: str
    order: Order
    document: np.ndarray


@dataclass(frozen=True)
class Digests:
    """The sha256, by name, of segments that went without."""

    key: SessionKey
    migration: str
    digests: tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True)
class NotComing:
    key: SessionKey
    migration: str


ToDestination = Coming | Sent | Document | Digests | NotComing


@dataclass(frozen=True)
class Welcome:
    """Done. `node`: where the destination is."""

    node: str


Send = Callable[[str, ToDestination], Awaitable[Welcome | NotHere | Refused]]
"""Tells a replica. Raises RayError if it dies meanwhile."""


class NotMoved(Exception):
    """The destination does not take the session."""


class Departure:
    """One session's way to another replica. `ahead` and `rest` raise NotMoved, EngineError, RayError and TimeoutError;
    `arrived` and `stayed`, which come when all is decided, do not."""

    def __init__(self, service: EngineService, send: Send, node: str, session: Session, destination: str) -> None:
        self._service = service
        self._send = send
        self._node = node
        self._session = session
        self._destination = destination
        self._migration = secrets.token_hex(16)
        self._there: set[bytes] = set()
        self._hashed = True
        self._unhashed: Sequence[SegmentBytes] = ()
        self.bytes_ahead = 0
        self.bytes_in_pause = 0

    async def ahead(self, turn: str | None) -> None:
        """Before the pause of the turn that runs, if one does. One that does not decode yet has no pages."""
        welcome = await self._ask(Coming(self._session.key, self._migration))
        self._hashed = welcome.node != self._node
        if turn is None or self._session.keyed:
            return
        deadline = time.monotonic() + AHEAD_SECONDS
        first, full = 0, 1
        while first < full and time.monotonic() < deadline:
            pages = await self._pages(turn, first)
            if pages is None:
                return
            self.bytes_ahead += await self._segments(pages.segments, hashed=True)
            first, full = pages.end, pages.full
        exported = await self._export(hashed=True)
        if exported is not None:
            self.bytes_ahead += await self._segments(exported.segments, hashed=True)

    async def rest(self, order: Order) -> None:
        """The turn stands, and all copies of the log end at `order`."""
        exported = await self._export(self._hashed)
        if exported is None:
            return
        self._unhashed = () if self._hashed else exported.segments
        self.bytes_in_pause = await self._segments(exported.segments, self._hashed)
        document = np.frombuffer(exported.document, np.uint8)
        await self._ask(Document(self._session.key, self._migration, order, document))

    async def arrived(self) -> None:
        """The destination is the owner."""
        if self._unhashed:
            digests = await asyncio.to_thread(_digests, self._unhashed)
            await self._tell(Digests(self._session.key, self._migration, digests))

    async def stayed(self) -> None:
        await self._tell(NotComing(self._session.key, self._migration))

    async def _pages(self, turn: str, first: int) -> Pages | None:
        try:
            pages = await self._service.call(ExportPages(secrets.token_hex(8), turn, first))
        except EngineError as error:
            if error.code != UNKNOWN_TURN:
                raise
            return None
        assert isinstance(pages, Pages)
        return pages

    async def _export(self, hashed: bool) -> Exported | None:
        """None: nothing was ever committed to the session, or its log says all of it."""
        session = self._session
        if session.keyed:
            return None
        command = Export(
            secrets.token_hex(8),
            session.engine_id,
            session.record(),
            foreign=session.foreign,
            without=frozenset(self._there),
            hashed=hashed,
        )
        try:
            exported = await self._service.call(command)
        except EngineError as error:
            if error.code != UNKNOWN_SESSION:
                raise
            return None
        assert isinstance(exported, Exported)
        return exported

    async def _segments(self, segments: Sequence[SegmentBytes], hashed: bool) -> int:
        """Returns their bytes."""
        sending: list[asyncio.Task[Welcome]] = []
        try:
            for parcel in parcels(segments):
                if len(sending) == IN_FLIGHT:
                    await sending.pop(0)
                sent = Sent(self._session.key, self._migration, parcel, hashed)
                sending.append(asyncio.create_task(self._ask(sent)))
            while sending:
                await sending.pop(0)
        finally:
            for task in sending:
                task.cancel()
        self._there.update(segment.sha256 for segment in segments)
        return sum(len(segment.data) for segment in segments)

    async def _ask(self, message: ToDestination) -> Welcome:
        async with asyncio.timeout(SEND_SECONDS):
            answer = await self._send(self._destination, message)
        match answer:
            case Welcome():
                return answer
            case NotHere():
                raise NotMoved(f"replica {self._destination} is gone")
            case Refused(message=why):
                raise NotMoved(f"replica {self._destination} refuses it: {why}")

    async def _tell(self, message: Digests | NotComing) -> None:
        try:
            await self._ask(message)
        except (NotMoved, RayError, TimeoutError) as error:
            log.info("%s of session %s was not heard: %s", type(message).__name__, self._session.key, error)


def _digests(segments: Sequence[SegmentBytes]) -> tuple[tuple[bytes, bytes], ...]:
    return tuple((segment.sha256, hashlib.sha256(segment.data).digest()) for segment in segments)
