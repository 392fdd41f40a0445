"""A session that comes back from the durable tier is in its copies before anybody goes on with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

import pytest

from deployment.cluster.names import versioned
from deployment.engine.commands import Command, Export
from deployment.engine.errors import BAD_STATE, EngineError
from deployment.ownership.log import OLDER, HeadMoved
from deployment.ownership.registry import Registry
from deployment.ownership.words import NOTHING, Epoch, Order
from deployment.session import Session
from state.durable import DurableTier
from state.names import key_digest
from state.session_record import SessionRecord
from tests.deployment.in_process import UNIX, Replica, World, packed
from tests.deployment.keeping import KEY, begin, get, refused, run, turn, until
from tests.ownership.fake_storage import FakeValues
from tests.state.stores import Clock, MemoryStore, reader

OLD = Epoch(1, 1)
"""Of an older cluster."""

RECORD = SessionRecord(KEY.session, (5, 6, 7, 1, 2), frontier=4)


def a_new_cluster(world: World) -> Registry:
    """One that never had the session, which lies in the durable tier. What its key-value store says of sessions."""
    values, clock = FakeValues(), Clock()
    registry = Registry(values, versioned("app"))
    registry.next_incarnation(UNIX)
    tier = DurableTier(
        MemoryStore(), 1 << 20, lambda data: None, session_ttl=3000.0, lease_seconds=60.0, clock=clock,
        sleep=clock.sleep,
    )  # fmt: skip
    tier.publish(KEY, OLD, 1, packed(RECORD, True), [], reader())
    for replica in world.replicas.values():
        replica.keeper._durable._tier, replica.keeper._durable._values = tier, values
    world.directory.durable_ids([(KEY, Order(OLD, 1))])
    return registry


def _fails(replica: Replica, how: str) -> Callable[[], None]:
    """The session's image is never made. Returns what ends that."""

    async def before(command: Command) -> None:
        if isinstance(command, Export):
            if how == "broken":
                raise EngineError(BAD_STATE, "planes disagree")
            await asyncio.sleep(1e9)

    replica.service.before = before

    def mend() -> None:
        replica.service.before = None

    return mend


async def _left(world: World, how: str) -> None:
    """`a` has begun to bring the session back, and nobody has it yet."""
    a = world.replicas["a"]
    if how == "broken":
        with pytest.raises(EngineError):
            await get(world, "a", must_exist=True)
        return
    getting = asyncio.create_task(get(world, "a", must_exist=True))
    await until(lambda: a.keeper._sessions.get(KEY) is not None and a.keeper._sessions[KEY].moving)
    if how == "left":
        getting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await getting


@pytest.mark.parametrize("how", ["broken", "left"])
def test_a_session_whose_copies_could_not_be_made_is_brought_back_again_before_a_turn_begins_in_it(how: str):
    async def steps(world: World) -> None:
        a_new_cluster(world)
        a = world.replicas["a"]
        mend = _fails(a, how)
        await _left(world, how)
        assert a.keeper.held(KEY) is None
        mend()
        session, hit = await get(world, "a", must_exist=True)
        assert (hit, session.ledger, session.free) == ("disk", RECORD.ledger, True)
        await turn(world, "a", 8, image=False)
        world.kill("a")
        again, _ = await get(world, "b", must_exist=True)
        assert again.ledger[: len(RECORD.ledger)] == RECORD.ledger and again.ledger[-1] == 8

    run(steps)


def test_a_session_whose_replica_dies_while_it_is_brought_back_is_brought_back_by_the_next_one():
    async def steps(world: World) -> None:
        a_new_cluster(world)
        _fails(world.replicas["a"], "endless")
        await _left(world, "endless")
        world.kill("a")
        session, hit = await get(world, "b", must_exist=True)
        assert (hit, session.ledger) == ("disk", RECORD.ledger)

    run(steps)


def test_a_session_that_was_brought_back_once_is_not_brought_back_as_it_was_before():
    """What all its copies have lost since may say more."""

    async def steps(world: World) -> None:
        a_new_cluster(world)
        assert (await get(world, "a", must_exist=True))[0].ledger == RECORD.ledger
        await turn(world, "a", 8)
        world.kill("a")
        world.lose_arenas()
        for again in range(2):
            status, code, _ = await refused(get(world, "b", must_exist=True))
            assert (status, code) == (503, "session_unavailable"), again
        older, _ = await get(world, "b", must_exist=True, accept_durable=True)
        assert older.ledger == RECORD.ledger

    run(steps)


def test_a_session_that_a_version_before_this_one_brought_back_is_not_brought_back_as_it_was_before():
    async def steps(world: World) -> None:
        registry = a_new_cluster(world)
        registry._values.add(f"{registry._prefix}restored/{key_digest(KEY)}", b"")
        status, code, _ = await refused(get(world, "b", must_exist=True))
        assert (status, code) == (503, "session_unavailable")

    run(steps)


def test_a_session_that_went_on_before_any_copy_had_it_is_not_taken_for_its_log_alone():
    """As versions before this one left it."""

    async def steps(world: World) -> None:
        a_new_cluster(world)
        a = world.replicas["a"]
        opened = await a.keeper.taking.taken(KEY, anew=True, first=OLDER)
        assert a.keeper.taking.is_loaded(opened)
        session = a.keeper.keep(Session.of_record(KEY, opened.epoch, RECORD))
        await a.keeper.write(KEY, [HeadMoved(NOTHING, "x", len(RECORD.ledger))])
        await begin(a, session, (8,))
        world.kill("a")
        status, code, _ = await refused(get(world, "b", must_exist=True))
        assert (status, code) == (503, "session_unavailable")
        older, _ = await get(world, "b", must_exist=True, accept_durable=True)
        assert older.ledger == RECORD.ledger

    run(steps)


@pytest.mark.parametrize("mode", ["history", "append"])
def test_a_turn_that_brought_the_history_along_is_gone_on_with_where_new_copies_were_begun_before_it(
    mode: Literal["history", "append"],
):
    """An append turn is only the end of what was."""

    async def steps(world: World) -> None:
        a_new_cluster(world)
        a = world.replicas["a"]
        opened = await a.keeper.taking.taken(KEY, anew=True, first=OLDER)
        assert a.keeper.taking.is_loaded(opened)
        await begin(a, a.keeper.keep(Session(KEY, opened.epoch)), (8,), (9,), mode=mode)
        world.kill("a")
        if mode == "append":
            assert (await refused(get(world, "b", must_exist=True)))[:2] == (503, "session_unavailable")
            return
        await get(world, "b", must_exist=True)
        assert [one.course(0).token_ids for one in world.replicas["b"].told] == [(8, 9)]

    run(steps)


def test_a_session_at_rest_whose_new_copies_cannot_be_made_is_given_up():
    async def steps(world: World) -> None:
        await turn(world, "a", 1, 2, 3)
        a = world.replicas["a"]
        _fails(a, "broken")
        world.lose_arenas()
        await until(lambda: KEY not in a.keeper._sessions and not a.service.held)
        assert a.keeper.held(KEY) is None and KEY not in a.owned

    run(steps)
