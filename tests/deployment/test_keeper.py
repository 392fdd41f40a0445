"""How a replica gets, gives, loses and copies sessions, with the real directory and host store and no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgpack
import numpy as np
import pytest

from deployment.directory import Directory
from deployment.engine.errors import BAD_STATE, UNKNOWN_SESSION, EngineError
from deployment.engine.messages import Command, Drop, Dropped, Event, Export, Exported, Import, Imported
from deployment.errors import Refused, RequestError
from deployment.host_store import HostStore, Image, Receipt
from deployment.keeper import SessionKeeper
from deployment.ownership import Conflict, Copy, Epoch, Grant, Placement, SessionKey
from deployment.session import Session
from deployment.wire import HandedOver, NotHere

KEY = SessionKey("t" * 64, "one")


class FakeService:
    """An engine whose checkpoints are just the record that was exported with them."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.broken = False
        self.evicted: set[str] = set()

    def evict(self, session: str) -> None:
        del self.held[session]
        self.evicted.add(session)

    def was_evicted(self, session: str) -> bool:
        return session in self.evicted

    async def call(self, command: Command) -> Event:
        match command:
            case Export():
                if command.session not in self.held:
                    raise EngineError(UNKNOWN_SESSION, "not here")
                self.held[command.session] = bytes(msgpack.packb(command.record) or b"")
                blobs = (self.held[command.session],)
                return Exported(command.call, command.session, blobs, ("turn_end",), (command.record["frontier"],))
            case Import():
                if self.broken:
                    raise EngineError(BAD_STATE, "planes disagree")
                self.held[command.session] = command.blobs[-1]
                self.evicted.discard(command.session)
                record = msgpack.unpackb(command.blobs[-1])
                return Imported(command.call, command.session, (record["frontier"],), record)
            case Drop():
                self.held.pop(command.session, None)
                return Dropped(command.call, command.session)
            case _:
                raise AssertionError(command)


class FakeCluster:
    """Directory and one host store, without actors."""

    def __init__(self) -> None:
        self.directory = Directory(7)
        self.store = HostStore(1 << 20, lambda blob: None)

    async def locate(self, key: SessionKey) -> Placement | None:
        return self.directory.locate(key)

    async def claim(self, key: SessionKey, replica: str, expected: Epoch | None) -> Grant | Conflict:
        return self.directory.claim(key, replica, expected, 1.0)

    async def abandon(self, key: SessionKey, epoch: Epoch) -> None:
        self.directory.abandon(key, epoch)

    async def seal(self, key: SessionKey, epoch: Epoch) -> HandedOver | None:
        held = self.store.seal(key, epoch)
        if held is None:
            return None
        blobs = tuple(np.frombuffer(image.blob, np.uint8) for image in held.images)
        return HandedOver(held.epoch, ("turn_end",) * len(blobs), (held.frontier,) * len(blobs), blobs)

    async def put(self, key: SessionKey, owner: str, order: int, state: HandedOver) -> Receipt:
        images = tuple(
            Image(kind, frontier, blob.tobytes())
            for kind, frontier, blob in zip(state.kinds, state.frontiers, state.blobs, strict=True)
        )
        receipt = self.store.put(key, owner, state.epoch, order, images)
        if receipt.accepted:
            self.directory.record_copy(key, Copy("node", state.epoch, order, max(state.frontiers)), 1.0)
        return receipt


class FakePeers:
    """Hands calls to the keepers of a test; one that is not there is dead."""

    def __init__(self) -> None:
        self.alive: dict[str, SessionKeeper] = {}

    async def hand_over(self, placement: Placement) -> HandedOver | NotHere | Refused:
        keeper = self.alive.get(placement.owner or "")
        return await keeper.give(placement.key, placement) if keeper else NotHere(placement.owner or "")

    async def release(self, placement: Placement) -> None:
        keeper = self.alive.get(placement.owner or "")
        if keeper:
            await keeper.release(placement.key, placement)


