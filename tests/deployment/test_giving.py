"""A session, and the turn that runs in it, go to another replica."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from deployment.cluster.not_owned import OwnedElsewhere
from deployment.session_log import round_record
from deployment.wire import Moved
from tests.deployment.in_process import World
from tests.deployment.keeping import KEY, Running, begin, get, refused, round_of, run, turn


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
        await world.replicas["a"].keeper.write(KEY, [round_record(round_of(51), request.turn, 0)])
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
