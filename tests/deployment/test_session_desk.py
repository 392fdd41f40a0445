"""A delete or a cancel that meets a move is told where to ask, and has its effect there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from deployment.cluster.not_owned import OwnedElsewhere
from deployment.errors import RequestError
from deployment.moving import Document, ToDestination
from deployment.ownership.messages import Placed
from deployment.session_desk import SessionDesk
from deployment.state_limit import StateLimit
from deployment.turn_table import TurnTable
from deployment.wire import Route
from tests.deployment.places import KEY, TURN, Place, asked, ids_of, places, run, told

Call = Callable[[SessionDesk, Route], Awaitable[Any]]


def desk_of(place: Place) -> SessionDesk:
    async def used(tenant: str) -> int | None:
        return None

    limit = StateLimit(None, used, place.keeper.copies.make_room_of)
    forking = place.replica.forking
    return SessionDesk(place.replica.name, place.keeper, place.replica.creating, forking, limit, TurnTable())


def delete(desk: SessionDesk, route: Route) -> Awaitable[Any]:
    return desk.delete(route, KEY)


def cancel(desk: SessionDesk, route: Route) -> Awaitable[Any]:
    return desk.cancel_turn(route, KEY, TURN)


async def meets_a_move(a: Place, b: Place, call: Call) -> asyncio.Task[Any]:
    """What `call` answers that comes while the session is on its way from `a` to `b`, its turn standing still."""
    await told(await a.begin(asked(300)), 10)
    placed = await a.replica.link.locate(KEY)
    assert isinstance(placed, Placed)
    came: list[asyncio.Task[Any]] = []

    def comes(message: ToDestination) -> ToDestination:
        if isinstance(message, Document) and not came:
            came.append(asyncio.ensure_future(call(desk_of(a), Route("x", placement=placed))))
        return message

    b.replica.harm = comes
    assert await a.move(b)
    return came[0]


@pytest.mark.parametrize("call", [delete, cancel])
def test_a_call_that_ends_something_and_meets_a_move_ends_it_where_it_is_then(call: Call):
    async def steps() -> None:
        async with places() as (_, (a, b)):
            answer = await meets_a_move(a, b, call)
            with pytest.raises(OwnedElsewhere) as elsewhere:
                await answer
            assert elsewhere.value.owner == b.replica.name
            turn = await b.turn()
            await call(desk_of(b), Route("x", elsewhere.value.owner))
            assert turn.stream.over and len(ids_of(await told(turn))) < 300
            if call is delete:
                assert await a.replica.link.locate(KEY) is None
            else:
                assert [record.finish_reason for record in b.session.turns] == ["cancelled"]

    run(steps)


def test_a_fork_that_waits_for_the_end_of_a_turn_that_moves_has_no_older_past():
    async def fork(desk: SessionDesk, route: Route) -> Any:
        (session,) = desk._keeper.all()
        assert session.running is not None
        session.running.cancel()  # so that the fork waits for its end
        return await desk.fork(route, KEY, replace(KEY, session="child"), None)

    async def steps() -> None:
        async with places() as (_, (a, b)):
            with pytest.raises(RequestError) as refused:
                await (await meets_a_move(a, b, fork))
            assert (refused.value.refused.status, refused.value.refused.code) == (409, "session_busy")
            (await b.turn()).cancel()

    run(steps)


def test_a_delete_that_finds_its_session_deleted_by_another_one_has_nothing_left_to_do():
    async def steps() -> None:
        async with places() as (_, (a, _)):
            await told(await a.begin(asked(300)), 10)
            desk = desk_of(a)
            assert await asyncio.gather(desk.delete(Route("x"), KEY), desk.delete(Route("x"), KEY)) == [True, True]
            with pytest.raises(RequestError) as unknown:
                await desk.delete(Route("x"), KEY)
            assert unknown.value.refused.status == 404

    run(steps)


def test_a_delete_of_a_session_whose_first_turn_leaves_nothing_has_nothing_left_to_do():
    async def steps() -> None:
        async with places(prefill_chunk=16) as (_, (a, _)):
            held = await a.begin(asked(10, prompt="Count from 3 in steps of 2, 12 numbers. " * 40))
            assert not held.stream.opened
            assert await desk_of(a).delete(Route("x"), KEY)
            assert await a.replica.link.locate(KEY) is None

    run(steps)
