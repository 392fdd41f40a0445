"""Replicas of one application in one process: real directory, host stores and owners, calls instead of Ray's."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from ray.exceptions import RayActorError

from deployment.arrivals import Arrivals
from deployment.cluster.owned_sessions import OwnedSessions
from deployment.creating import Creating
from deployment.durable_copies import DurableCopies
from deployment.engine.commands import Command, Drop, DropStaged, Export, ExportPages, Foreign, Import
from deployment.engine.errors import UNKNOWN_SESSION, UNKNOWN_TURN, EngineError
from deployment.engine.events import Dropped, Event, Exported, Imported, Staged
from deployment.errors import Refused, RequestError, of_engine
from deployment.forking import Forking
from deployment.keeper import SessionKeeper
from deployment.moving import ToDestination, Welcome
from deployment.ownership.directory import Directory
from deployment.ownership.messages import (
    Bring,
    Claim,
    CopiesLost,
    FromDirectory,
    FromOwner,
    FromStore,
    Grant,
    Held,
    Image,
    Join,
    Known,
    Moved,
    Offer,
    Placed,
    Put,
    ToStore,
    Wait,
)
from deployment.ownership.registry import Registry
from deployment.ownership.store import Store
from deployment.ownership.words import Member, SessionKey
from deployment.session import Session
from deployment.session_log import LoggedTurn
from deployment.wire import NotHere
from model import DEMO
from model.tokenizer import Tokenizer
from state.container import Blob, seal, unseal
from state.errors import StateError
from state.session_record import SessionRecord
from tests.ownership.fake_storage import FakeStorage, FakeValues

UNIX = 1_790_000_000.0

Mail = Grant | Join | CopiesLost | Offer | Moved


def packed(record: SessionRecord, state: bool, payload: bytes = b"") -> bytes:
    return seal(pickle.dumps((record, state)), [payload], detached=False, key=None)


def unpacked(document: Blob) -> tuple[SessionRecord, bool]:
    return pickle.loads(unseal(document, key=None, demand_signature=False).manifest)


class FakeService:
    """An engine whose documents are just the record that was exported with them, and whether there is state."""

    tokenizer = Tokenizer.load(DEMO / "target")

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.broken: EngineError | None = None
        self.foreign: Foreign | None = None
        self.evicted: set[str] = set()
        self.exports: list[Export] = []
        self.before: Callable[[Command], Any] | None = None

    def evict(self, session: str) -> None:
        self.held.remove(session)
        self.evicted.add(session)

    def was_evicted(self, session: str) -> bool:
        return session in self.evicted

    async def call(self, command: Command) -> Event:
        if self.before is not None:
            await self.before(command)
        match command:
            case Export(record=record):
                self.exports.append(command)
                assert record is not None
                state = command.session in self.held and command.checkpoints and command.foreign is None
                if not state and not record.ledger:
                    raise EngineError(UNKNOWN_SESSION, "not here")
                document = packed(record, state)
                if not state:
                    return Exported(command.call, command.session, document, (), ())
                return Exported(command.call, command.session, document, ("turn_end",), (record.frontier,))
            case Import():
                if self.broken is not None:
                    raise self.broken
                record, state = unpacked(command.document)
                state = state and self.foreign is None
                self.held.discard(command.session)
                if state:
                    self.held.add(command.session)
                self.evicted.discard(command.session)
                frontiers = (record.frontier,) if state else ()
                return Imported(command.call, command.session, frontiers, record, self.foreign)
            case Drop():
                self.held.discard(command.session)
                return Dropped(command.call, command.session)
            case ExportPages():
                raise EngineError(UNKNOWN_TURN, "no turn runs here")
            case DropStaged():
                return Staged(command.call, command.migration, 0, 0)
            case _:
                raise AssertionError(command)


class InProcess:
    """`Cluster` and `Transport` of one replica. Once `dead`, nothing that it sends arrives, and nothing is answered."""

    def __init__(self, world: World, replica: str, node: str) -> None:
        self.node = node
        self.dead = False
        self._world = world
        self._replica = replica

    async def renew(self, reports: Sequence[Held | Grant]) -> Sequence[Mail] | None:
        if await self._loses("directory"):
            return None
        self._world.directory.renew(self._replica, self.node, reports, time.monotonic())
        mail = self._world.mail(self._replica)
        if not mail:
            await asyncio.sleep(0.05)
        return mail

    async def claim(self, claim: Claim) -> FromDirectory | None:
        if await self._loses("directory"):
            return None
        answer = self._world.directory.claim(claim, time.monotonic())
        return None if await self._loses("directory") else answer

    async def tell(self, messages: Sequence[FromOwner]) -> Sequence[Known | Moved] | None:
        if await self._loses("directory"):
            return None
        answers = [self._world.tell(message) for message in messages]
        return None if await self._loses("directory") else [answer for answer in answers if answer is not None]

    async def ask_store(self, member: Member, messages: Sequence[ToStore]) -> Sequence[FromStore] | None:
        if await self._loses(member.node):
            return None
        answers = self._world.ask(member, messages)
        return None if await self._loses(member.node) else answers

    async def tell_peer(self, replica: str, message: Offer | Moved) -> None:
        if not await self._loses(replica):
            self._world.relay(replica, message)

    async def stores(self) -> Sequence[Member] | None:
        await asyncio.sleep(1e9 if self.dead else 0)
        return self._world.registry.stores()

    async def locate(self, key: SessionKey) -> Placed | Wait | None:
        return self._world.directory.locate(key, time.monotonic())

    async def unowned(self, beginning: str) -> tuple[Placed, ...]:
        return self._world.directory.unowned(beginning, time.monotonic())

    async def images(self, member: Member, key: SessionKey) -> tuple[Image, ...]:
        store = self._world.stores.get(member.node)
        index = store.index() if store is not None else ()
        return next((ends.images for ends in index if ends.key == key), ())

    async def image(self, member: Member, image: Image, key: SessionKey) -> bytes:
        return bytes(self._world.stores[member.node].document(key, image.order)[1])

    async def _loses(self, to: str) -> bool:
        await asyncio.sleep(0)
        if self.dead:
            await asyncio.sleep(1e9)
        return to in self._world.away or self._world.loses()


class Replica:
    """`harm`: what becomes of a message of a migration on its way here; `deaf`: offers do not come."""

    def __init__(self, world: World, name: str, node: str, service: Any, arrival_seconds: float = 60.0) -> None:
        self.name = name
        self.service = service
        self.harm: Callable[[ToDestination], ToDestination] = lambda message: message
        self.deaf = False
        self.received: list[ToDestination] = []
        self.link = InProcess(world, name, node)
        self.arrivals = Arrivals(service, node, arrival_seconds)
        self._world = world
        durable = DurableCopies("app", self.service, None, 0)
        link: Any = self.link
        self.keeper = SessionKeeper(name, self.service, link, link, durable, self.arrivals, self._send)
        self.creating = Creating(self.service, self.keeper)
        self.forking = Forking(self.service, self.keeper, self.creating)
        self.told: list[LoggedTurn] = []

    @property
    def owned(self) -> OwnedSessions:
        return self.keeper._owned

    def start(self, resume: Callable[[Session, LoggedTurn], None] | None = None) -> None:
        self.keeper.start(resume or self._take_turn, lambda drain: None)

    async def _send(self, replica: str, message: ToDestination) -> Welcome | NotHere | Refused:
        other = self._world.replicas[replica]
        message = other.harm(message)
        if replica in self._world.away or other.link.dead or self.link.dead:
            raise RayActorError
        other.received.append(message)
        try:
            return await other.arrivals.receive(message)
        except RequestError as error:
            return error.refused
        except EngineError as error:
            return of_engine(error.code, error.message, error.param)

    def _take_turn(self, session: Session, turn: LoggedTurn) -> None:
        self.told.append(turn)


class World:
    """Replicas `a` and `b` on nodes `x` and `y`, in whose stores the copies lie. `away`: who cannot be reached;
    `loses`: whether the next message is lost."""

    def __init__(
        self,
        nodes: str = "xy",
        room: int = 1 << 30,
        service: Callable[[], Any] = FakeService,
        arrival_seconds: float = 60.0,
    ) -> None:
        self.loses: Callable[[], bool] = lambda: False
        self.away: set[str] = set()
        self.stores: dict[str, Store] = {}
        self.registry = Registry(FakeValues(), "app")
        self._mail: defaultdict[str, list[Mail]] = defaultdict(list)
        self._arenas = 0
        self.start_directory()
        for node in nodes:
            self.add_store(node, room)
        self.replicas = {
            name: Replica(self, name, node, service(), arrival_seconds)
            for name, node in zip("ab", (nodes * 2)[:2], strict=True)
        }

    def start(self) -> None:
        """From the event loop."""
        for replica in self.replicas.values():
            replica.start()

    def close(self) -> None:
        for replica in self.replicas.values():
            replica.keeper.close()

    def kill(self, name: str) -> None:
        """Its node says that the process has ended."""
        self.replicas[name].link.dead = True
        self.directory.replica_exited(name)

    def add_store(self, node: str, room: int) -> None:
        self._arenas += 1
        storage = FakeStorage(f"{self._arenas:032x}", room)
        self.registry.register(Member(node, storage.incarnation))
        self.stores[node] = Store(node, storage)
        assert self.directory.store_here(self.stores[node].member, (), time.monotonic())

    def lose_arenas(self) -> None:
        """All stores begin again with nothing."""
        for node in tuple(self.stores):
            self.add_store(node, 1 << 30)

    def start_directory(self) -> None:
        self.directory = Directory(self.registry, UNIX, time.monotonic())
        self.directory.durable_ids(())
        for store in self.stores.values():
            assert self.directory.store_here(store.member, store.index(), time.monotonic())

    def relay(self, replica: str, message: Offer | Moved) -> None:
        if not (self.replicas[replica].deaf and isinstance(message, Offer)):
            self._mail[replica].append(message)

    def mail(self, replica: str) -> list[Mail]:
        now = time.monotonic()
        for node, store in self.stores.items():
            if node not in self.away:
                self.directory.store_alive(store.member, now)
        for name, message in self.directory.reconcile(now):
            self._mail[name].append(message)
        return self._mail.pop(replica, [])

    def tell(self, message: FromOwner) -> Known | Moved | None:
        return self.directory.told(message, time.monotonic())

    def ask(self, member: Member, messages: Sequence[ToStore]) -> list[FromStore] | None:
        store = self.stores[member.node]
        if store.member != member:
            return None
        return [store.answer(self._brought(message)) for message in messages]

    def _brought(self, message: ToStore) -> ToStore:
        if not isinstance(message, Bring):
            return message
        try:
            frontiers, document = self.stores[message.source.node].document(message.key, message.order)
        except StateError:
            frontiers, document = (), b""
        return Put(message.key, message.epoch, message.order, frontiers, bytes(document))
