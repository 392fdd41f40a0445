"""A client comes back after a night. The device has made room meanwhile, and the replica is another one."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from deployment.engine.commands import Submit
from deployment.errors import Refused, RequestError
from deployment.event_ids import parse_event_id
from deployment.lasting_stream import LastingStream
from deployment.replica_watch import ReplicaWatch
from deployment.telling import events, told
from deployment.wire import Delta, NotHere, Route, Told, TurnAnswer, TurnEvent, TurnRequest
from tests.deployment.in_process import World
from tests.deployment.places import KEY, TURN, Place, asked, ids_of, images, opened, places, run
from tests.deployment.places import told as told_of

HOURS = 8 * 3600.0
LATER = ({"role": "user", "content": "And the three after those?"},)


class Night:
    """Whatever tells the time of day says so once it is over."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._now, self._patch = time.time, patch

    def is_over(self) -> None:
        self._patch.setattr(time, "time", lambda: self._now() + HOURS)


def appended(**fields: Any) -> TurnRequest:
    return replace(asked(24, **fields), turn=f"{8:032x}", mode="append", messages=LATER)


def again(request: TurnRequest, **fields: Any) -> TurnRequest:
    """A request that comes again is a turn of its own until it is known."""
    return replace(request, turn=f"{99:032x}", **fields)


def events_of(told: list[Told]) -> list[TurnEvent]:
    return [one.event for one in told]


class Ingress:
    """The ingress's part: it asks whom the directory names, and one that is dead answers nothing."""

    def __init__(self, *places: Place) -> None:
        self._places = {place.replica.name: place for place in places}
        self._locate = places[-1].replica.link.locate
        self.watch = ReplicaWatch(self._is_lost)
        replicas: Any = self
        self.streams = LastingStream(replicas, replicas)

    async def locate(self, key: Any) -> Any:
        return await self._locate(key)

    async def followed(self, turn: str, after: str) -> list[Told]:
        return [one async for one in self.streams.followed(KEY, turn, parse_event_id(after, "after"), None)]

    async def taken(self, request: TurnRequest) -> list[Told]:
        return [one async for one in self.streams.taken(request)]

    async def told(self, method: str, route: Route, *args: Any) -> AsyncGenerator[TurnAnswer, None]:
        place = self._places[route.replica or list(self._places)[-1]]
        if place.replica.link.dead:
            raise RayActorError
        match method, args:
            case "take_turn", (request,):
                answers = told(lambda: place.desk.take(route, request), None)
            case "follow_turn", (key, turn, after):
                answers = told(lambda: place.desk.find(route, key, turn), after)
            case _, (key, turn, after):
                held = place.desk._table.find(turn, key)
                if held is None:
                    yield NotHere(place.replica.name)
                    return
                answers = events(held, after)
        async for answer in answers:
            yield answer

    async def lost(self, replica: str) -> None: ...

    async def _is_lost(self, replica: str) -> bool:
        return False


async def after_a_while(fate: str, world: World, a: Place, b: Place) -> Place:
    """Where the session is served from then on."""
    session = a.session
    assert images(world)
    for other in range(16):  # its state makes room for that of others, which spare more
        if a.service.was_evicted(session.engine_id):
            break
        prompt = (9 + other, *[8] * (len(session.ledger) + 40))
        said = Submit(f"o{other}", prompt, max_tokens=1, session=f"other {other}", tenant=KEY.tenant)
        async for _ in a.service.turn(said):
            pass
    assert a.service.was_evicted(session.engine_id)
    if fate == "killed":
        a.die()
    return b if fate == "killed" else a


@pytest.mark.parametrize("fate", ["evicted", "killed"])
def test_an_append_turn_goes_on_hours_later_and_the_old_turn_is_still_told(monkeypatch: pytest.MonkeyPatch, fate: str):
    first, second = asked(24, idempotency_key="k"), appended()

    async def steps() -> None:
        async with places() as (_, (a, _)):
            await told_of(await a.begin(first))
            undisturbed = ids_of(await told_of(await a.begin(second)))
        async with places() as (world, (a, b)):
            before = [one async for one in (await a.begin(first)).read()]
            Night(monkeypatch).is_over()
            here = await after_a_while(fate, world, a, b)
            later = await told_of(await here.begin(second))
            assert ids_of(later) == undisturbed and opened(later).reused > opened(events_of(before)).prompt_tokens
            ingress = Ingress(a, b)
            ids = [one.id for one in before if isinstance(one.event, Delta)]
            followed = await ingress.followed(TURN, ids[1])
            assert [one.id for one in followed if isinstance(one.event, Delta)] == ids[2:]
            replayed = events_of(await ingress.taken(again(first)))
            assert opened(replayed).turn == TURN and ids_of(replayed) == ids_of(events_of(before))
            assert [record.id for record in here.session.turns] == [TURN, second.turn]

    run(steps)


def test_a_turn_whose_events_went_with_its_replica_is_gone_and_does_not_begin_anew(monkeypatch: pytest.MonkeyPatch):
    """All but the newest one, which the session's log has."""
    first, second = asked(24, idempotency_key="k"), appended()

    async def steps() -> None:
        async with places() as (world, (a, b)):
            before = [one async for one in (await a.begin(first)).read()]
            await told_of(await a.begin(second))
            Night(monkeypatch).is_over()
            await after_a_while("killed", world, a, b)
            ingress = Ingress(a, b)
            with pytest.raises(RequestError, match="not kept any more; its session's transcript has its text"):
                await ingress.followed(TURN, before[1].id)
            (refused,) = events_of(await ingress.taken(again(first)))
            assert isinstance(refused, Refused) and (refused.status, refused.code) == (410, "turn_not_kept")
            assert [record.id for record in b.session.turns] == [TURN, second.turn]

    run(steps)


@pytest.mark.parametrize("hours_later", [False, True])
@pytest.mark.parametrize("fate", ["evicted", "killed"])
def test_a_retry_without_a_key_is_another_turn_by_then(monkeypatch: pytest.MonkeyPatch, fate: str, hours_later: bool):
    async def steps() -> None:
        async with places() as (world, (a, b)):
            await told_of(await a.begin(asked(24)))
            if hours_later:
                Night(monkeypatch).is_over()
            here = await after_a_while(fate, world, a, b)
            retried = await here.begin(again(asked(24), repeated=True))
            await told_of(retried)
            assert (retried.id == TURN) is not hours_later
            assert len(here.session.turns) == 1 + hours_later

    run(steps)
