"""A session that was deleted is unknown, whoever is asked, and its name is free."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from deployment.cluster.not_owned import NotOwned, OwnedElsewhere
from deployment.ownership.log import HeadMoved
from deployment.ownership.messages import Placed
from deployment.ownership.words import NOTHING, Epoch, SessionKey
from deployment.session import Session
from deployment.session_desk import SessionDesk
from deployment.turn_table import TurnTable
from deployment.wire import Route
from state.durable import DurableTier
from state.errors import StoreError
from state.session_record import SessionRecord
from tests.deployment.in_process import Replica, World, packed
from tests.deployment.keeping import KEY, Running, get, refused, run, turn, until
from tests.ownership.fake_storage import FakeValues
from tests.state.stores import Clock, MemoryStore, open_tier, publish


def test_a_deleted_session_is_unknown_and_its_name_is_free_for_all_ways_to_make_one():
    async def steps(world: World) -> None:
        a, b = world.replicas["a"], world.replicas["b"]
        for make in (
            lambda: b.creating.empty(KEY),
            lambda: b.creating.imported(KEY, packed(SessionRecord("x", (1, 2)), True)),
            lambda: get(world, "b"),
        ):
            session = await turn(world, "a", 1, 2, 3)
            await a.keeper.ending.delete(session, 1.0)
            assert await a.link.locate(KEY) is None and not a.service.held
            assert (await refused(get(world, "b", must_exist=True)))[:2] == (404, "session_not_found")
            made = await make()
            made = made[0] if isinstance(made, tuple) else made
            assert 1 not in made.ledger[3:] and not made.transcript
            await b.keeper.ending.delete(made, 1.0)

    run(steps)


def test_a_delete_that_the_directory_hears_of_late_is_none_that_is_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("deployment.ending.HEARD_SECONDS", 0.1)

    async def steps(world: World) -> None:
        session = await turn(world, "a", 1, 2, 3)
        world.away.add("directory")
        await world.replicas["a"].keeper.ending.delete(session, 1.0)
        assert isinstance(await world.replicas["a"].link.locate(KEY), Placed)
        # Whoever asks meanwhile is told what the log says, by its next owner.
        world.away.clear()
        async with asyncio.timeout(5):
            while await world.replicas["a"].link.locate(KEY) is not None:
                await asyncio.sleep(0.05)

    run(steps)


def test_who_takes_over_what_was_deleted_finds_nothing_and_nothing_is_listed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("deployment.ending.HEARD_SECONDS", 0.1)

    async def steps(world: World) -> None:
        session = await turn(world, "a", 1, 2, 3)
        placed = await world.replicas["a"].link.locate(KEY)
        assert isinstance(placed, Placed)
        world.away.add("directory")
        await world.replicas["a"].keeper.ending.delete(session, 1.0)
        world.kill("a")
        world.away.clear()
        b = world.replicas["b"]
        status, code, _ = await refused(b.keeper.acquire(KEY, placed, must_exist=True))
        assert (status, code) == (404, "session_not_found")
        async with asyncio.timeout(5):
            while await b.link.locate(KEY) is not None:
                await asyncio.sleep(0.05)

    run(steps)


def test_a_session_that_could_not_be_ended_is_not_taken_for_a_deleted_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("deployment.keeper.KEPT_SECONDS", 0.1)

    async def steps(world: World) -> None:
        session = await turn(world, "a", 1, 2, 3)
        a = world.replicas["a"].keeper
        placed = await world.replicas["a"].link.locate(KEY)
        assert isinstance(placed, Placed)
        with monkeypatch.context() as silent:  # its copies do not answer
            silent.setattr(a, "append", lambda key, records: 0)
            silent.setattr(a, "committed", lambda key, sequence: asyncio.sleep(1e9))
            await a.ending.end(session)
        assert a.held(KEY) is session
        world.directory.replica_exited("a")
        await get(world, "b")
        with pytest.raises(NotOwned):
            await a.committed(KEY, a.append(KEY, [HeadMoved(NOTHING, None, 0)]))
        with pytest.raises(OwnedElsewhere):
            await a.acquire(KEY, placed, must_exist=True)

    run(steps)


async def durable_session(world: World, tier: DurableTier, durable: bool = True) -> Session:
    """One at rest at `a`, with a publication in the tier if it is to be `durable`."""
    session = await turn(world, "a", 1, 2, 3)
    values = FakeValues()
    for replica in world.replicas.values():
        replica.keeper._durable._tier, replica.keeper._durable._values = tier, values
    if durable:
        publish(tier, "one", key=KEY, epoch=session.epoch)
    return session


async def told_its_log_first(world: World, tier: DurableTier, durable: bool) -> Placed:
    """As versions before this one deleted, and were cut off: the only durable publication is still there, and its
    session's log ends with a tombstone. Where it was."""
    await durable_session(world, tier, durable)
    a = world.replicas["a"]
    placed = await a.link.locate(KEY)
    assert isinstance(placed, Placed)
    await a.keeper.ending.bury(KEY, 1.0)
    world.kill("a")
    return placed


