"""How a replica gets, gives, loses and copies sessions, with the real directory and host stores and no Ray."""

from __future__ import annotations

import asyncio
import pickle
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from deployment.cluster.not_owned import NotOwned, OwnedElsewhere
from deployment.durable_copies import _State
from deployment.engine.errors import BAD_STATE, FINGERPRINT_MISMATCH, EngineError
from deployment.engine.messages import Command, Export, Finished, Foreign, Import, Round
from deployment.errors import RequestError
from deployment.keyed_turns import KEYED
from deployment.ownership import known_stores
from deployment.ownership.log import HeadMoved
from deployment.ownership.messages import Placed
from deployment.ownership.words import NOTHING, Epoch, SessionKey
from deployment.session import Session
from deployment.session_log import began_record, ended_record, round_record
from deployment.turn_log import SessionTurnLog
from deployment.turn_records import turn_record
from deployment.turns import Prompt
from deployment.wire import Moved, TurnRequest
from state.errors import StateError, StoreError
from state.fingerprint import Mismatch
from state.session_record import SessionRecord
from tests.deployment.in_process import FakeService, Replica, World, packed
from tests.ownership.fake_storage import FakeValues
from tests.state.samples import TURN
from tests.state.stores import Clock, MemoryStore, open_tier, publish

KEY = SessionKey("t" * 64, "one")
PROMPT = Prompt((5, 6, 7), 2)
_ids = iter(range(1 << 30))


def run(steps: Callable[[World], Awaitable[None]], world: Callable[[], World] = World) -> None:
    async def scenario() -> None:
        inside = world()
        inside.start()
        try:
            async with asyncio.timeout(20):
                await steps(inside)
        finally:
            inside.close()

    asyncio.run(scenario())


async def get(world: World, name: str, key: SessionKey = KEY, **how: Any) -> tuple[Session, str]:
    placed = await world.replicas[name].link.locate(key)
    assert placed is None or isinstance(placed, Placed)
    return await world.replicas[name].keeper.acquire(key, placed, must_exist=how.pop("must_exist", False), **how)


async def begin(replica: Replica, session: Session, *rounds: tuple[int, ...], ask: str = "Hi") -> TurnRequest:
    """A turn with so many rounds, whose end is still to come."""
    message = {"role": "user", "content": ask}
    request = TurnRequest(f"{next(_ids):032x}", "append", (message,), session.key, tenant=session.key.tenant)
    prompt = Prompt((*session.ledger, *PROMPT.ids), len(session.ledger) + 2)
    log = SessionTurnLog.begin(replica.keeper, session, request, prompt, 7)
    start = len(prompt.ids)
    for ids in rounds:
        log.round(Round(request.turn, start, ids, 0, len(ids) - 1, ()))
        start += len(ids)
    await log.told()
    return request


def of(request: TurnRequest, prompt: Prompt, ids: tuple[int, ...]) -> Finished:
    frontier = len(prompt.ids) + len(ids) - 1
    return Finished(request.turn, "stop", ids, None, len(prompt.ids), frontier, (), 1.0, 0.1)


async def turn(world: World, name: str, *ids: int, image: bool = True) -> Session:
    """A whole turn at a replica, as far as a keeper sees one."""
    replica = world.replicas[name]
    session, _ = await get(world, name)
    prompt = Prompt((*session.ledger, *PROMPT.ids), len(session.ledger) + 2)
    request = await begin(replica, session, ids)
    ended = of(request, prompt, ids)
    await replica.keeper.write(KEY, [ended_record(ended, request.turn, 0, 1.0)])
    answer = {"role": "assistant", "content": replica.service.tokenizer.decode(ids)}
    record = turn_record(request, name, request.turn, 7, None, ended, 1.0)
    session.book(prompt, ended, (*request.messages, answer), record)
    replica.service.held.add(session.engine_id)
    if image:
        await replica.keeper.copies.copy(session)
        await replica.owned.kept(KEY)
    return session