class World:
    """Replicas `a` and `b` of one application."""

    def __init__(self) -> None:
        self.cluster, self.peers = FakeCluster(), FakePeers()
        self.service = {name: FakeService() for name in "ab"}
        self.keeper = {
            name: SessionKeeper(name, self.service[name], self.cluster, self.peers)  # pyright: ignore[reportArgumentType]
            for name in "ab"
        }
        self.peers.alive = dict(self.keeper)

    async def get(self, name: str, must_exist: bool = False) -> tuple[Session, str]:
        return await self.keeper[name].acquire(KEY, self.cluster.directory.locate(KEY), must_exist=must_exist)

    async def turn(self, name: str, *ledger: int) -> Session:
        """A turn at replica `name`, as far as a keeper sees one."""
        session, _ = await self.get(name)
        session.ledger, session.frontier = ledger, len(ledger) - 1
        self.service[name].held[session.engine_id] = b""
        await self.keeper[name].copy(session, ("turn_end",))
        return session


def run(steps: Coroutine[Any, Any, None]) -> None:
    asyncio.run(steps)


def test_unknown_session_is_made_or_refused():
    async def steps() -> None:
        world = World()
        with pytest.raises(RequestError) as caught:
            await world.get("a", must_exist=True)
        assert caught.value.refused.status == 404
        _, hit = await world.get("a")
        assert hit == "none"

    run(steps())


def test_living_owner_hands_over_and_forgets():
    async def steps() -> None:
        world = World()
        first = await world.turn("a", 1, 2, 3)
        session, hit = await world.get("b")
        assert (hit, session.ledger) == ("peer", (1, 2, 3)) and session.epoch > first.epoch
        assert world.keeper["a"].held(KEY) is None and world.service["a"].held == {}
        copies = world.cluster.directory.locate(KEY)
        assert copies is not None and copies.owner == "b" and copies.copies[0].epoch == session.epoch

    run(steps())


def test_living_owner_is_believed_before_the_host_store():
    async def steps() -> None:
        world = World()
        session = await world.turn("a", 1, 2, 3)
        # A turn whose Host replica could not be written.
        session.ledger, session.frontier = (1, 2, 3, 4, 5), 4
        moved, hit = await world.get("b")
        assert (hit, moved.ledger) == ("peer", (1, 2, 3, 4, 5))

    run(steps())


def test_dead_owners_session_comes_from_the_host_store():
    async def steps() -> None:
        world = World()
        await world.turn("a", 1, 2, 3)
        del world.peers.alive["a"]
        session, hit = await world.get("b")
        assert (hit, session.ledger) == ("host", (1, 2, 3))

    run(steps())


def test_owner_that_was_given_up_for_dead_cannot_write_and_forgets():
    async def steps() -> None:
        world = World()
        stale = await world.turn("a", 1, 2, 3)
        del world.peers.alive["a"]
        await world.turn("b", 1, 2, 3, 4, 5)
        stale.ledger, stale.frontier = (1, 2, 3, 9, 9, 9), 5
        with pytest.raises(RequestError) as caught:
            await world.keeper["a"].copy(stale, ("turn_end",))
        assert (caught.value.refused.status, caught.value.refused.code) == (409, "session_moved")
        assert world.keeper["a"].held(KEY) is None
        session, _ = await world.get("a")
        assert session.ledger == (1, 2, 3, 4, 5)

    run(steps())


def test_replica_learns_from_a_request_that_it_lost_the_session():
    async def steps() -> None:
        world = World()
        await world.turn("a", 1, 2, 3)
        asleep = world.peers.alive.pop("a")
        await world.turn("b", 1, 2, 3, 4, 5)
        world.peers.alive["a"] = asleep
        session, hit = await world.get("a")
        assert (hit, session.ledger) == ("peer", (1, 2, 3, 4, 5))

    run(steps())