async def delete(world: World, name: str) -> bool:
    """As a client does that has not asked before."""
    replica = world.replicas[name]
    placed = await replica.link.locate(KEY)
    assert placed is None or isinstance(placed, Placed)
    nothing: Any = None
    desk = SessionDesk(name, replica.keeper, replica.creating, nothing, nothing, TurnTable())
    return await desk.delete(Route(name, placement=placed), KEY)


async def ended_everywhere(world: World, tier: DurableTier) -> None:
    b = world.replicas["b"]
    assert await b.link.locate(KEY) is None and tier.latest(KEY) is None and tier.tombstone(KEY) is not None
    assert (await refused(delete(world, "b")))[:2] == (404, "session_not_found")


def test_a_delete_that_the_durable_tier_does_not_take_has_not_been_and_is_ended_by_asking_again():
    tier = open_tier(MemoryStore(), Clock())

    async def steps(world: World) -> None:
        session = await durable_session(world, tier)
        with pytest.MonkeyPatch.context() as full:
            full.setattr(tier, "delete", _full)
            assert (await refused(delete(world, "a")))[:2] == (503, "session_unavailable")
        assert tier.latest(KEY) is not None
        assert (await get(world, "a", must_exist=True))[0] is session and session.free
        assert await delete(world, "a")
        await ended_everywhere(world, tier)

    run(steps)


@pytest.mark.parametrize("taken", [True, False])
def test_a_delete_whose_replica_is_lost_on_the_way_to_the_durable_tier_is_ended_by_asking_again(taken: bool):
    tier = open_tier(MemoryStore(), Clock())

    async def steps(world: World) -> None:
        session = await durable_session(world, tier)
        cut_off = asyncio.Event()

        async def never(key: SessionKey, epoch: Epoch) -> None:
            if taken:
                tier.delete(key, epoch)
            cut_off.set()
            await asyncio.sleep(1e9)

        world.replicas["a"].keeper._durable.delete = never
        deleting = asyncio.create_task(delete(world, "a"))
        await cut_off.wait()
        deleting.cancel()
        world.kill("a")
        found, _ = await get(world, "b", must_exist=True)
        assert found.ledger == session.ledger and found.epoch > session.epoch
        assert await delete(world, "b")
        await ended_everywhere(world, tier)

    run(steps)


@pytest.mark.parametrize("how", ["turn", "made"])
def test_who_uses_the_name_of_one_that_was_deleted_and_cut_off_ends_it_in_the_durable_tier_first(how: str):
    tier = open_tier(MemoryStore(), Clock())

    async def steps(world: World) -> None:
        await told_its_log_first(world, tier, durable=True)
        b = world.replicas["b"]
        assert await b.keeper.located(KEY) is None and tier.latest(KEY) is not None
        with pytest.MonkeyPatch.context() as full:
            full.setattr(tier, "delete", _full)
            status, code, _ = await refused(_used(b, how))
        assert (status, code) == (503, "session_unavailable")
        await _used(b, how)
        assert tier.latest(KEY) is None and tier.tombstone(KEY) is not None
        assert b.keeper.held(KEY) is not None

    run(steps)


