"""Sessions whose state is not here, or that no store has room for."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np

from deployment.engine.commands import Command, Export, Foreign
from deployment.keyed_turns import KEYED
from deployment.ownership.log import HeadMoved
from deployment.ownership.words import NOTHING, SessionKey
from deployment.whole_documents import WholeDocument
from state.fingerprint import Mismatch
from tests.deployment.in_process import FakeService, World, packed, unpacked
from tests.deployment.keeping import KEY, get, run, turn
from tests.state.samples import TURN


def test_an_evicted_session_is_brought_back_for_its_next_turn_but_not_under_a_running_one():
    async def steps(world: World) -> None:
        session = await turn(world, "a", 1, 2, 3)
        service = world.replicas["a"].service
        service.evict(session.engine_id)
        running: Any = object()
        session.running = running
        await get(world, "a")
        assert service.held == set()
        session.running = None
        assert await get(world, "a") == (session, "device")
        assert session.engine_id in service.held and not service.evicted and session.free

    run(steps)


def test_an_evicted_session_without_a_copy_keeps_its_ledger_and_is_prefilled():
    async def steps(world: World) -> None:
        session = await turn(world, "a", 1, 2, 3, image=False)
        world.replicas["a"].service.evict(session.engine_id)
        again, _ = await get(world, "a")
        assert again is session and again.ledger and world.replicas["a"].service.held == set()

    run(steps)


def test_where_a_store_has_no_room_a_session_is_kept_by_its_ledger_alone():
    async def steps(world: World) -> None:
        a = world.replicas["a"]
        state = bytes(1 << 16)
        call: Any = FakeService.call

        async def large(command: Command) -> Any:
            event = await call(a.service, command)
            if isinstance(command, Export) and event.frontiers:
                object.__setattr__(event, "document", packed(*unpacked(event.document), state))
            return event

        a.service.call = large  # pyright: ignore[reportAttributeAccessIssue]
        session = await turn(world, "a", 1, 2, 3)
        assert [export.checkpoints for export in a.service.exports] == [True, False]
        world.kill("a")
        again, hit = await get(world, "b")
        assert (hit, again.ledger) == ("none", session.ledger)

    run(steps, lambda: World(room=1 << 16))


def document_of(size: int) -> WholeDocument:
    return WholeDocument(np.zeros(size, np.uint8))


def test_where_a_store_has_no_room_they_go_first_who_hold_more_than_their_share():
    async def steps(world: World) -> None:
        a = world.replicas["a"]
        sessions = []
        for tenant, name, size in (("u", "small", 20_000), ("t", "one", 50_000), ("t", "two", 60_000)):
            session = await a.creating.empty(SessionKey(tenant * 64, name))
            session.ledger, session.checkpoints, session.newest = (1, 2, 3), (("turn_end", 3),), document_of(size)
            sessions.append(session)
        small, one, two = sessions
        for _ in range(2):
            await a.keeper.copies.make_room(small.key)
        assert [export.session for export in a.service.exports] == [one.engine_id, two.engine_id]
        await a.keeper.copies.make_room(small.key)
        assert a.service.exports[-1].session == small.engine_id, "nobody else's rests here: publishing must go on"

    run(steps)


def test_where_a_store_has_no_room_what_rests_longest_goes_and_turns_with_a_key_alone_after_all_images():
    async def steps(world: World) -> None:
        a = world.replicas["a"]
        sessions = []
        for name, ended in (("younger", 40.0), ("older", 30.0), (f"{KEYED}younger", 20.0), (f"{KEYED}older", 10.0)):
            session = await a.creating.empty(SessionKey(KEY.tenant, name))
            session.ledger, session.turns = (1, 2, 3), [replace(TURN, ended_at=ended)]
            if not session.keyed:
                session.checkpoints, session.newest = (("turn_end", 3),), document_of(5000)
            sessions.append(session)
        younger, older, keyed, _ = sessions
        await a.keeper.write(older.key, [HeadMoved(NOTHING, None, 0)] * 3)  # how long a log is says nothing of its age
        keyed.running = object()  # pyright: ignore[reportAttributeAccessIssue]
        for _ in range(4):
            await a.keeper.copies.make_room(keyed.key)
        assert [export.session for export in a.service.exports] == [older.engine_id, younger.engine_id]
        assert [one.key for one in a.keeper.all()] == [younger.key, older.key, keyed.key], "one that runs never goes"
        keyed.running = None
        a.keeper.copies.make_room_of(KEY.tenant)
        while a.keeper.held(keyed.key) is not None:
            await asyncio.sleep(0.01)

    run(steps)


FOREIGN = Foreign(Mismatch("weights", "weights", "theirs", "ours"), {"weights": "theirs"})


def test_a_ledger_of_other_weights_is_kept_marked_and_travels_on_as_what_it_is():
    async def steps(world: World) -> None:
        before = await turn(world, "a", 1, 2, 3)
        world.kill("a")
        b = world.replicas["b"]
        b.service.foreign = FOREIGN
        session, hit = await get(world, "b")
        assert (hit, session.ledger, session.foreign) == ("none", before.ledger, FOREIGN)
        await b.keeper.copies.copy(session)
        assert b.service.exports[-1].foreign == FOREIGN

    run(steps)


def test_a_state_of_another_drafter_only_costs_a_rebuild():
    async def steps(world: World) -> None:
        before = await turn(world, "a", 1, 2, 3)
        world.kill("a")
        world.replicas["b"].service.foreign = Foreign(Mismatch("drafter", "form", "theirs", "ours"), {})
        session, hit = await get(world, "b")
        assert (hit, session.ledger, session.foreign) == ("none", before.ledger, None)

    run(steps)