async def refused(work: Awaitable[Any]) -> tuple[int, str, str]:
    with pytest.raises(RequestError) as caught:
        await work
    return caught.value.refused.status, caught.value.refused.code, caught.value.refused.message


# ------------------------------------------------------------------------------------------------ getting


def test_a_session_that_nobody_has_is_new_to_its_first_asker_and_unknown_to_who_wants_an_old_one():
    async def steps(world: World) -> None:
        assert (await refused(get(world, "a", must_exist=True)))[:2] == (404, "session_not_found")
        session, hit = await get(world, "a")
        assert (hit, session.ledger, session.created) == ("none", (), False)
        assert await get(world, "a") == (session, "device")
        with pytest.raises(OwnedElsewhere) as caught:
            await get(world, "b")
        assert caught.value.owner == "a"

    run(steps)


@pytest.mark.parametrize("image", [True, False], ids=["image", "log alone"])
def test_what_a_dead_owner_committed_is_whole_at_the_next_one(image: bool):
    async def steps(world: World) -> None:
        before = await turn(world, "a", 30, 31, 32)
        await turn(world, "a", 40, 41, image=image)
        world.kill("a")
        session, hit = await get(world, "b")
        assert hit == "peer" and session.epoch > before.epoch
        assert (session.ledger, session.frontier, session.opener) == (before.ledger, before.frontier, before.opener)
        assert session.transcript == before.transcript
        assert [record.id for record in session.turns] == [record.id for record in before.turns]
        assert session.engine_id in world.replicas["b"].service.held

    run(steps)


def test_a_session_without_any_image_is_made_of_its_log_alone():
    async def steps(world: World) -> None:
        before = await turn(world, "a", 30, 31, image=False)
        world.kill("a")
        session, hit = await get(world, "b")
        assert (hit, session.ledger, session.transcript) == ("none", before.ledger, before.transcript)

    run(steps)


def test_a_turn_whose_end_nobody_wrote_goes_on_at_the_next_owner_after_its_last_round():
    async def steps(world: World) -> None:
        before = await turn(world, "a", 30, 31)
        a, b = world.replicas["a"], world.replicas["b"]
        request = await begin(a, before, (50,), (51, 52))
        ledger = before.ledger
        world.kill("a")
        session, _ = await get(world, "b")
        (logged,) = b.told
        assert logged.request(KEY) == request and logged.finished() is None and logged.began.seed == 7
        assert logged.course(0).token_ids == (50, 51, 52) and logged.course(0).resumed.rounds == (0, 1)
        assert session.ledger == ledger and session.running is None

    run(steps)


def test_the_newest_turn_that_is_over_can_be_told_by_the_next_owner_although_an_image_holds_it():
    async def steps(world: World) -> None:
        await turn(world, "a", 30, 31)
        session = await turn(world, "a", 40, 41)
        world.kill("a")
        await get(world, "b")
        (logged,) = world.replicas["b"].told
        finished = logged.finished()
        assert finished is not None and finished.token_ids == (40, 41)
        assert logged.began.turn == session.turns[-1].id

    run(steps)


def test_two_replicas_that_want_a_dead_owners_session_end_with_one_owner():
    async def steps(world: World) -> None:
        world.replicas["c"] = Replica(world, "c", "x", FakeService())
        world.replicas["c"].start()
        await turn(world, "a", 1, 2, 3)
        world.kill("a")
        answers = await asyncio.gather(get(world, "b"), get(world, "c"), return_exceptions=True)
        (owner,) = [answer for answer in answers if isinstance(answer, tuple)]
        assert sum(isinstance(answer, OwnedElsewhere) for answer in answers) == 1
        assert owner[0].ledger == (5, 6, 7, 1, 2, 3)

    run(steps)


