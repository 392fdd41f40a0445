"""How a replica gets and loses sessions, with the real directory and host stores and no Ray."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest

from deployment.cluster.not_owned import NotOwned, OwnedElsewhere
from deployment.engine.commands import Command, Export
from deployment.engine.errors import BAD_STATE, EngineError
from deployment.ownership import known_stores
from deployment.session_log import began_record, round_record
from deployment.wire import Moved, TurnRequest
from state.errors import StateError
from state.session_record import SessionRecord
from tests.deployment.in_process import FakeService, Replica, World, packed
from tests.deployment.keeping import KEY, PROMPT, Running, begin, get, refused, round_of, run, turn, until

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


def test_a_turn_whose_end_nobody_wrote_goes_on_at_the_next_owner_after_its_lastround_of():
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
        a.keeper._durable._written[KEY] = (("turn_end", 3),)
        await begin(a, stale, (50,))
        stale.running = running
        world.directory.replica_exited("a")
        session, _ = await get(world, "b")
        assert [turn.course(0).token_ids for turn in world.replicas["b"].told] == [(50,)]
        with pytest.raises(NotOwned):
            await a.keeper.committed(KEY, a.keeper.append(KEY, [round_record(round_of(51), "x", 0)]))
        assert running.moves == 1 and a.keeper.held(KEY) is None
        assert a.keeper._durable.checkpoints(KEY) == (), "what it wrote says nothing of what the next owner writes"
        await asyncio.sleep(0.01)
        assert stale.engine_id not in a.service.held and not a.keeper._sessions and not a.owned._owned
        assert session.ledger == stale.ledger

    run(steps)


def test_a_copy_at_the_wrong_moment_is_no_error():
    async def steps(world: World) -> None:
        stale = await turn(world, "a", 1, 2, 3)
        world.directory.replica_exited("a")
        await get(world, "b")
        await world.replicas["a"].keeper.copies.copy(stale)
        assert (await refused(world.replicas["a"].keeper.copies.settle(stale)))[:2] == (503, "session_unavailable")

    run(steps)


# ------------------------------------------------------------------------------------------------ lost copies


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
            await a.keeper.committed(KEY, a.keeper.append(KEY, [round_record(round_of(51), "x", 0)]))
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
        await b.keeper.ending.delete(session, 1.0)
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
            a.keeper.copies.settle_again = lambda session: asyncio.sleep(1e9)  # pyright: ignore[reportAttributeAccessIssue]
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
        await world.replicas["b"].keeper.ending.delete(session, 1.0)
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
