"""Checkpoints and forks of the past on real engines: a fork says what its parent said, whatever its state is."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable
from typing import Any

import numpy as np
import pytest

from deployment.cluster.not_owned import OwnedElsewhere
from deployment.engine.commands import Drop, Fork
from deployment.engine.errors import OVERLOADED, EngineError
from deployment.errors import RequestError
from deployment.fork_points import ForkAt
from deployment.forking import MOST_CHECKPOINTS
from deployment.held_turn import HeldTurn
from deployment.ownership.messages import Image, Placed
from deployment.ownership.words import Member, SessionKey
from deployment.session import Session
from deployment.session_desk import SessionDesk
from deployment.state_limit import StateLimit
from deployment.turn_table import TurnTable
from deployment.wire import Route, TurnEvent, TurnRequest
from tests.deployment.in_process import World
from tests.deployment.places import KEY, Place, ids_of, opened, places, run, told

HOW = {"temperature": 0.9, "top_k": 0, "top_p": 1.0, "seed": 11, "ignore_eos": True, "tenant": KEY.tenant}
ASKED = "What is my locker code?"
_turns = itertools.count()


async def heard(place: Place, key: SessionKey, text: str, mode: Any = "append", tokens: int = 10) -> list[TurnEvent]:
    """One turn."""
    return await told(await begun(place, key, text, mode, tokens))


async def begun(
    place: Place, key: SessionKey, text: str, mode: Any = "append", tokens: int = 10, **how: Any
) -> HeldTurn:
    message = {"role": "user", "content": text}
    how = {**HOW, **how}
    return await place.begin(TurnRequest(f"{next(_turns):032x}", mode, (message,), key, max_tokens=tokens, **how))


async def say(place: Place, key: SessionKey, text: str, mode: Any = "append") -> tuple[int, ...]:
    return ids_of(await heard(place, key, text, mode))


async def first_turns(place: Place) -> tuple[Session, tuple[int, ...]]:
    """A session with a checkpoint after its first turn, and what it said in its second one."""
    await say(place, KEY, "My locker code is 4172.", "history")
    await place.replica.forking.checkpoint(place.session, "one")
    return place.session, await say(place, KEY, ASKED)


async def fork(place: Place, at: ForkAt, session: Session | None = None) -> SessionKey:
    key = SessionKey(KEY.tenant, f"child-{next(_turns)}")
    await place.replica.forking.fork(session or place.session, key, at)
    return key


async def acquired(world: World, place: Place) -> Session:
    placed = await place.replica.link.locate(KEY)
    assert isinstance(placed, Placed)
    session, _ = await place.keeper.acquire(KEY, placed, must_exist=True)
    return session


async def refused(work: Awaitable[Any]) -> tuple[int, str]:
    with pytest.raises(RequestError) as caught:
        await work
    return caught.value.refused.status, caught.value.refused.code


def test_a_fork_of_the_past_goes_on_as_its_parent_did_with_the_state_that_was_there():
    async def steps() -> None:
        async with places() as (_, (a, _b)):
            session, second = await first_turns(a)
            first = session.turns[0]
            for at in (ForkAt(checkpoint="one"), ForkAt(turn=first.id), ForkAt(frontier=first.frontier)):
                key = await fork(a, at)
                child = a.keeper.held(key)
                assert child is not None and child.ledger == session.ledger[: first.frontier + 1]
                assert child.transcript == session.transcript[:2] and [turn.id for turn in child.turns] == [first.id]
                assert max(frontier for _, frontier in child.checkpoints) == first.frontier
                events = await heard(a, key, ASKED)
                assert ids_of(events) == second
                assert opened(events).reused >= first.frontier
            assert await say(a, KEY, "Thanks.") and len(session.turns) == 3, "the parent is as it was"

    run(steps)


def test_a_seed_is_a_turns_so_that_a_fork_says_what_its_parent_did_by_the_same_one_and_draws_its_own_without():
    async def steps() -> None:
        async with places() as (_, (a, _b)):
            await say(a, KEY, "My locker code is 4172.", "history")
            begin = a.session.turns[0]
            asked = "Tell me a story."
            how: Any = {"temperature": 2.0}
            drawn = await told(await begun(a, KEY, asked, seed=None, **how))
            seed = a.session.turns[1].seed
            assert opened(drawn).seed == seed != begin.seed == HOW["seed"]
            keeps, draws = [await fork(a, ForkAt(turn=begin.id)) for _ in range(2)]
            assert ids_of(await told(await begun(a, keeps, asked, seed=seed, **how))) == ids_of(drawn)
            assert opened(await told(await begun(a, draws, asked, seed=None, **how))).seed != seed

    run(steps)


def test_a_checkpoint_outlives_its_replica_and_a_history_that_leaves_it():
    async def steps() -> None:
        async with places() as (world, (a, b)):
            _, second = await first_turns(a)
            await say(a, KEY, "Something else.", "history")
            a.die()
            session = await acquired(world, b)
            first = session.turns[0].id
            assert await refused(fork(b, ForkAt(turn=session.turns[1].id), session)) == (409, "turn_left")
            for at in (ForkAt(checkpoint="one"), ForkAt(turn=first)):
                assert await say(b, await fork(b, at, session), ASKED) == second

    run(steps)


@pytest.mark.parametrize("where", ["host store", "nowhere"])
def test_a_fork_whose_state_the_device_has_let_go_of_is_made_of_what_is_left(where: str):
    async def steps() -> None:
        async with places() as (_, (a, _b)):
            session, second = await first_turns(a)
            await a.service.call(Drop("d", session.engine_id))

            async def nothing(member: Member, key: SessionKey) -> tuple[Image, ...]:
                return ()

            if where == "nowhere":
                a.replica.link.images = nothing
            key = await fork(a, ForkAt(checkpoint="one"))
            child = a.keeper.held(key)
            assert child is not None and bool(child.checkpoints) == (where == "host store")
            assert await say(a, key, ASKED) == second

    run(steps)


def test_a_move_brings_the_state_of_all_checkpoints():
    async def steps() -> None:
        async with places() as (world, (a, b)):
            session, second = await first_turns(a)
            await a.replica.forking.checkpoint(session, "two")
            await say(a, KEY, "Thanks.")
            frontiers = [turn.frontier for turn in session.turns[:2]]
            await a.move(b)
            moved = await acquired(world, b)
            for at, frontier in zip((ForkAt(checkpoint="one"), ForkAt(checkpoint="two")), frontiers, strict=True):
                key = await fork(b, at, moved)
                child = b.keeper.held(key)
                assert child is not None and ("explicit", frontier) in child.checkpoints
                assert at.checkpoint != "one" or await say(b, key, ASKED) == second

    run(steps)


def test_a_checkpoint_that_was_deleted_is_not_found_and_holds_no_memory():
    async def steps() -> None:
        async with places() as (_, (a, _b)):
            session, _second = await first_turns(a)
            forking = a.replica.forking
            kept = [point.image for point in session.fork_points if point.name == "one"]
            assert kept == [session.turns[0].frontier]
            await forking.delete_checkpoint(session, "one")
            assert await refused(forking.delete_checkpoint(session, "one")) == (404, "checkpoint_not_found")
            assert await refused(fork(a, ForkAt(checkpoint="one"))) == (404, "checkpoint_not_found")
            assert "explicit" not in [kind for kind, _ in session.checkpoints]

    run(steps)


def test_what_cannot_be_kept_is_refused_by_name():
    async def steps() -> None:
        async with places() as (_, (a, _b)):
            forking = a.replica.forking
            empty = await a.replica.creating.empty(SessionKey(KEY.tenant, "empty"))
            assert await refused(forking.checkpoint(empty, None)) == (409, "session_empty")
            session, _second = await first_turns(a)
            assert await refused(forking.checkpoint(session, "one")) == (409, "checkpoint_exists")
            made = [await forking.checkpoint(session, None) for _ in range(MOST_CHECKPOINTS - 1)]
            assert len({point.name for point in made}) == MOST_CHECKPOINTS - 1
            assert await refused(forking.checkpoint(session, None)) == (409, "too_many_checkpoints")
            session.moving = True
            assert await refused(forking.checkpoint(session, "x")) == (409, "session_busy")

    run(steps)


def test_the_past_can_be_forked_while_a_turn_runs_but_not_kept():
    async def steps() -> None:
        async with places() as (_, (a, _b)):
            session, second = await first_turns(a)
            long = await begun(a, KEY, "Count from 3 in steps of 2, 60 numbers.", tokens=200)
            assert await refused(a.replica.forking.checkpoint(session, "x")) == (409, "session_busy")
            child = await fork(a, ForkAt(checkpoint="one"))
            assert session.running is long
            assert await say(a, child, ASKED) == second
            long.cancel()
            await long.ended()

    run(steps)


def test_a_fork_for_which_the_device_has_no_room_is_made_of_its_tokens():
    async def steps() -> None:
        async with places() as (_, (a, _b)):
            session, expected = await first_turns(a)
            call = a.service.call

            async def full(command: Any) -> Any:
                if isinstance(command, Fork):
                    raise EngineError(OVERLOADED, "no room")
                return await call(command)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(a.service, "call", full)
                child = await fork(a, ForkAt(checkpoint="one"), session)
            assert await say(a, child, ASKED) == expected

    run(steps)


# ------------------------------------------------------------------------------------------------ asked for again


AGAIN = Route("x", again=True)
CHILD, EMPTY, IMPORTED = (SessionKey(KEY.tenant, name) for name in ("child", "empty", "imported"))


def desk(place: Place, limit: int | None = None) -> SessionDesk:
    """`limit`: bytes; what the tenant keeps is 1."""
    limit_of = StateLimit(limit, _one, place.keeper.copies.make_room_of)
    forking = place.replica.forking
    return SessionDesk(place.replica.name, place.keeper, place.replica.creating, forking, limit_of, TurnTable())


async def _one(tenant: str) -> int:
    return 1


@pytest.mark.parametrize("lost", [True, False], ids=["its replica died", "it was only taken for dead"])
def test_what_a_lost_replica_has_made_is_not_refused_since_it_is_there(lost: bool):
    async def steps() -> None:
        async with places() as (_, (a, b)):
            await first_turns(a)

            async def asked(at: SessionDesk, route: Route) -> list[Any]:
                return [
                    await at.fork(route, KEY, CHILD, ForkAt(checkpoint="one")),
                    await at.checkpoint(route, KEY, "two"),
                ]

            made = await asked(desk(a), Route("x"))
            if lost:
                a.die()
            here = b if lost else a
            again = await asked(desk(here), AGAIN)
            assert [one.frontier for one in again] == [one.frontier for one in made] and again[1].name == "two"
            for work in (
                desk(here).fork(Route("x"), KEY, CHILD, ForkAt(checkpoint="one")),
                desk(here).checkpoint(Route("x"), KEY, "two"),
            ):
                assert (await refused(work))[0] == 409, "it is another request"
            await say(here, CHILD, ASKED)
            await say(here, KEY, "Thanks.")
            assert (await refused(desk(here).fork(AGAIN, KEY, CHILD, ForkAt(checkpoint="one"))))[0] == 409
            assert (await refused(desk(here).checkpoint(AGAIN, KEY, "two")))[0] == 409
            assert await desk(here).delete_checkpoint(Route("x"), KEY, "two")
            assert await desk(here).delete_checkpoint(AGAIN, KEY, "two"), "it is gone, as was asked"
            assert (await refused(desk(here).delete_checkpoint(Route("x"), KEY, "two")))[0] == 404

    run(steps)


@pytest.mark.parametrize("lost", [True, False], ids=["its replica died", "it was only taken for dead"])
def test_what_a_lost_replica_was_asked_to_make_is_made_once_and_found(lost: bool):
    async def steps() -> None:
        async with places() as (_, (a, b)):
            await first_turns(a)
            document = np.frombuffer(await a.keeper.copies.document(a.session), np.uint8)
            made = [
                await desk(a).create(Route("x"), EMPTY, alone=False),
                await desk(a).import_(Route("x"), IMPORTED, document),
            ]
            if lost:
                a.die()
            here = desk(b if lost else a)
            full = desk(b if lost else a, limit=1)
            again = [await full.create(AGAIN, EMPTY, alone=False), await full.import_(AGAIN, IMPORTED, document)]
            assert (await refused(full.create(AGAIN, CHILD, alone=False)))[0] == 429, "there is nothing of it yet"
            assert [one.frontier for one in again] == [one.frontier for one in made]
            for work in (here.create(Route("x"), EMPTY, False), here.import_(Route("x"), IMPORTED, document)):
                assert (await refused(work))[0] == 409, "it is another request"
            assert (await refused(here.create(AGAIN, IMPORTED, False)))[0] == 409, "it is another's"
            assert (await refused(here.import_(AGAIN, EMPTY, document)))[0] == 409, "it is another's"

    run(steps)


def test_what_was_made_where_nobody_asks_is_looked_for_where_it_is():
    async def steps() -> None:
        async with places() as (_, (a, b)):
            await desk(a).create(Route("x"), EMPTY, alone=False)
            with pytest.raises(OwnedElsewhere) as caught:
                await desk(b).create(AGAIN, EMPTY, alone=False)
            assert caught.value.owner == a.replica.name
            await first_turns(b)
            assert (await refused(desk(b).fork(AGAIN, KEY, EMPTY, None)))[0] == 409, "its parent is here"

    run(steps)


@pytest.mark.parametrize("again", [True, False])
def test_a_delete_whose_replica_was_lost_and_that_another_finds_done_has_deleted(again: bool):
    async def steps() -> None:
        async with places() as (_, (a, b)):
            await first_turns(a)
            await desk(a).delete(Route("x"), KEY)
            a.die()
            if again:
                assert await desk(b).delete(AGAIN, KEY)
            else:
                assert (await refused(desk(b).delete(Route("x"), KEY)))[0] == 404, "nobody has done it for who asks"

    run(steps)