def test_state_that_cannot_be_loaded_is_an_error_now_and_tried_again_later():
    async def steps(world: World) -> None:
        session = await turn(world, "a", 1, 2, 3)
        world.kill("a")
        world.replicas["b"].service.broken = EngineError(BAD_STATE, "planes disagree")
        status, _, message = await refused(get(world, "b"))
        assert status == 503 and "planes disagree" in message
        world.replicas["b"].service.broken = None
        again, hit = await get(world, "b")
        assert (hit, again.ledger) == ("peer", session.ledger)

    run(steps)


def test_an_image_that_cannot_be_read_is_an_error_now_and_never_an_older_past(monkeypatch: pytest.MonkeyPatch):
    async def steps(world: World) -> None:
        await turn(world, "a", 1, 2, 3)
        session = await turn(world, "a", 4, 5)
        while any(ends.history.first == 1 for store in world.stores.values() for ends in store.index()):
            await asyncio.sleep(0)  # the log is trimmed behind the image
        world.kill("a")
        link = world.replicas["b"].link

        async def unreadable(*image: Any) -> bytes:
            raise StateError("the store does not hold it")

        with monkeypatch.context() as broken:
            broken.setattr(link, "image", unreadable)
            status, code, _ = await refused(get(world, "b"))
            assert (status, code) == (503, "session_unavailable")
        again, _ = await get(world, "b")
        assert (again.ledger, len(again.turns)) == (session.ledger, 2)

    run(steps)


@pytest.fixture
def soon_believed_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_stores, "UNBELIEVED_SECONDS", 0.1)


@pytest.mark.usefixtures("soon_believed_by_nobody")
def test_a_session_whose_copies_are_all_gone_is_no_new_one_unless_a_full_history_makes_it_so():
    async def steps(world: World) -> None:
        await turn(world, "a", 1, 2, 3)
        world.kill("a")
        for node in "xy":
            world.directory.node_died(node, time.monotonic())
        world.stores.clear()
        status, code, _ = await refused(get(world, "b"))
        assert (status, code) == (503, "session_unavailable")
        world.add_store("z", 1 << 20)
        session, hit = await get(world, "b", anew=True)
        assert (hit, session.ledger) == ("none", ())

    run(steps)


def test_a_copy_of_another_session_is_not_taken_for_this_one():
    async def steps(world: World) -> None:
        session = await turn(world, "a", 1, 2, 3)
        a = world.replicas["a"]
        document = packed(SessionRecord("two", (9,)), True)
        end = a.owned.end(KEY).sequence
        await a.keeper.write(KEY, [began_record(TurnRequest("f" * 32, "append", ()), PROMPT, 1, 1.0)])
        a.owned.publish(KEY, end + 1, (1,), document, end + 1)
        await a.owned.kept(KEY)
        world.kill("a")
        _, _, message = await refused(get(world, "b"))
        assert "'two'" in message and session.engine_id not in world.replicas["b"].service.held

    run(steps)


# ------------------------------------------------------------------------------------------------ losing


def test_an_owner_that_was_given_up_for_dead_cannot_write_forgets_and_stops_its_turn():
    class Turn:
        moves = 0

        def moved(self) -> None:
            self.moves += 1

    async def steps(world: World) -> None:
        stale = await turn(world, "a", 1, 2, 3)
        running: Any = Turn()
        a = world.replicas["a"]
        a.keeper._durable._written[KEY] = _State(3, (("turn_end", 3),))
        await begin(a, stale, (50,))
        stale.running = running
        world.directory.replica_exited("a")
        session, _ = await get(world, "b")
        assert [turn.course(0).token_ids for turn in world.replicas["b"].told] == [(50,)]
        with pytest.raises(NotOwned):
            await a.keeper.committed(KEY, a.keeper.append(KEY, [round_record(_round(51), "x", 0)]))
        assert running.moves == 1 and a.keeper.held(KEY) is None
        assert a.keeper._durable.checkpoints(KEY) == (), "what it wrote says nothing of what the next owner writes"
        await asyncio.sleep(0.01)
        assert stale.engine_id not in a.service.held and not a.keeper._sessions and not a.owned._owned
        assert session.ledger == stale.ledger

    run(steps)