async def _used(replica: Replica, how: str) -> None:
    if how == "turn":
        await replica.keeper.acquire(KEY, None, must_exist=False)
    else:
        await replica.creating.empty(KEY)


@pytest.mark.parametrize("durable", [True, False])
def test_who_asks_for_what_was_deleted_by_one_that_was_cut_off_ends_it_in_the_durable_tier_too(durable: bool):
    tier = open_tier(MemoryStore(), Clock())

    async def steps(world: World) -> None:
        placed = await told_its_log_first(world, tier, durable)
        b = world.replicas["b"]
        if durable:
            with pytest.MonkeyPatch.context() as full:
                full.setattr(tier, "delete", _full)
                status, code, _ = await refused(b.keeper.acquire(KEY, placed, must_exist=True))
            assert (status, code) == (503, "session_unavailable")
            assert await b.link.locate(KEY) is not None, "whoever asks again must be heard"
        for _ in range(2):
            status, code, _ = await refused(b.keeper.acquire(KEY, placed, must_exist=True))
            assert (status, code) == (404, "session_not_found")
        assert tier.latest(KEY) is None
        assert (tier.tombstone(KEY) is not None) == durable, "one that it never had leaves no trace there"

    run(steps)


def _full(key: SessionKey, epoch: Epoch) -> None:
    raise StoreError("put", "a tombstone", "no room")


class Turn(Running):
    async def ended(self) -> None:
        await asyncio.sleep(0)
        self.session.running = None

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session


def test_deletes_that_come_at_once_are_one_and_cancel_the_turn_that_runs():
    async def steps(world: World) -> None:
        session = await turn(world, "a", 1, 2, 3)
        running: Any = Turn(session)
        session.running = running
        keeper = world.replicas["a"].keeper
        await asyncio.gather(keeper.ending.delete(session, 1.0), keeper.ending.delete(session, 1.0))
        assert running.cancels == 1 and await world.replicas["a"].link.locate(KEY) is None

    run(steps)


@pytest.mark.parametrize("where", ["the durable tier", "the log"])
def test_a_delete_whose_client_leaves_is_done_to_its_end(where: str):
    tier = open_tier(MemoryStore(), Clock())

    async def steps(world: World) -> None:
        await durable_session(world, tier)
        a = world.replicas["a"]
        reached, goes_on = asyncio.Event(), asyncio.Event()

        async def durably(key: SessionKey, epoch: Epoch) -> None:
            tier.delete(key, epoch)
            await held_up()

        async def buried(key: SessionKey, at: float, bury: Any = a.keeper.ending.bury) -> None:
            await bury(key, at)
            await held_up()

        async def held_up() -> None:
            reached.set()
            await goes_on.wait()

        if where == "the log":
            a.keeper.ending.bury = buried
        else:
            a.keeper._durable.delete = durably
        deleting = asyncio.create_task(delete(world, "a"))
        await reached.wait()
        deleting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await deleting
        goes_on.set()
        await until(lambda: not a.keeper._sessions and not a.service.held)
        assert a.keeper.held(KEY) is None
        await ended_everywhere(world, tier)

    run(steps)


def test_a_turn_that_begins_while_the_durable_tier_takes_the_end_is_cancelled():
    async def steps(world: World) -> None:
        session = await turn(world, "a", 1, 2, 3)
        running: Any = Turn(session)
        keeper = world.replicas["a"].keeper

        async def takes_long(key: SessionKey, epoch: Epoch) -> None:
            session.moving, session.running = False, running  # whoever wrote to the session meanwhile is done

        keeper._durable.delete = takes_long
        await keeper.ending.delete(session, 1.0)
        assert running.cancels == 1 and await world.replicas["a"].link.locate(KEY) is None

    run(steps)
