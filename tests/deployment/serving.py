"""The HTTP interface with the demo model behind it, in this process: the real routes, replica and engine, without Ray.

What is left out is what lies between ingress and replica, which `tests/e2e` has.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from ray import serve

from deployment.draining import Drainer
from deployment.engine.service import EngineService
from deployment.held_turn import call_later
from deployment.ingress import Ingress, api
from deployment.keyed_expiry import KeyedExpiry
from deployment.last_call import LastCall
from deployment.metrics.measured import Room
from deployment.ownership.messages import Placed
from deployment.prompting import Prompter
from deployment.replica import EngineReplica
from deployment.replica_watch import ReplicaWatch
from deployment.session_desk import SessionDesk
from deployment.settings import AppArgs
from deployment.state_limit import StateLimit
from deployment.turn_desk import TurnDesk
from deployment.turn_table import TurnTable
from deployment.wire import Route
from tests.deployment.in_process import FakeService, World
from tests.engine.driving import models, options


@dataclass(frozen=True)
class Served:
    """A server, and the replica behind it, which runs in the server's thread."""

    url: str
    replica: EngineReplica


@contextlib.contextmanager
def serving(
    service: EngineService | None = None, args: AppArgs | None = None, kept: int | None = None, **more: Any
) -> Iterator[str]:
    """The URL of a server with one replica. `service`: its engine, which stays its owner's, or else one of the demo
    model, with `more` options. `args`: what its ingress is told. `kept`: bytes that every tenant's
    sessions keep, and the limit of them; None: there is none."""
    with served(service, args, kept, **more) as server:
        yield server.url


@contextlib.contextmanager
def served(
    service: EngineService | None = None, args: AppArgs | None = None, kept: int | None = None, **more: Any
) -> Iterator[Served]:
    """The same, for who looks behind it."""
    engine = service or _engine(**more)
    world = World("x", service=iter([engine, FakeService()]).__next__)
    replica = _replica(world, kept)
    ingress = _ingress(world, replica, args or AppArgs())
    with socket.create_server(("127.0.0.1", 0)) as listening, pytest.MonkeyPatch.context() as patch:
        # FastAPI's routes of Serve ask for the object whose methods they are.
        patch.setattr(serve, "get_replica_context", lambda: SimpleNamespace(servable_object=ingress))
        server = uvicorn.Server(uvicorn.Config(api, log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            yield Served(f"http://127.0.0.1:{listening.getsockname()[1]}", replica)
        finally:
            server.should_exit = True
            thread.join(20)
            if service is None:
                engine.close()


def _engine(**more: Any) -> EngineService:
    return EngineService(models("dflash2"), options("dflash2", **{"lanes": 4, "images": 16, **more}))


def _replica(world: World, kept: int | None) -> EngineReplica:
    """As its constructor makes it, but in a world without Ray. It starts with its first request."""
    a = world.replicas["a"]
    replica = EngineReplica.__new__(EngineReplica)
    replica._id, replica._model, replica._service, replica._keeper = "a", "demo", a.service, a.keeper
    replica._lanes, replica._store_bytes, replica._started, replica._turns = 4, 4096, False, TurnTable()
    replica._prompter = Prompter(a.service, accept_new_weights=False)
    replica._state_limit = StateLimit(kept, _Kept(kept).by, a.keeper.copies.make_room_of)
    replica._drainer = Drainer("a", a.keeper)
    replica._sessions = SessionDesk("a", a.keeper, a.creating, a.forking, replica._state_limit, replica._turns)
    replica._cluster = _Cluster(world)  # pyright: ignore
    replica._keyed = KeyedExpiry(a.keeper, a.link, 1 << 20)
    replica._arrivals = a.arrivals
    replica._desk = TurnDesk(
        "a", "demo", a.service, a.keeper, replica._prompter, replica._turns, 30.0, call_later
    )  # fmt: skip
    return replica


def _ingress(world: World, replica: EngineReplica, args: AppArgs) -> Any:
    ingress: Any = object.__new__(Ingress.__bases__[0])  # the class that Serve has wrapped
    ingress.connect(_Replicas(replica), _Cluster(world), args, LastCall(_never, 1.0))
    return ingress


async def _never() -> bool:
    return False


async def _lost(replica: str) -> bool:
    return False


class _Kept:
    def __init__(self, kept: int | None) -> None:
        self._kept = kept

    async def by(self, tenant: str) -> int | None:
        return self._kept


class _Cluster:
    """What ingress and replica ask of it."""

    node = "x"

    def __init__(self, world: World) -> None:
        self._world = world
        self.locate = world.replicas["a"].link.locate

    async def sessions(self, tenant: str) -> tuple[Placed, ...]:
        return self._world.directory.sessions(tenant, time.monotonic())

    async def staying(self, beside: str) -> tuple[str, ...]:
        return tuple(name for name in ("a",) if name != beside)

    async def with_room(self, beside: str) -> None:
        return None

    async def room(self, node: str) -> Room:
        return Room(4096, 64)


class _Replicas:
    """Of the one that there is."""

    def __init__(self, replica: EngineReplica) -> None:
        self._replica = replica
        self.watch = ReplicaWatch(_lost)

    async def ask(self, method: str, route: Route, *args: Any) -> Any:
        self._replica._start()
        await asyncio.sleep(0)
        return await getattr(self._replica, method)(route, *args)

    ask_here = ask

    async def ask_any(self, method: str, affinity: str, *args: Any) -> Any:
        return await self.ask(method, Route(affinity), *args)

    async def told(self, method: str, route: Route, *args: Any) -> AsyncGenerator[Any, None]:
        async with contextlib.aclosing(getattr(self._replica, method)(route, *args)) as answers:
            async for answer in answers:
                yield answer

    async def lost(self, replica: str | None) -> None: ...

    async def all(self) -> list[Any]:
        return [await self._replica.info()]

    async def measured(self) -> list[Any]:
        return [await self._replica.measured()]

    async def answering(self) -> int:
        return len(await self.measured())