def _round(token: int) -> Round:
    return Round("x", 9, (token,), 0, 0, ())


def test_a_copy_at_the_wrong_moment_is_no_error():
    async def steps(world: World) -> None:
        stale = await turn(world, "a", 1, 2, 3)
        world.directory.replica_exited("a")
        await get(world, "b")
        await world.replicas["a"].keeper.copies.copy(stale)
        assert (await refused(world.replicas["a"].keeper.settle(stale)))[:2] == (503, "session_unavailable")

    run(steps)


# ------------------------------------------------------------------------------------------------ moving


class Running:
    """A turn that runs, until it is suspended."""

    def __init__(self) -> None:
        self.id = "0" * 32
        self.went: list[Moved | None] = []
        self.cancels = 0

    async def suspend(self) -> None:
        pass

    def go_on(self, elsewhere: Moved | None) -> None:
        self.went.append(elsewhere)

    def moved(self) -> None:
        self.went.append(Moved())

    def cancel(self) -> None:
        self.cancels += 1


def test_an_idle_session_moves_with_its_state():
    async def steps(world: World) -> None:
        before = await turn(world, "a", 1, 2, 3)
        assert await world.replicas["a"].keeper.move(before, "b")
        session, hit = await get(world, "b")
        assert (session.ledger, session.turns) == (before.ledger, before.turns) and session.epoch > before.epoch
        assert hit == "device", "it was there before it was asked for"
        assert world.replicas["a"].keeper.held(KEY) is None and not world.replicas["a"].service.held
        with pytest.raises(OwnedElsewhere):
            await get(world, "a")

    run(steps)


def test_a_running_turn_moves_with_its_session_and_goes_on_there():
    async def steps(world: World) -> None:
        session = await turn(world, "a", 1, 2, 3)
        await begin(world.replicas["a"], session, (50, 51))
        running: Any = Running()
        session.running = running
        assert await world.replicas["a"].keeper.move(session, "b")
        assert running.went == [Moved("b")]
        await get(world, "b")
        (logged,) = world.replicas["b"].told
        assert logged.course(0).token_ids == (50, 51) and logged.finished() is None

    run(steps)


