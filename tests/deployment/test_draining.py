"""A replica that is about to go gives its sessions away, those first for which somebody waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

from deployment.draining import AT_ONCE, BELIEVED_SECONDS, Drainer
from deployment.errors import session_busy
from deployment.ownership.messages import Drain
from deployment.ownership.words import NEVER, SessionKey
from deployment.replica import EngineReplica
from deployment.router import rendezvous
from deployment.session import Session
from deployment.wire import Moved
from tests.deployment.places import Place, asked, ids_of, places, run, told, undisturbed

TO = ("a", "b", "c")


class FakeKeeper:
    """Moves that take a moment. Sessions of `stuck` stay."""

    def __init__(self, *names: str) -> None:
        self.sessions = {SessionKey("t", name): Session(SessionKey("t", name), NEVER) for name in names}
        self.moved: list[tuple[str, str]] = []
        self.stuck: set[str] = set()
        self.under_way = self.most = 0

    def all(self) -> tuple[Session, ...]:
        return tuple(self.sessions.values())

    def held(self, key: SessionKey) -> Session | None:
        return self.sessions.get(key)

    async def move(self, session: Session, destination: str) -> bool:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0.01)
        self.under_way -= 1
        if session.key.session in self.stuck:
            raise session_busy(session.key.session, "it is being moved already")
        del self.sessions[session.key]
        self.moved.append((session.key.session, destination))
        return True


def running(keeper: FakeKeeper, test: Callable[[Drainer], Coroutine[Any, Any, None]], now: list[float]) -> None:
    async def run() -> None:
        await test(Drainer("me", keeper, lambda: now[0]))  # pyright: ignore[reportArgumentType]

    asyncio.run(run())


def test_sessions_go_where_a_new_one_of_their_name_would_begin_several_at_a_time():
    keeper = FakeKeeper(*(str(number) for number in range(20)))

    async def test(drainer: Drainer) -> None:
        drainer.told(Drain(TO))
        await drainer.empty()

    running(keeper, test, [0.0])
    assert dict(keeper.moved) == {str(n): rendezvous(str(SessionKey("t", str(n))), TO)[0] for n in range(20)}
    assert keeper.most == AT_ONCE


def test_a_session_whose_turn_runs_goes_first():
    keeper = FakeKeeper(*"123456")
    keeper.sessions[SessionKey("t", "6")].running = object()  # pyright: ignore[reportAttributeAccessIssue]

    async def test(drainer: Drainer) -> None:
        drainer.told(Drain(TO))
        await drainer.empty()

    running(keeper, test, [0.0])
    assert keeper.moved[0][0] == "6"


def test_who_reaches_a_replica_that_goes_is_sent_on_when_the_session_is_there():
    keeper = FakeKeeper("held", "stuck")
    keeper.stuck.add("stuck")

    async def test(drainer: Drainer) -> None:
        assert await drainer.sent_on(SessionKey("t", "held"), "me") is None, "nobody said anything yet"
        drainer.told(Drain(TO))
        key = SessionKey("t", "held")
        assert await drainer.sent_on(key, "me") == rendezvous(str(key), TO)[0]
        assert keeper.held(key) is None, "it is there when its client is sent on"
        assert await drainer.sent_on(SessionKey("t", "unknown"), None) in TO
        assert await drainer.sent_on(SessionKey("t", "unknown"), "a") in TO
        assert await drainer.sent_on(SessionKey("t", "unknown"), "me") is None, "whoever else is asked names this one"
        assert drainer.destination("no session") in TO
        assert await drainer.sent_on(SessionKey("t", "stuck"), "me") is None, "it is served here as long as it is here"

    running(keeper, test, [0.0])


def test_nobody_is_sent_on_without_a_place_to_go_or_after_the_word_grew_old():
    keeper = FakeKeeper("one")
    now = [0.0]

    async def test(drainer: Drainer) -> None:
        drainer.told(Drain(()))
        await drainer.empty()
        assert keeper.all() and drainer.destination("x") is None
        drainer.told(Drain(TO))
        assert drainer.destination("x") in TO
        await drainer.empty()
        now[0] = BELIEVED_SECONDS + 1
        assert drainer.destination("x") is None

    running(keeper, test, now)


def test_a_turn_that_nobody_could_take_goes_on_with_its_sessions_next_owner():
    async def steps() -> None:
        async with places() as (_, (a, b)):
            turn = await a.begin(asked(64))
            before = ids_of(await told(turn, tokens=5))
            reading = asyncio.create_task(told(turn))
            await leaves(a)
            assert isinstance((await reading)[-1], Moved), "nobody is told that it failed"
            a.die()
            assert ids_of(await told(await b.turn())) == undisturbed(asked(64))
            assert before and [record.finish_reason for record in b.session.turns] == ["length"]

    run(steps)


async def leaves(place: Place) -> None:
    """As Serve has a replica end, where no other one stays."""

    async def staying(beside: str) -> tuple[str, ...]:
        return ()

    replica = EngineReplica.__new__(EngineReplica)
    replica._id, replica._keeper, replica._service = place.replica.name, place.keeper, place.service
    replica._turns, replica._drainer = place.desk._table, Drainer(place.replica.name, place.keeper)
    replica._cluster = SimpleNamespace(staying=staying)  # pyright: ignore
    replica._started, replica._expiring = True, asyncio.create_task(asyncio.sleep(60))
    await replica.__del__()
    replica._started = False
