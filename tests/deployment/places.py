"""Replicas without Ray: real engines, keepers and ownership machines in one process, and one store for all of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from ray.exceptions import RayActorError

from deployment.arrivals import Arrivals
from deployment.cluster.directory_actor import Mail
from deployment.cluster.transport import Cluster
from deployment.draining import Drainer
from deployment.durable_copies import DurableCopies
from deployment.engine.messages import Sampling
from deployment.engine.service import EngineService
from deployment.errors import Refused, RequestError, of_engine
from deployment.held_turn import HeldTurn, call_later
from deployment.keeper import SessionKeeper
from deployment.moving import ToDestination, Welcome
from deployment.ownership.directory import Directory
from deployment.ownership.messages import (
    Claim,
    Found,
    FromDirectory,
    FromOwner,
    FromStore,
    Grant,
    Held,
    Image,
    Joined,
    Moved,
    Offer,
    Placed,
    Silent,
    ToStore,
    Wait,
)
from deployment.ownership.registry import Registry
from deployment.ownership.store import Store
from deployment.ownership.words import Member, SessionKey
from deployment.prompting import Prompter
from deployment.session import Session
from deployment.turn_desk import TurnDesk
from deployment.turn_table import TurnTable
from deployment.turns import full_history
from deployment.wire import Delta, NotHere, Opened, Route, TurnEvent, TurnRequest
from tests.engine.driving import alone, models, options
from tests.ownership.fake_storage import FakeStorage, FakeValues

KEY = SessionKey("t" * 64, "s")
TURN = f"{7:032x}"
NODE = "node"


LONG = "Count from 3 in steps of 2, 12 numbers. " * 6
"""More than a page."""


def asked(tokens: int = 48, prompt: str = LONG, **fields: Any) -> TurnRequest:
    """A turn of the session, sampled."""
    how = {"temperature": 0.9, "top_k": 0, "top_p": 1.0, "seed": 11, "ignore_eos": True, **fields}
    messages = ({"role": "user", "content": prompt},)
    return TurnRequest(TURN, "history", messages, KEY, max_tokens=tokens, tenant=KEY.tenant, **how)


def undisturbed(request: TurnRequest) -> tuple[int, ...]:
    """The ids of a turn that an engine of its own runs."""
    assert request.max_tokens and request.temperature is not None
    loaded = models("dflash2")
    ids = full_history(loaded.chat_template, loaded.tokenizer, request.messages).ids
    sampling = Sampling(temperature=request.temperature, seed=request.seed or 0)
    return alone(ids, request.max_tokens, sampling, "dflash2").token_ids


class World:
    def __init__(self) -> None:
        registry = Registry(FakeValues(), "app")
        self.store = Store(NODE, FakeStorage("a" * 32))
        registry.register(self.store.member)
        self.directory = Directory(registry, 1_790_000_000.0, time.monotonic())
        self.directory.durable_ids(())
        self.directory.store_here(self.store.member, (), time.monotonic())
        self.places: dict[str, Place] = {}
        self.mail: dict[str, list[Mail]] = {}
        self.fetched: list[Image] = []
        """Images that somebody read from the store."""

    def post(self, replica: str, message: Mail) -> None:
        self.mail.setdefault(replica, []).append(message)

    def reconcile(self) -> None:
        for replica, message in self.directory.reconcile(time.monotonic()):
            self.post(replica, message)


class PlaceCluster:
    """See `deployment.cluster.transport.Cluster`."""

    def __init__(self, world: World) -> None:
        self.node = NODE
        self._world = world

    async def locate(self, key: SessionKey) -> Placed | Wait | None:
        return self._world.directory.locate(key, time.monotonic())

    async def image(self, member: Member, image: Image, key: SessionKey) -> bytes:
        self._world.fetched.append(image)
        return bytes(self._world.store.document(key, image.order)[1])


class PlaceTransport:
    """See `Transport`. Nothing reaches a replica that is dead, or comes from there."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name

    @property
    def _alive(self) -> bool:
        return self._name in self._world.places

    async def renew(self, reports: Sequence[Held | Grant]) -> Sequence[Mail] | None:
        if not self._alive:
            return None
        now = time.monotonic()
        self._world.directory.store_alive(self._world.store.member, now)
        self._world.directory.renew(self._name, NODE, reports, now)
        self._world.reconcile()
        await asyncio.sleep(0.05)
        return self._world.mail.pop(self._name, ())

    async def claim(self, claim: Claim) -> FromDirectory | None:
        return self._world.directory.claim(claim, time.monotonic()) if self._alive else None

    async def tell(self, messages: Sequence[FromOwner]) -> bool:
        now = time.monotonic()
        for message in messages if self._alive else ():
            match message:
                case Held():
                    self._world.directory.hold(message)
                case Silent():
                    self._world.directory.silence(message, now)
                case Found():
                    self._world.directory.found(message, now)
                case Joined():
                    self._world.directory.joined(message, now)
        self._world.reconcile()
        return self._alive

    async def ask_store(self, member: Member, messages: Sequence[ToStore]) -> Sequence[FromStore] | None:
        await asyncio.sleep(0)
        return [self._world.store.answer(message) for message in messages] if self._alive else None

    async def tell_peer(self, replica: str, message: Offer | Moved) -> None:
        place = self._world.places.get(replica)
        if self._alive and place is not None and not place.deaf:
            self._world.post(replica, message)


