"""How a replica gets, gives, loses and copies sessions, with the real directory and host store and no Ray."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest
from deployment.directory import Directory
from deployment.host_store import HostStore, Receipt

from deployment.engine.errors import BAD_STATE, FINGERPRINT_MISMATCH, UNKNOWN_SESSION, EngineError
from deployment.engine.messages import Command, Drop, Dropped, Event, Export, Exported, Foreign, Import, Imported
from deployment.errors import Refused, RequestError
from deployment.keeper import SessionKeeper
from deployment.ownership import Conflict, Copy, Epoch, Grant, Placement, SessionKey
from deployment.session import Session
from deployment.wire import HandedOver, NotHere
from state.fingerprint import Mismatch
from state.session_record import SessionRecord

KEY = SessionKey("t" * 64, "one")


def packed(record: SessionRecord, state: bool) -> bytes:
    return pickle.dumps((record, state))


class FakeService:
    """An engine whose documents are just the record that was exported with them, and whether there is state."""

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.broken: EngineError | None = None
        self.foreign: Foreign | None = None
        self.evicted: set[str] = set()
        self.exports: list[Export] = []

    def evict(self, session: str) -> None:
        self.held.remove(session)
        self.evicted.add(session)

    def was_evicted(self, session: str) -> bool:
        return session in self.evicted

    async def call(self, command: Command) -> Event:
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
                record, state = pickle.loads(command.document)
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
        return HandedOver(held.epoch, held.order, held.frontiers, np.frombuffer(held.document, np.uint8))

    async def put(self, key: SessionKey, owner: str, state: HandedOver) -> Receipt:
        receipt = self.store.put(key, owner, state.epoch, state.order, state.frontiers, state.document.tobytes())
        if receipt.accepted:
            copy = Copy("node", state.epoch, state.order, max(state.frontiers, default=0))
            self.directory.record_copy(key, copy, 1.0)
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
        self.service[name].held.add(session.engine_id)
        await self.keeper[name].copy(session)
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
        assert world.keeper["a"].held(KEY) is None and world.service["a"].held == set()
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
            await world.keeper["a"].copy(stale)
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
        world.service["b"].broken = EngineError(BAD_STATE, "planes disagree")
        with pytest.raises(RequestError) as caught:
            await world.get("b")
        assert caught.value.refused.status == 503 and "planes disagree" in caught.value.refused.message
        world.service["b"].broken = None
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
        world.service["a"].held.remove(session.engine_id)
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
        assert service.held == set()
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
        assert again is session and again.ledger == (1, 2, 3) and world.service["a"].held == set()

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


# ------------------------------------------------------------------------------------------------ without state


def test_session_that_its_owner_has_no_state_of_moves_with_the_hosts_copy_of_the_same_turn():
    async def steps() -> None:
        world = World()
        session = await world.turn("a", 1, 2, 3)
        world.service["a"].evict(session.engine_id)
        moved, hit = await world.get("b")
        assert (hit, moved.ledger) == ("host", (1, 2, 3)) and moved.engine_id in world.service["b"].held

    run(steps())


def test_a_newer_ledger_without_state_is_worth_more_than_an_older_copy_with_state():
    async def steps() -> None:
        world = World()
        session = await world.turn("a", 1, 2, 3)
        world.service["a"].evict(session.engine_id)
        session.ledger, session.frontier, session.order = (1, 2, 3, 4, 5), 4, session.order + 1
        moved, hit = await world.get("b")
        assert (hit, moved.ledger) == ("none", (1, 2, 3, 4, 5)) and world.service["b"].held == set()

    run(steps())


def test_session_too_large_for_the_host_store_is_copied_by_its_ledger():
    async def steps() -> None:
        world = World()
        sizes: list[int] = []

        def put_small_ones(key: SessionKey, owner: str, epoch: Epoch, order: int, frontiers: Any, data: bytes):
            sizes.append(len(frontiers))
            return Receipt(True) if not frontiers else Receipt(False, "too large", too_large=True)

        world.cluster.store.put = put_small_ones  # pyright: ignore[reportAttributeAccessIssue]
        await world.turn("a", 1, 2, 3)
        assert sizes == [1, 0]

    run(steps())


# ------------------------------------------------------------------------------------------------ another model's

FOREIGN = Foreign(Mismatch("weights", "weights", "theirs", "ours"), {"weights": "theirs"})


def test_a_ledger_of_other_weights_is_kept_marked_and_travels_on_as_what_it_is():
    async def steps() -> None:
        world = World()
        await world.turn("a", 1, 2, 3)
        del world.peers.alive["a"]
        world.service["b"].foreign = FOREIGN
        session, hit = await world.get("b")
        assert (hit, session.ledger, session.foreign) == ("none", (1, 2, 3), FOREIGN)
        assert world.service["b"].exports[-1].foreign == FOREIGN

    run(steps())


def test_a_state_of_another_drafter_only_costs_a_rebuild():
    async def steps() -> None:
        world = World()
        await world.turn("a", 1, 2, 3)
        del world.peers.alive["a"]
        world.service["b"].foreign = Foreign(Mismatch("drafter", "form", "theirs", "ours"), {})
        session, hit = await world.get("b")
        assert (hit, session.ledger, session.foreign) == ("none", (1, 2, 3), None)

    run(steps())


def test_a_copy_of_another_session_is_not_taken_for_this_one():
    async def steps() -> None:
        world = World()
        await world.turn("a", 1, 2, 3)
        del world.peers.alive["a"]
        held = world.cluster.store.newest(KEY)
        assert held is not None
        other = packed(SessionRecord("two", (9,)), True)
        world.cluster.store.put(KEY, "a", held.epoch, held.order + 1, (1,), other)
        with pytest.raises(RequestError) as caught:
            await world.get("b")
        assert "'two'" in caught.value.refused.message and world.service["b"].held == set()

    run(steps())


# ------------------------------------------------------------------------------------------------ import and export


def test_imported_session_belongs_to_its_key_whatever_name_the_document_has():
    async def steps() -> None:
        world = World()
        document = packed(SessionRecord("theirs", (1, 2, 3), epoch=(99, 99), frontier=2), True)
        session = await world.keeper["a"].create_imported(KEY, document)
        assert (session.key, session.ledger, session.free) == (KEY, (1, 2, 3), True)
        assert session.epoch < Epoch(99, 99), "epochs are granted, never imported"
        assert world.cluster.store.newest(KEY) is not None
        with pytest.raises(RequestError) as caught:
            await world.keeper["b"].create_imported(KEY, document)
        assert caught.value.refused.code == "session_exists"
        moved, _ = await world.get("b")
        assert moved.ledger == (1, 2, 3)

    run(steps())


@pytest.mark.parametrize(
    ("code", "status"), [(BAD_STATE, 400), (FINGERPRINT_MISMATCH, 409)], ids=["damaged", "another model"]
)
def test_a_document_that_is_refused_leaves_no_session(code: str, status: int):
    async def steps() -> None:
        world = World()
        world.service["a"].broken = EngineError(code, "it is the trailer")
        with pytest.raises(RequestError) as caught:
            await world.keeper["a"].create_imported(KEY, b"")
        assert (caught.value.refused.status, caught.value.refused.code) == (status, code)
        assert "trailer" in caught.value.refused.message
        assert world.cluster.directory.locate(KEY) is None and world.keeper["a"].held(KEY) is None

    run(steps())


def test_an_import_whose_client_goes_away_leaves_the_name_free():
    async def steps() -> None:
        world = World()
        keeper, service = world.keeper["a"], world.service["a"]
        call, begun = service.call, asyncio.Event()

        async def endless(command: Command) -> Event:
            if isinstance(command, Import):
                begun.set()
                await asyncio.sleep(1e9)
            return await call(command)

        service.call = endless  # pyright: ignore[reportAttributeAccessIssue]
        document = packed(SessionRecord("x", (1, 2)), True)
        importing = asyncio.create_task(keeper.create_imported(KEY, document))
        await begun.wait()
        importing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await importing
        assert world.cluster.directory.locate(KEY) is None and keeper.held(KEY) is None
        service.call = call
        assert (await keeper.create_imported(KEY, document)).free

    run(steps())


def test_an_import_that_cannot_be_exported_again_leaves_no_session():
    async def steps() -> None:
        world = World()
        service = world.service["a"]
        call = service.call

        async def no_export(command: Command) -> Event:
            if isinstance(command, Export):
                raise EngineError(BAD_STATE, "manifest.session.order")
            return await call(command)

        service.call = no_export  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(EngineError):
            await world.keeper["a"].create_imported(KEY, packed(SessionRecord("x", (1, 2)), True))
        assert world.cluster.directory.locate(KEY) is None and world.keeper["a"].held(KEY) is None
        assert service.held == set()

    run(steps())


def test_a_document_without_a_token_leaves_no_session():
    async def steps() -> None:
        world = World()
        with pytest.raises(RequestError) as caught:
            await world.keeper["a"].create_imported(KEY, packed(SessionRecord("x", ()), False))
        assert caught.value.refused.status == 400 and "manifest.ledger" in caught.value.refused.message
        assert world.cluster.directory.locate(KEY) is None and world.keeper["a"].held(KEY) is None

    run(steps())


def test_an_imported_session_numbers_its_captures_anew():
    async def steps() -> None:
        world = World()
        record = SessionRecord("x", (1, 2), order=(1 << 53) - 1, frontier=1)
        session = await world.keeper["a"].create_imported(KEY, packed(record, True))
        held = world.cluster.store.newest(KEY)
        assert session.order == 1 and held is not None and held.order == 1

    run(steps())


def test_no_turn_begins_in_a_session_that_is_still_being_imported():
    async def steps() -> None:
        world = World()
        keeper, service = world.keeper["a"], world.service["a"]
        call = service.call

        async def watched(command: Command) -> Event:
            if isinstance(command, Import):
                session = keeper.held(KEY)
                assert session is not None and not await keeper.idle(session)
            return await call(command)

        service.call = watched  # pyright: ignore[reportAttributeAccessIssue]
        await keeper.create_imported(KEY, packed(SessionRecord("x", (1, 2)), True))

    run(steps())


def test_export_needs_an_idle_session_with_a_past():
    async def steps() -> None:
        world = World()
        fresh, _ = await world.get("a")
        with pytest.raises(RequestError) as caught:
            await world.keeper["a"].document(fresh)
        assert caught.value.refused.status == 404
        session = await world.turn("a", 1, 2, 3)
        assert pickle.loads((await world.keeper["a"].document(session)).tobytes())[0] == session.record()
        session.moving_until = 1e18
        with pytest.raises(RequestError) as caught:
            await world.keeper["a"].document(session)
        assert caught.value.refused.code == "session_busy"
        session.moving_until, session.lost = 0.0, True
        with pytest.raises(RequestError) as caught:
            await world.keeper["a"].document(session)
        assert caught.value.refused.code == "session_unavailable"

    run(steps())
