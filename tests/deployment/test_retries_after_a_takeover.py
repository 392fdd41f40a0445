"""A client asks again for a turn that has come to another replica meanwhile, with its session, or does so then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any, cast

import pytest

from deployment.cluster.not_owned import OwnedElsewhere
from deployment.engine.events import Round
from deployment.event_ids import digest_of
from deployment.lasting_stream import LastingStream
from deployment.replica_watch import ReplicaWatch
from deployment.session import Session
from deployment.session_log import Course, LoggedTurn, began_record
from deployment.telling import told
from deployment.wire import Closed, Route, TurnAnswer, TurnEvent, TurnRequest
from state.names import SessionKey
from tests.deployment.places import KEY as SESSION
from tests.deployment.places import Place, asked, ids_of, opened, places, run, undisturbed
from tests.deployment.places import told as told_of
from tests.deployment.test_turn_desk import KEY, PROMPT, Desk, Keeper


class TakenOver(Keeper):
    """The session comes with a turn that its log tells."""

    def __init__(self, desk: Desk, asked: TurnRequest, course: Course) -> None:
        super().__init__()
        self._desk = desk
        self._logged: LoggedTurn | None = LoggedTurn(began_record(asked, PROMPT, 7, 0.0), {0: course})
        self._records = 0

    async def acquire(self, key: SessionKey, believed: Any, **how: Any) -> tuple[Session, str]:
        if (logged := self._logged) is not None:
            self._logged = None
            self._desk.desk.resume(self.session, logged)
        return self.session, "host"

    def append(self, key: SessionKey, records: Any) -> int:
        self._records += len(records)
        return self._records

    async def committed(self, key: SessionKey, sequence: int) -> None: ...

    def turn_began(self, session: Session) -> None: ...


@pytest.mark.parametrize("how", [{"idempotency_key": "k"}, {"repeated": True}])
def test_a_retry_reads_the_turn_that_its_session_brought_along_and_does_not_cancel_it(how: dict[str, Any]):
    async def steps() -> None:
        d = Desk()
        first = d.asked(key=KEY, **how)
        start = len(PROMPT.ids)
        d.keeper = TakenOver(d, first, Course([Round(first.turn, start, (30,), 0, None)]))
        d.desk._keeper = cast(Any, d.keeper)
        again = d.asked(key=KEY, **how)
        held = await d.take(again)
        assert held.id == first.turn != again.turn and not held.abandoned
        async with d.reading(held) as told:
            await told()
            assert (await told()).id.endswith(digest_of((30,)))
        held.cancel()
        await held.ended()

    asyncio.run(steps())


class Replicas:
    """What a stream asks of replicas, which are two places here; the directory is the first one's."""

    def __init__(self, *places: Place) -> None:
        self._places = {place.replica.name: place for place in places}
        self.locate = places[0].replica.link.locate
        self.watch = ReplicaWatch(self._is_lost)

    async def _is_lost(self, replica: str) -> bool:
        return False

    def told(self, method: str, route: Route, *args: Any) -> AsyncGenerator[TurnAnswer, None]:
        desk = self._places[route.replica or next(iter(self._places))].desk
        if method == "take_turn":
            return told(lambda: desk.take(route, *args), None)
        assert method == "follow_turn"
        *which, after = args
        return told(lambda: desk.find(route, *which), after)


@pytest.mark.parametrize("how", [{"idempotency_key": "k"}, {"repeated": True}])
def test_a_retry_that_reads_a_running_turn_reads_on_where_that_moves(how: dict[str, Any]):
    async def steps() -> None:
        async with places() as (_, (a, b)):
            first = await a.begin(asked(100, **how))
            replicas: Any = Replicas(a, b)
            events: list[TurnEvent] = []
            async for one in LastingStream(replicas, replicas).taken(replace(asked(100, **how), turn="b" * 32)):
                events.append(one.event)
                if len(ids_of(events)) >= 10 and a.keeper.held(SESSION) is not None:
                    assert await a.move(b)
            assert opened(events).turn == first.id and isinstance(events[-1], Closed)
            assert ids_of(events) == undisturbed(asked(100))

    run(steps)


@pytest.mark.parametrize("lost", [True, False])
def test_a_first_turn_that_two_replicas_are_asked_for_since_nobody_told_that_it_began_is_one_turn(lost: bool):
    async def steps() -> None:
        async with places() as (_, (a, b)):
            begun = await a.begin(asked(24))
            if lost:
                await told_of(begun, tokens=5)
                a.die()
                again = await b.begin(asked(24))
            else:
                with pytest.raises(OwnedElsewhere) as caught:
                    await b.begin(asked(24))
                assert caught.value.owner == a.replica.name
                again = await a.begin(asked(24))
                assert again is begun
            assert again.id == begun.id and ids_of(await told_of(again)) == undisturbed(asked(24))
            assert [record.id for record in (b if lost else a).session.turns] == [begun.id], "nothing began anew"

    run(steps)