@pytest.mark.parametrize("why", ["never hears", "cannot load"])
def test_a_move_that_fails_leaves_session_and_turn_where_they_were(why: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("deployment.ownership.owner.OFFER_SECONDS", 0.1)

    async def steps(world: World) -> None:
        session = await turn(world, "a", 1, 2, 3)
        request = await begin(world.replicas["a"], session, (50,))
        running: Any = Running()
        session.running = running
        if why == "never hears":
            world.away.add("b")
        else:
            world.replicas["b"].link.dead = True
        moved = await world.replicas["a"].keeper.move(session, "b")
        assert not moved and running.went == [None] and not session.moving
        await world.replicas["a"].keeper.write(KEY, [round_record(_round(51), request.turn, 0)])
        assert world.replicas["a"].keeper.held(KEY) is session

    run(steps)


def test_a_source_that_never_hears_the_outcome_asks_the_log(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("deployment.ownership.owner.OFFER_SECONDS", 0.1)

    async def steps(world: World) -> None:
        session = await turn(world, "a", 1, 2, 3)
        running: Any = Running()
        session.running = running
        world.away.add("a")
        assert await world.replicas["a"].keeper.move(session, "b")
        assert running.went == [Moved("b")] and world.replicas["b"].keeper.held(KEY) is not None

    run(steps)


def test_a_session_that_is_being_moved_takes_no_turn_and_no_second_move():
    async def steps(world: World) -> None:
        session = await turn(world, "a", 1, 2, 3)
        keeper = world.replicas["a"].keeper
        moving = asyncio.create_task(keeper.move(session, "b"))
        await asyncio.sleep(0)
        assert not await session.idle()
        assert (await refused(keeper.move(session, "b")))[:2] == (409, "session_busy")
        assert await moving

    run(steps)


# ------------------------------------------------------------------------------------------------ deleting


def test_a_deleted_session_is_unknown_and_its_name_is_free_for_all_ways_to_make_one():
    async def steps(world: World) -> None:
        a, b = world.replicas["a"], world.replicas["b"]
        for make in (
            lambda: b.keeper.create_empty(KEY),
            lambda: b.keeper.create_imported(KEY, packed(SessionRecord("x", (1, 2)), True)),
            lambda: get(world, "b"),
        ):
            session = await turn(world, "a", 1, 2, 3)
            await a.keeper.delete(session, 1.0)
            assert await a.link.locate(KEY) is None and not a.service.held
            assert (await refused(get(world, "b", must_exist=True)))[:2] == (404, "session_not_found")
            made = await make()
            made = made[0] if isinstance(made, tuple) else made
            assert 1 not in made.ledger[3:] and not made.transcript
            await b.keeper.delete(made, 1.0)

    run(steps)


def test_a_delete_that_the_directory_hears_of_late_is_none_that_is_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("deployment.keeper.HEARD_SECONDS", 0.1)

    async def steps(world: World) -> None:
        session = await turn(world, "a", 1, 2, 3)
        world.away.add("directory")
        await world.replicas["a"].keeper.delete(session, 1.0)
        assert isinstance(await world.replicas["a"].link.locate(KEY), Placed)
        # Whoever asks meanwhile is told what the log says, by its next owner.
        world.away.clear()
        async with asyncio.timeout(5):
            while await world.replicas["a"].link.locate(KEY) is not None:
                await asyncio.sleep(0.05)

    run(steps)


def test_who_takes_over_what_was_deleted_finds_nothing_and_nothing_is_listed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("deployment.keeper.HEARD_SECONDS", 0.1)

    async def steps(world: World) -> None:
        session = await turn(world, "a", 1, 2, 3)
        placed = await world.replicas["a"].link.locate(KEY)
        assert isinstance(placed, Placed)
        world.away.add("directory")
        await world.replicas["a"].keeper.delete(session, 1.0)
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
            await a.end(session)
        assert a.held(KEY) is session
        world.directory.replica_exited("a")
        await get(world, "b")
        with pytest.raises(NotOwned):
            await a.committed(KEY, a.append(KEY, [HeadMoved(NOTHING, None, 0)]))
        with pytest.raises(OwnedElsewhere):
            await a.acquire(KEY, placed, must_exist=True)

    run(steps)


@pytest.mark.parametrize("durable", [True, False])
def test_who_asks_for_what_was_deleted_by_one_that_was_cut_off_ends_it_in_the_durable_tier_too(durable: bool):
    tier, values = open_tier(MemoryStore(), Clock()), FakeValues()

    async def steps(world: World) -> None:
        session = await turn(world, "a", 1, 2, 3)
        for replica in world.replicas.values():
            replica.keeper._durable._tier, replica.keeper._durable._values = tier, values
        if durable:
            publish(tier, "one", key=KEY, epoch=session.epoch)
        a, b = world.replicas["a"], world.replicas["b"]
        placed = await a.link.locate(KEY)
        assert isinstance(placed, Placed)
        cut_off = asyncio.Event()
        a.keeper._durable.delete = lambda key, epoch: _noted(cut_off)
        deleting = asyncio.create_task(a.keeper.delete(session, 1.0))
        await cut_off.wait()
        deleting.cancel()
        world.kill("a")
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


async def _noted(cut_off: asyncio.Event) -> None:
    cut_off.set()
    await asyncio.sleep(1e9)


def _full(key: SessionKey, epoch: Epoch) -> None:
    raise StoreError("put", "a tombstone", "no room")


def test_deletes_that_come_at_once_are_one_and_cancel_the_turn_that_runs():
    class Turn(Running):
        async def ended(self) -> None:
            await asyncio.sleep(0)
            self.session.running = None

        def __init__(self, session: Session) -> None:
            super().__init__()
            self.session = session

    async def steps(world: World) -> None:
        session = await turn(world, "a", 1, 2, 3)
        running: Any = Turn(session)
        session.running = running
        keeper = world.replicas["a"].keeper
        await asyncio.gather(keeper.delete(session, 1.0), keeper.delete(session, 1.0))
        assert running.cancels == 1 and await world.replicas["a"].link.locate(KEY) is None

    run(steps)


# ------------------------------------------------------------------------------------------------ making


def test_a_forked_or_empty_session_is_in_its_copies_before_anybody_hears_of_it():
    async def steps(world: World) -> None:
        parent = await turn(world, "a", 1, 2, 3)
        a = world.replicas["a"]
        child_key, empty_key = SessionKey(KEY.tenant, "child"), SessionKey(KEY.tenant, "empty")
        async with a.keeper.creating(child_key, parent.record(), parent) as child:
            a.service.held.add(child.engine_id)
        empty = await a.keeper.create_empty(empty_key)
        assert child.free and empty.created
        world.kill("a")
        again, hit = await get(world, "b", child_key, must_exist=True)
        assert (hit, again.ledger, again.transcript) == ("peer", parent.ledger, parent.transcript)
        fresh, _ = await get(world, "b", empty_key, must_exist=True)
        assert fresh.created and fresh.ledger == ()
        assert (await refused(world.replicas["b"].keeper.create_empty(child_key)))[:2] == (409, "session_exists")

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
            async with a.keeper.creating(child_key, parent.record(), parent):
                pass

        a.service.before = dies
        forking = asyncio.create_task(forked())
        await about_to_copy.wait()
        world.kill("a")
        again, _ = await get(world, "b")
        async with b.keeper.creating(child_key, again.record(), again) as child:
            b.service.held.add(child.engine_id)
        assert child.ledger == parent.ledger
        forking.cancel()

    run(steps)


@pytest.mark.parametrize("must_exist", [True, False], ids=["asked for", "begun"])
def test_what_is_left_of_a_fork_that_was_never_made_is_unknown_or_begins_as_a_new_session(must_exist: bool):
    async def steps(world: World) -> None:
        parent = await turn(world, "a", 1, 2, 3)
        a, key = world.replicas["a"], SessionKey(KEY.tenant, "child")
        opened = await a.keeper._taken_new(key)
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
        async with a.keeper.creating(key, parent.record(), parent) as child:
            a.service.held.add(child.engine_id)
            assert child.moving
        assert child.free
        parent.moving = True  # somebody keeps it still meanwhile
        await a.keeper.recorded(parent)
        assert parent.moving

    run(steps)


def test_two_who_fork_to_one_name_at_once_make_one_session():
    async def steps(world: World) -> None:
        parent = await turn(world, "a", 1, 2, 3)
        a, key = world.replicas["a"], SessionKey(KEY.tenant, "child")

        async def fork() -> str:
            try:
                async with a.keeper.creating(key, parent.record(), parent) as child:
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
        session = await a.keeper.create_imported(KEY, packed(SessionRecord("x", (1, 2)), True))
        assert session.free

    run(steps)


def test_an_imported_session_belongs_to_its_key_whatever_name_and_epoch_the_document_has():
    async def steps(world: World) -> None:
        document = packed(SessionRecord("theirs", (1, 2, 3), epoch=(1 << 50, 99), frontier=2), True)
        session = await world.replicas["a"].keeper.create_imported(KEY, document)
        assert (session.key, session.ledger, session.free) == (KEY, (1, 2, 3), True)
        assert session.epoch.incarnation < 1 << 50, "epochs are granted, never imported"
        assert (await refused(world.replicas["b"].keeper.create_imported(KEY, document)))[1] == "session_exists"
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
        found = await refused(a.keeper.create_imported(KEY, b""))
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
        importing = asyncio.create_task(a.keeper.create_imported(KEY, document))
        await begun.wait()
        importing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await importing
        assert await a.link.locate(KEY) is None and a.keeper.held(KEY) is None
        a.service.before = None
        assert (await a.keeper.create_imported(KEY, document)).free

    run(steps)


def test_a_document_without_a_token_leaves_no_session():
    async def steps(world: World) -> None:
        a = world.replicas["a"]
        status, _, message = await refused(a.keeper.create_imported(KEY, packed(SessionRecord("x", ()), False)))
        assert status == 400 and "manifest.ledger" in message
        assert await a.link.locate(KEY) is None and a.keeper.held(KEY) is None

    run(steps)


def test_export_needs_an_idle_session_with_a_past():
    async def steps(world: World) -> None:
        keeper = world.replicas["a"].keeper
        fresh, _ = await get(world, "a")
        assert (await refused(keeper.copies.document(fresh)))[:2] == (409, "session_empty")
        session = await turn(world, "a", 1, 2, 3)
        assert pickle.loads((await keeper.copies.document(session)).tobytes())[0] == session.record()
        session.moving = True
        assert (await refused(keeper.copies.document(session)))[1] == "session_busy"

    run(steps)


# ------------------------------------------------------------------------------------------------ without state


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
                object.__setattr__(event, "document", event.document + state)
            return event

        a.service.call = large  # pyright: ignore[reportAttributeAccessIssue]
        session = await turn(world, "a", 1, 2, 3)
        assert [export.checkpoints for export in a.service.exports] == [True, False]
        world.kill("a")
        again, hit = await get(world, "b")
        assert (hit, again.ledger) == ("none", session.ledger)

    run(steps, lambda: World(room=1 << 16))


def test_where_a_store_has_no_room_they_go_first_who_hold_more_than_their_share():
    async def steps(world: World) -> None:
        a = world.replicas["a"]
        sessions = []
        for tenant, name, size in (("u", "small", 20_000), ("t", "one", 50_000), ("t", "two", 60_000)):
            session = await a.keeper.create_empty(SessionKey(tenant * 64, name))
            session.ledger, session.checkpoints, session.copied = (1, 2, 3), (("turn_end", 3),), size
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
            session = await a.keeper.create_empty(SessionKey(KEY.tenant, name))
            session.ledger, session.turns = (1, 2, 3), [replace(TURN, ended_at=ended)]
            if not session.keyed:
                session.checkpoints, session.copied = (("turn_end", 3),), 5000
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


# ------------------------------------------------------------------------------------------------ lost copies


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not true():
            await asyncio.sleep(0.01)


def test_a_session_at_rest_whose_copies_are_all_lost_at_once_gets_new_ones_of_what_its_owner_has():
    async def steps(world: World) -> None:
        before = await turn(world, "a", 1, 2, 3)
        epoch, a = before.epoch, world.replicas["a"]
        world.lose_arenas()
        await until(lambda: a.keeper.held(KEY) is not None and before.epoch > epoch and before.free)
        again, hit = await get(world, "a")
        assert (again, hit) == (before, "device"), "nobody noticed"
        await turn(world, "a", 4, 5)
        world.kill("a")
        session, _ = await get(world, "b")
        assert (session.ledger, len(session.turns)) == (before.ledger, 2)

    run(steps)


@pytest.mark.usefixtures("soon_believed_by_nobody")
def test_a_turn_that_runs_while_all_copies_are_lost_ends_and_its_session_is_refused_by_name():
    async def steps(world: World) -> None:
        session = await turn(world, "a", 1, 2, 3)
        a = world.replicas["a"]
        running: Any = Running()
        session.running = running
        await begin(a, session, (50,))
        world.lose_arenas()
        with pytest.raises(NotOwned, match="no copy is left"):
            await a.keeper.committed(KEY, a.keeper.append(KEY, [round_record(_round(51), "x", 0)]))
        assert running.went == [Moved()] and a.keeper.held(KEY) is None
        status, code, message = await refused(get(world, "a", must_exist=True))
        assert (status, code) == (503, "session_unavailable") and "full history" in message
        with pytest.raises(OwnedElsewhere):
            await get(world, "b", anew=True)
        fresh, _ = await get(world, "a", anew=True)
        assert fresh.ledger == ()

    run(steps)


@pytest.mark.usefixtures("soon_believed_by_nobody")
def test_a_session_of_which_nothing_is_left_can_be_deleted():
    async def steps(world: World) -> None:
        await turn(world, "a", 1, 2, 3)
        world.kill("a")
        world.lose_arenas()
        b = world.replicas["b"]
        session, _ = await get(world, "b", must_exist=True, anew=True)
        await b.keeper.delete(session, 1.0)
        assert await b.link.locate(KEY) is None

    run(steps)


async def _never(command: Command) -> None:
    if isinstance(command, Export):
        await asyncio.sleep(1e9)


@pytest.mark.parametrize("far", ["begun", "named"])
def test_new_copies_that_were_never_finished_are_no_older_past_of_the_session_and_no_new_one(far: str):
    async def steps(world: World) -> None:
        epoch = (await turn(world, "a", 1, 2, 3)).epoch
        a = world.replicas["a"]
        a.service.before = _never
        if far == "named":  # it dies before it writes anything
            a.keeper.settle_again = lambda session: asyncio.sleep(1e9)  # pyright: ignore[reportAttributeAccessIssue]
        world.lose_arenas()
        ends = world.stores["x"].index
        await until(lambda: any(one.named is not None and one.named.epoch > epoch for one in ends()))
        if far == "begun":
            await until(lambda: any(one.history.end.sequence > 1 for one in ends()))
        world.kill("a")
        status, code, _ = await refused(get(world, "b"))
        assert (status, code) == (503, "session_unavailable")
        session, hit = await get(world, "b", anew=True)
        assert (session.ledger, hit) == ((), "none")

    run(steps)


# ------------------------------------------------------------------------------------------------ lost messages


@pytest.mark.parametrize("seed", range(3))
def test_a_session_outlives_lost_messages_a_new_directory_and_its_owner(seed: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("deployment.cluster.owned_sessions.TICK_SECONDS", 0.01)
    monkeypatch.setattr("deployment.ownership.sending.REPEAT_SECONDS", 0.02)
    monkeypatch.setattr("deployment.ownership.publication.PUT_SECONDS", 0.05)

    async def steps(world: World) -> None:
        chance = random.Random(seed)
        world.loses = lambda: chance.random() < 0.25
        before = await turn(world, "a", 1, 2, 3)
        world.start_directory()
        await turn(world, "a", 4, 5)
        world.kill("a")
        session, _ = await get(world, "b")
        assert session.ledger == before.ledger
        await turn(world, "b", 6)
        await world.replicas["b"].keeper.delete(session, 1.0)
        world.loses = lambda: False
        async with asyncio.timeout(5):
            while await world.replicas["b"].link.locate(KEY) is not None:
                await asyncio.sleep(0.05)
        assert not world.replicas["b"].owned._owned

    run(steps)


def test_a_directory_that_was_started_again_lets_an_owner_go_on():
    async def steps(world: World) -> None:
        session = await turn(world, "a", 1, 2, 3)
        world.start_directory()
        await asyncio.sleep(0.2)
        with pytest.raises(OwnedElsewhere):
            await get(world, "b")
        await turn(world, "a", 4)
        assert session.ledger[-1] == 4

    run(steps)
