"""A session that is forked, imported or made empty is in its copies before anybody hears of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from deployment.durable_copies import DurableCopies
from deployment.engine.commands import Command, Export, Import
from deployment.engine.errors import BAD_STATE, FINGERPRINT_MISMATCH, EngineError
from deployment.errors import RequestError
from deployment.ownership.log import HeadMoved
from deployment.ownership.messages import Claim
from deployment.ownership.owner import State
from deployment.ownership.words import NOTHING, SessionKey
from deployment.session import Session, engine_id_of
from state.session_record import SessionRecord
from tests.deployment.in_process import Replica, World, packed, unpacked
from tests.deployment.keeping import KEY, get, refused, run, turn, until


def test_a_forked_or_empty_session_is_in_its_copies_before_anybody_hears_of_it():
    async def steps(world: World) -> None:
        parent = await turn(world, "a", 1, 2, 3)
        a = world.replicas["a"]
        child_key, empty_key = SessionKey(KEY.tenant, "child"), SessionKey(KEY.tenant, "empty")
        async with a.creating.of_past(child_key, parent.record(), parent) as child:
            a.service.held.add(child.engine_id)
        empty = await a.creating.empty(empty_key)
        assert child.free and empty.created
        world.kill("a")
        again, hit = await get(world, "b", child_key, must_exist=True)
        assert (hit, again.ledger, again.transcript) == ("peer", parent.ledger, parent.transcript)
        fresh, _ = await get(world, "b", empty_key, must_exist=True)
        assert fresh.created and fresh.ledger == ()
        assert (await refused(world.replicas["b"].creating.empty(child_key)))[:2] == (409, "session_exists")

    run(steps)


def _changes_its_set_before_its_image_is_given(world: World, replica: Replica, key: SessionKey) -> None:
    """Another store joins while the image is made, and is silent for a moment once it is to be in the set."""

    async def joins(command: Command) -> None:
        if isinstance(command, Export) and command.session == engine_id_of(key):
            replica.service.before = None
            owner = replica.owned._owned[key].owner
            world.add_store("y", 1 << 30)
            while owner.state is not State.TAKING:
                await asyncio.sleep(0)
            world.away.add("y")
            asyncio.get_running_loop().call_later(0.3, world.away.discard, "y")

    replica.service.before = joins


def test_a_fork_whose_set_changes_while_its_image_is_made_is_in_its_copies_before_anybody_hears_of_it():
    async def steps(world: World) -> None:
        parent = await turn(world, "a", 1, 2, 3)
        a, child_key = world.replicas["a"], SessionKey(KEY.tenant, "child")
        _changes_its_set_before_its_image_is_given(world, a, child_key)
        async with a.creating.of_past(child_key, parent.record(), parent) as child:
            a.service.held.add(child.engine_id)
        world.kill("a")
        again, _ = await get(world, "b", child_key, must_exist=True)
        assert again.ledger == parent.ledger

    run(steps, lambda: World("x"))


def test_a_checkpoint_that_is_made_while_its_sessions_set_changes_is_in_its_copies_before_anybody_hears_of_it():
    async def steps(world: World) -> None:
        session = await turn(world, "a", 1, 2, 3)
        a = world.replicas["a"]
        session.fork_points.append(replace(session.fork_points[-1], name="here"))
        _changes_its_set_before_its_image_is_given(world, a, KEY)
        await a.keeper.copies.recorded(session)
        world.kill("a")
        again, _ = await get(world, "b", must_exist=True)
        assert [point.name for point in again.fork_points] == [None, "here"]

    run(steps, lambda: World("x"))


def test_a_fork_that_is_lost_while_its_image_is_made_is_refused():
    async def steps(world: World) -> None:
        parent = await turn(world, "a", 1, 2, 3)
        a, child_key = world.replicas["a"], SessionKey(KEY.tenant, "child")

        async def lost(command: Command) -> None:
            held = a.keeper.held(child_key)
            if isinstance(command, Export) and held is not None:
                a.keeper._lose(held)

        a.service.before = lost
        with pytest.raises(RequestError) as caught:
            async with a.creating.of_past(child_key, parent.record(), parent):
                pass
        assert caught.value.refused.code == "session_unavailable"

    run(steps)


def test_what_a_session_begins_with_is_durable_before_its_first_turn(monkeypatch: pytest.MonkeyPatch):
    durable: list[Session] = []

    async def made_durable(_: DurableCopies, session: Session) -> None:
        durable.append(session)

    async def steps(world: World) -> None:
        a = world.replicas["a"]
        parent = await turn(world, "a", 1, 2, 3)
        hidden = await a.creating.empty(SessionKey(KEY.tenant, "hidden"), alone=True)
        monkeypatch.setattr(DurableCopies, "turn_ended", made_durable)
        async with a.creating.of_past(SessionKey(KEY.tenant, "child"), parent.record(), parent) as child:
            pass
        imported = await a.creating.imported(SessionKey(KEY.tenant, "imported"), packed(parent.record(), False))
        async with a.creating.of_past(SessionKey(KEY.tenant, "its child"), parent.record(), hidden):
            pass
        await a.creating.empty(SessionKey(KEY.tenant, "empty"))
        assert durable == [child, imported] and all(one.free for one in durable)

    run(steps)


def test_a_fork_whose_owner_dies_before_its_copies_have_it_was_never_made():
    """Not even an empty one: the client, who asks again, would go on without a past."""

    async def steps(world: World) -> None:
        parent = await turn(world, "a", 1, 2, 3)
        a, b, child_key = world.replicas["a"], world.replicas["b"], SessionKey(KEY.tenant, "child")
        about_to_copy = asyncio.Event()

        async def dies(command: Command) -> None:
            if isinstance(command, Export) and command.session.endswith("child"):
                about_to_copy.set()
                await asyncio.sleep(1e9)

        async def forked() -> None:
            async with a.creating.of_past(child_key, parent.record(), parent):
                pass

        a.service.before = dies
        forking = asyncio.create_task(forked())
        await about_to_copy.wait()
        world.kill("a")
        again, _ = await get(world, "b")
        async with b.creating.of_past(child_key, again.record(), again) as child:
            b.service.held.add(child.engine_id)
        assert child.ledger == parent.ledger
        forking.cancel()

    run(steps)


@pytest.mark.parametrize("must_exist", [True, False], ids=["asked for", "begun"])
def test_what_is_left_of_a_fork_that_was_never_made_is_unknown_or_begins_as_a_new_session(must_exist: bool):
    async def steps(world: World) -> None:
        parent = await turn(world, "a", 1, 2, 3)
        a, key = world.replicas["a"], SessionKey(KEY.tenant, "child")
        opened = await a.creating._taken_new(key)
        session = a.keeper._sessions[key] = Session.of_record(key, opened.epoch, parent.record())
        await a.keeper.write(key, [HeadMoved(NOTHING, None, len(session.ledger))])
        world.kill("a")
        if must_exist:
            assert (await refused(get(world, "b", key, must_exist=True)))[:2] == (404, "session_not_found")
        else:
            fresh, hit = await get(world, "b", key)
            assert (hit, fresh.ledger, fresh.created) == ("none", (), False)

    run(steps)


def test_a_session_that_is_being_made_or_kept_still_is_not_for_others_to_move():
    async def steps(world: World) -> None:
        parent = await turn(world, "a", 1, 2, 3)
        a, key = world.replicas["a"], SessionKey(KEY.tenant, "child")
        async with a.creating.of_past(key, parent.record(), parent) as child:
            a.service.held.add(child.engine_id)
            assert child.moving
        assert child.free
        parent.moving = True  # somebody keeps it still meanwhile
        await a.keeper.copies.recorded(parent)
        assert parent.moving

    run(steps)


def test_two_who_fork_to_one_name_at_once_make_one_session():
    async def steps(world: World) -> None:
        parent = await turn(world, "a", 1, 2, 3)
        a, key = world.replicas["a"], SessionKey(KEY.tenant, "child")

        async def fork() -> str:
            try:
                async with a.creating.of_past(key, parent.record(), parent) as child:
                    await asyncio.sleep(0.05)
                    a.service.held.add(child.engine_id)
            except RequestError as error:
                held = a.keeper.held(key)
                assert held is not None and held.free, "the name is taken by a whole session"
                return error.refused.code
            return "made"

        assert sorted(await asyncio.gather(fork(), fork())) == ["made", "session_exists"]

    run(steps)


def test_no_turn_begins_in_a_session_before_it_is_settled():
    async def steps(world: World) -> None:
        a = world.replicas["a"]

        async def watched(command: Command) -> None:
            if isinstance(command, Import | Export):
                session = a.keeper.held(KEY)
                assert session is not None and not await session.idle()

        a.service.before = watched
        session = await a.creating.imported(KEY, packed(SessionRecord("x", (1, 2)), True))
        assert session.free

    run(steps)


def test_an_imported_session_belongs_to_its_key_whatever_name_and_epoch_the_document_has():
    async def steps(world: World) -> None:
        document = packed(SessionRecord("theirs", (1, 2, 3), epoch=(1 << 50, 99), frontier=2), True)
        session = await world.replicas["a"].creating.imported(KEY, document)
        assert (session.key, session.ledger, session.free) == (KEY, (1, 2, 3), True)
        assert session.epoch.incarnation < 1 << 50, "epochs are granted, never imported"
        assert (await refused(world.replicas["b"].creating.imported(KEY, document)))[1] == "session_exists"
        world.kill("a")
        again, _ = await get(world, "b")
        assert again.ledger == (1, 2, 3)

    run(steps)


@pytest.mark.parametrize(
    ("code", "status"), [(BAD_STATE, 400), (FINGERPRINT_MISMATCH, 409)], ids=["damaged", "another model"]
)
def test_a_document_that_is_refused_leaves_no_session(code: str, status: int):
    async def steps(world: World) -> None:
        a = world.replicas["a"]
        a.service.broken = EngineError(code, "it is the trailer")
        found = await refused(a.creating.imported(KEY, b""))
        assert found[:2] == (status, code) and "trailer" in found[2]
        assert await a.link.locate(KEY) is None and a.keeper.held(KEY) is None and not a.owned._owned

    run(steps)


def test_an_import_whose_client_goes_away_leaves_the_name_free():
    async def steps(world: World) -> None:
        a, begun = world.replicas["a"], asyncio.Event()

        async def endless(command: Command) -> None:
            if isinstance(command, Import):
                begun.set()
                await asyncio.sleep(1e9)

        a.service.before = endless
        document = packed(SessionRecord("x", (1, 2)), True)
        importing = asyncio.create_task(a.creating.imported(KEY, document))
        await begun.wait()
        importing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await importing
        assert await a.link.locate(KEY) is None and a.keeper.held(KEY) is None
        a.service.before = None
        assert (await a.creating.imported(KEY, document)).free

    run(steps)


@pytest.mark.parametrize("far", ["asked", "granted", "sealed"])
@pytest.mark.parametrize("how", ["made", "begun", "imported", "forked"])
def test_a_name_whose_client_goes_away_while_it_is_taken_is_free(how: str, far: str, monkeypatch: pytest.MonkeyPatch):
    async def steps(world: World) -> None:
        parent = await turn(world, "a", 1, 2, 3)
        a, name, reached = world.replicas["a"], SessionKey(KEY.tenant, "new"), asyncio.Event()

        async def taken() -> None:
            if how == "made":
                await a.creating.empty(name)
            elif how == "begun":
                await a.keeper.acquire(name, None, must_exist=False)
            elif how == "imported":
                await a.creating.imported(name, packed(SessionRecord("x", (1, 2)), True))
            else:
                async with a.creating.of_past(name, parent.record(), parent):
                    pass

        async def endless(claim: Claim, answered: Any = a.link.claim) -> Any:
            if reached.is_set():
                return await answered(claim)
            if far == "granted":
                await answered(claim)
            reached.set()
            await asyncio.sleep(1e9)

        if far == "sealed":
            world.away.update("xy")
        else:
            monkeypatch.setattr(a.link, "claim", endless)
        taking = asyncio.create_task(taken())
        if far == "sealed":
            await until(lambda: name in a.owned._owned and a.owned._owned[name].owner.grant is not None)
        else:
            await reached.wait()
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        world.away.clear()
        async with asyncio.timeout(5):
            while a.keeper.getting.of(name).locked() or name in a.owned._owned or await a.link.locate(name) is not None:
                await asyncio.sleep(0.01)
        assert (await world.replicas["b"].creating.empty(name)).free

    run(steps)


def test_a_session_whose_client_goes_away_while_it_is_taken_over_is_there_still():
    async def steps(world: World) -> None:
        before = await turn(world, "a", 1, 2, 3)
        world.kill("a")
        b = world.replicas["b"]
        world.away.update("xy")
        taking = asyncio.create_task(get(world, "b", must_exist=True))
        await until(lambda: KEY in b.owned._owned and b.owned._owned[KEY].owner.grant is not None)
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        world.away.clear()
        await until(lambda: not b.keeper.getting.of(KEY).locked() and KEY not in b.owned._owned)
        assert (await get(world, "b", must_exist=True))[0].ledger == before.ledger

    run(steps)


def test_a_document_without_a_token_leaves_no_session():
    async def steps(world: World) -> None:
        a = world.replicas["a"]
        status, _, message = await refused(a.creating.imported(KEY, packed(SessionRecord("x", ()), False)))
        assert status == 400 and "manifest.ledger" in message
        assert await a.link.locate(KEY) is None and a.keeper.held(KEY) is None

    run(steps)


def test_export_needs_an_idle_session_with_a_past():
    async def steps(world: World) -> None:
        keeper = world.replicas["a"].keeper
        fresh, _ = await get(world, "a")
        assert (await refused(keeper.copies.document(fresh)))[:2] == (409, "session_empty")
        session = await turn(world, "a", 1, 2, 3)
        assert unpacked((await keeper.copies.document(session)).tobytes())[0] == session.record()
        session.moving = True
        assert (await refused(keeper.copies.document(session)))[1] == "session_busy"

    run(steps)
