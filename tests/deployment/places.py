"""Two replicas with engines of the demo model in one process, and turns that run there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from deployment.engine.commands import Sampling
from deployment.engine.service import EngineService
from deployment.held_turn import HeldTurn, call_later
from deployment.ownership.words import Order, SessionKey
from deployment.prompting import Prompter
from deployment.session import Session
from deployment.turn_desk import TurnDesk
from deployment.turn_table import TurnTable
from deployment.turns import full_history
from deployment.wire import Delta, Movement, Opened, Route, TurnEvent, TurnRequest
from tests.deployment.in_process import Replica, World
from tests.engine.driving import alone, models, options

KEY = SessionKey("t" * 64, "s")
TURN = f"{7:032x}"


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


def _time() -> float:
    """What turns go by. A test may put it forward; what leases go by runs on."""
    return time.time()


class Place:
    """A replica with an engine, and turns that begin there."""

    def __init__(self, world: World, replica: Replica) -> None:
        self.replica = replica
        self.service: EngineService = replica.service
        self.keeper = replica.keeper
        self.arrivals = replica.arrivals
        self._world = world
        self.desk = TurnDesk(
            replica.name, "m", self.service, self.keeper, Prompter(self.service, accept_new_weights=False),
            TurnTable(_time), 30.0, call_later, _time,
        )  # fmt: skip
        replica.start(self.desk.resume)

    async def begin(self, request: TurnRequest) -> HeldTurn:
        held = await self.desk.take(Route("x"), request)
        assert isinstance(held, HeldTurn)
        return held

    @property
    def session(self) -> Session:
        held = self.keeper.held(KEY)
        assert held is not None, f"{self.replica.name} does not own the session"
        return held

    async def move(self, to: Place) -> Movement | None:
        return await self.keeper.move(self.session, to.replica.name)

    async def turn(self) -> HeldTurn:
        """The session's turn, once it is here."""
        found = await self.desk.find(Route("x"), KEY, TURN)
        assert isinstance(found, HeldTurn)
        return found

    def die(self) -> None:
        """Nothing comes from here any more, and its node says so."""
        self._world.kill(self.replica.name)


@asynccontextmanager
async def places(
    arrival_seconds: float = 60.0, service: Callable[[], EngineService] | None = None, **more: Any
) -> AsyncIterator[tuple[World, tuple[Place, Place]]]:
    """Two replicas on one node. `service`: makes their engines; by default those of the demo."""

    def engine() -> EngineService:
        return EngineService(models("dflash2"), options("dflash2", lanes=2, images=8, **more))

    world = World("x", service=service or engine, arrival_seconds=arrival_seconds)
    a, b = (Place(world, replica) for replica in world.replicas.values())
    try:
        yield world, (a, b)
    finally:
        world.close()
        await asyncio.gather(*(asyncio.to_thread(place.service.close) for place in (a, b)))


def images(world: World) -> set[Order]:
    """Those that the stores have, by their records."""
    ends = [end for store in world.stores.values() for end in store.index()]
    return {image.order for end in ends for image in end.images}


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