def test_running_turn_keeps_its_session_where_it_is():
    class Turn:
        id, abandoned = "turn-1", False

    async def steps() -> None:
        world = World()
        session = await world.turn("a", 1, 2, 3)
        session.running = Turn()  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(RequestError) as caught:
            await world.get("b")
        assert caught.value.refused.code == "session_busy"
        placement = world.cluster.directory.locate(KEY)
        assert placement is not None and (placement.owner, placement.epoch) == ("a", session.epoch)

    run(steps())


def test_session_that_is_being_moved_takes_no_turn():
    async def steps() -> None:
        world = World()
        session = await world.turn("a", 1, 2, 3)
        placement = world.cluster.directory.locate(KEY)
        assert placement is not None
        assert isinstance(await world.keeper["a"].give(KEY, placement), HandedOver)
        assert not await world.keeper["a"].idle(session)

    run(steps())


def test_state_that_cannot_be_loaded_is_an_error_now_and_tried_again_later():
    async def steps() -> None:
        world = World()
        await world.turn("a", 1, 2, 3)
        del world.peers.alive["a"]
        world.service["b"].broken = True
        with pytest.raises(RequestError) as caught:
            await world.get("b")
        assert caught.value.refused.status == 503 and "planes disagree" in caught.value.refused.message
        world.service["b"].broken = False
        session, hit = await world.get("b")
        assert (hit, session.ledger) == ("host", (1, 2, 3))

    run(steps())


def test_session_whose_copies_are_all_gone_is_lost_and_not_empty():
    async def steps() -> None:
        world = World()
        await world.turn("a", 1, 2, 3)
        del world.peers.alive["a"]
        world.cluster.store = HostStore(1 << 20, lambda blob: None)
        session, hit = await world.get("b")
        assert session.lost and hit == "none"

    run(steps())


def test_session_that_the_device_did_not_keep_comes_back_from_the_host_store():
    async def steps() -> None:
        world = World()
        session = await world.turn("a", 1, 2, 3)
        del world.service["a"].held[session.engine_id]
        await world.keeper["a"].bring_back(session)
        assert session.engine_id in world.service["a"].held
        world.cluster.store = HostStore(1 << 20, lambda blob: None)
        with pytest.raises(RequestError) as caught:
            await world.keeper["a"].bring_back(session)
        assert caught.value.refused.status == 503

    run(steps())


def test_evicted_session_is_brought_back_for_its_next_turn_but_not_under_a_running_one():
    async def steps() -> None:
        world = World()
        session = await world.turn("a", 1, 2, 3)
        service = world.service["a"]
        service.evict(session.engine_id)
        session.running = object()  # pyright: ignore[reportAttributeAccessIssue]
        await world.get("a")
        assert service.held == {}
        session.running = None
        assert await world.get("a") == (session, "device")
        assert session.engine_id in service.held and not service.evicted

    run(steps())


def test_evicted_session_without_a_copy_keeps_its_ledger_and_is_prefilled():
    async def steps() -> None:
        world = World()
        session = await world.turn("a", 1, 2, 3)
        world.service["a"].evict(session.engine_id)
        world.cluster.store = HostStore(1 << 20, lambda blob: None)
        again, _ = await world.get("a")
        assert again is session and again.ledger == (1, 2, 3) and world.service["a"].held == {}

    run(steps())


def test_two_replicas_that_want_a_dead_owners_session_end_with_one_owner():
    async def steps() -> None:
        world = World()
        await world.turn("a", 1, 2, 3)
        third = SessionKeeper("c", FakeService(), world.cluster, world.peers)  # pyright: ignore[reportArgumentType]
        world.peers.alive = {"b": world.keeper["b"], "c": third}
        believed = world.cluster.directory.locate(KEY)
        await asyncio.gather(
            world.keeper["b"].acquire(KEY, believed, must_exist=True), third.acquire(KEY, believed, must_exist=True)
        )
        placement = world.cluster.directory.locate(KEY)
        held = {name: keeper.held(KEY) for name, keeper in world.peers.alive.items()}
        assert placement is not None and placement.owner is not None
        owner = held[placement.owner]
        assert owner is not None and owner.epoch == placement.epoch and owner.ledger == (1, 2, 3)

    run(steps())
