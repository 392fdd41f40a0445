"""A replica's way to the durable tier: its sessions go there at each turn's end, and come from there when no copy that
counts is left anywhere else.

The state of such a session may be older than what was published. It may be used where nothing was published since, as
in a new cluster (`continues`); or where a full history says what was; or where the client accepts it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from deployment.cluster.names import GcsValues, versioned
from deployment.engine.commands import Publish
from deployment.engine.durability import open_tier
from deployment.engine.errors import EngineError
from deployment.engine.events import Publishing, Stored
from deployment.engine.service import EngineService
from deployment.keyed_turns import is_keyed
from deployment.locks import Locks
from deployment.ownership.registry import KeyValues, Registry
from deployment.ownership.words import Epoch, Order, SessionKey
from deployment.publication_orders import published_as
from deployment.session import Session
from deployment.whole_documents import SLICE_BYTES
from state.durable import DurableTier
from state.errors import StateError
from state.names import key_digest
from state.publication_policy import PublicationPolicy

IDLE_CHECK_SECONDS = 1.0

log = logging.getLogger("ray.serve")


@dataclass(frozen=True)
class Found:
    """A session in the durable tier, whose segments stay there while this is held. `continues`: nothing that was
    published can be missing in it."""

    order: Order
    document: bytes
    continues: bool


class DurableCopies:
    """Does nothing where `place` is None."""

    def __init__(
        self,
        app: str,
        service: EngineService,
        place: str | None,
        budget: int,
        values: KeyValues | None = None,
        clock: Callable[[], float] = time.monotonic,
        key_env: str | None = None,
    ) -> None:
        """Raises StateError for a place that cannot be opened."""
        self._app = app
        self._service = service
        self._tier: DurableTier | None = open_tier(place, budget, key_env) if place is not None else None
        self._values = values
        self._clock = clock
        self._policy = PublicationPolicy()
        self._published: dict[SessionKey, tuple[Order, int]] = {}
        self._on_the_way: dict[tuple[SessionKey, Order], int] = {}
        """Where each session stood that is written with its state."""
        self._publishing = Locks()
        self._written: dict[SessionKey, tuple[tuple[str, int], ...]] = {}

    def start(self) -> None:
        """From the replica's event loop."""
        if self._tier is not None:
            self._service.when_stored(self._stored)

    # -------------------------------------------------------------------------------------------- there

    def turn_began(self, key: SessionKey) -> None:
        if self._keeps(key):
            self._policy.turn_began(key)

    async def turn_ended(self, session: Session) -> None:
        """Its record and ledger go there now; its state, where that is due."""
        if self._keeps(session.key):
            due = self._policy.turn_ended(session.key, session.frontier, self._clock())
            await self._publish(session, record_alone=not due)

    async def publish_idle(self, held: Callable[[SessionKey], Session | None]) -> None:
        """The state of sessions that rest. To be called every second."""
        for key in self._policy.due(self._clock()):
            session = held(key)
            if session is None:
                self.forget(key)
            elif session.free:
                await self._publish(session, record_alone=False)
                if session.free:  # else its turn will have its end
                    self._policy.turn_ended(key, session.frontier, self._clock())  # if it fails, again after a while

    async def delete(self, key: SessionKey, epoch: Epoch) -> None:
        """Raises StateError if the store fails: then the session may come back from there."""
        if self._tier is not None and self._keeps(key):
            await asyncio.to_thread(self._tier.delete, key, epoch)
        self.forget(key)

    def forget(self, key: SessionKey) -> None:
        """Another replica has the session now."""
        self._policy.forget(key)
        self._published.pop(key, None)
        self._written.pop(key, None)

    def checkpoints(self, key: SessionKey) -> tuple[tuple[str, int], ...]:
        """Kind and frontier of those that were written last from here. The tier may have let go of them since."""
        return self._written.get(key, ())

    def _keeps(self, key: SessionKey) -> bool:
        """A turn that belongs to no session outlives its replica, and not its cluster."""
        return self._tier is not None and not is_keyed(key)

    async def _publish(self, session: Session, record_alone: bool) -> None:
        async with self._publishing.of(session.key):
            order = self._next_order(session)
            if not record_alone:
                self._on_the_way[session.key, order] = session.frontier
            record, foreign = session.record(), session.foreign
            publish = Publish(
                "", session.engine_id, session.key, order, record, foreign, record_alone, slice_bytes=SLICE_BYTES
            )
            mine = self._published[session.key]
            try:
                while not (await self._asked(publish)).whole:
                    # What left meanwhile has no state here any more; its record alone would be newer than its state.
                    if self._published.get(session.key) is not mine:
                        self._on_the_way.pop((session.key, order), None)
                        return
            except EngineError as error:
                self._on_the_way.pop((session.key, order), None)
                log.warning("session %s was not made durable: %s", session.key, error)
            except BaseException:
                self._on_the_way.pop((session.key, order), None)
                raise

    async def _asked(self, publish: Publish) -> Publishing:
        answer = await self._service.call(replace(publish, call=secrets.token_hex(8)))
        assert isinstance(answer, Publishing)
        return answer

    def _next_order(self, session: Session) -> Order:
        logged = Order(session.epoch, session.order)
        last, number = self._published.get(session.key, (None, 0))
        number = number + 1 if last == logged else 0
        self._published[session.key] = logged, number
        return published_as(logged, number)

    def _stored(self, event: Stored) -> None:
        frontier = self._on_the_way.pop((event.key, event.order), None)
        if event.outcome != "published" or event.key not in self._published:
            return
        self._written[event.key] = event.checkpoints
        if frontier is not None and event.payload:
            self._policy.written(event.key, frontier, max((at for _, at in event.checkpoints), default=0))

    # -------------------------------------------------------------------------------------------- and back

    @asynccontextmanager
    async def found(self, key: SessionKey, begun: Epoch | None = None) -> AsyncGenerator[Found | None, None]:
        """The newest whole publication; None if there is none, or the store cannot say. `begun`: the epoch under which
        somebody began to bring the session back, and was cut off before it could be continued."""
        if self._tier is None:
            yield None
            return
        reading = self._tier.reading(key)
        try:
            opened = await asyncio.to_thread(reading.__enter__)
        except StateError as error:
            log.warning("the durable tier cannot be read: %s", error)
            yield None
            return
        try:
            if opened is None:
                yield None
            else:
                order = opened.publication.order
                yield Found(order, opened.document, await asyncio.to_thread(self._continues, key, order, begun))
        finally:
            await asyncio.to_thread(reading.__exit__, None, None, None)

    async def has(self, key: SessionKey) -> bool:
        """Whether there is a whole publication of a session."""
        async with self.found(key) as found:
            return found is not None

    async def taken(self, key: SessionKey, epoch: Epoch) -> None:
        """A session is brought back, and turns may follow: what lies in the tier is not the newest for ever."""
        await asyncio.to_thread(self._registry.note_restored, key_digest(key), epoch)

    def _continues(self, key: SessionKey, order: Order, begun: Epoch | None) -> bool:
        """Of a session that this cluster never had, or only began to bring back, nothing can have been published
        since."""
        registry = self._registry
        restored = registry.restored_under(key_digest(key))
        never_had = restored is None or (begun is not None and restored >= begun)
        return order.epoch.incarnation < registry.first_incarnation() and never_had

    @property
    def _registry(self) -> Registry:
        return Registry(GcsValues() if self._values is None else self._values, versioned(self._app))