class Place:
    """A replica. `deaf`: offers do not reach it; `harm`: what becomes of a message on its way to it."""

    def __init__(self, world: World, name: str, arrival_seconds: float = 60.0, **more: Any) -> None:
        self.name = name
        self.deaf = False
        self.harm: Callable[[ToDestination], ToDestination] = lambda message: message
        self.received: list[ToDestination] = []
        self._world = world
        self.service = EngineService(models("dflash2"), options("dflash2", lanes=2, images=8, **more))
        self.arrivals = Arrivals(self.service, NODE, arrival_seconds)
        cluster = cast(Cluster, PlaceCluster(world))
        transport = PlaceTransport(world, name)
        durable = DurableCopies("app", self.service, None, 0)
        self.keeper = SessionKeeper(name, self.service, cluster, transport, durable, self.arrivals, self._send)
        self.table = TurnTable()
        self.desk = TurnDesk(
            name, "m", self.service, self.keeper, Prompter(self.service, accept_new_weights=False), self.table, 30.0,
            call_later,
        )  # fmt: skip
        self.drainer = Drainer(self.keeper)
        world.places[name] = self
        self.keeper.start(self.desk.resume, self.drainer.told)

    async def _send(self, replica: str, message: ToDestination) -> Welcome | NotHere | Refused:
        place = self._world.places.get(replica)
        if place is None or self.name not in self._world.places:
            raise RayActorError
        message = place.harm(message)
        if replica not in self._world.places:
            raise RayActorError
        place.received.append(message)
        try:
            return await place.arrivals.receive(message)
        except RequestError as error:
            return error.refused
        except Exception as error:
            return of_engine(getattr(error, "code", "internal_error"), str(error), None)

    async def begin(self, request: TurnRequest) -> HeldTurn:
        held = await self.desk.take(Route("x"), request)
        assert isinstance(held, HeldTurn)
        return held

    @property
    def session(self) -> Session:
        held = self.keeper.held(KEY)
        assert held is not None, f"{self.name} does not own the session"
        return held

    async def move(self, to: Place) -> Any:
        return await self.keeper.move(self.session, to.name)

    async def turn(self) -> HeldTurn:
        """The session's turn, once it is here."""
        found = await self.desk.find(Route("x"), KEY, TURN)
        assert isinstance(found, HeldTurn)
        return found

    def die(self) -> None:
        """Nothing comes from here any more, and its node says so."""
        del self._world.places[self.name]
        self.keeper.close()
        self._world.directory.replica_exited(self.name)
        self._world.reconcile()


@asynccontextmanager
async def places(*names: str, **more: Any) -> AsyncIterator[tuple[World, list[Place]]]:
    world = World()
    made = [Place(world, name, **more) for name in names]
    try:
        yield world, made
    finally:
        for place in made:
            place.keeper.close()
        await asyncio.gather(*(asyncio.to_thread(place.service.close) for place in made))


def run(steps: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(60):
            await steps()

    asyncio.run(within())


async def told(held: HeldTurn, tokens: int | None = None) -> list[TurnEvent]:
    """A turn's events from its first one on, to its end or so many tokens."""
    events: list[TurnEvent] = []
    async for one in held.read():
        events.append(one.event)
        if tokens is not None and len(ids_of(events)) >= tokens:
            break
    return events


def ids_of(events: Sequence[TurnEvent]) -> tuple[int, ...]:
    return tuple(token for event in events if isinstance(event, Delta) for token in event.token_ids)


def opened(events: Sequence[TurnEvent]) -> Opened:
    first = events[0]
    assert isinstance(first, Opened), first
    return first
