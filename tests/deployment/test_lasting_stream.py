"""One stream of a turn's events, whatever becomes of the replicas that tell it. The replicas here say what they are
told to say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from deployment.engine.events import Round
from deployment.errors import Refused
from deployment.event_ids import EventId, digest_of
from deployment.keyed_turns import is_keyed
from deployment.lasting_stream import LastingStream
from deployment.ownership.messages import Placed
from deployment.ownership.words import Epoch, SessionKey
from deployment.replica_watch import ReplicaWatch
from deployment.wire import (
    Closed,
    Delta,
    Elsewhere,
    Moved,
    NotHere,
    Opened,
    Received,
    Route,
    Told,
    TurnEvent,
    TurnRequest,
)

TURN = "a" * 32
KEY = SessionKey("t" * 64, "s")
START = 10
LOST = object()
"""The replica dies at this point of its script."""


def rounds_of(told: Told) -> tuple[Round, ...]:
    assert isinstance(told.event, Delta)
    return told.event.rounds


SEED = 7


def opened(replica: str = "r1", n: int = 1) -> Told:
    return Told("", Opened(replica, "m", SEED, START, 0, None, TURN, n))


def delta(token: int, at: int, choice: int = 0, n: int = 1, rounds: bool = False) -> Told:
    """The `at`-th id of a choice, counted from 0; its id names all ids so far as if they were alike."""
    position = START + at + 1
    place = EventId(TURN, position, digest_of([token] * (at + 1)), choice if n > 1 else None)
    made = (Round(TURN, START + at, (token,), 0, 0, ()),) if rounds else ()
    return Told(str(place), Delta("", str(token), choice, (), (token,), position, 0, made))


def closed(choice: int = 0) -> Told:
    return Told("end", Closed("stop", 1, (), 1.0, 0.1, None, choice))


MOVED = Told("", Moved())


class Fake:
    """`Replicas` and `Cluster`: each call is answered by the next script."""

    def __init__(self, *scripts: list[Any], owner: str | None = "r1") -> None:
        self.scripts = list(scripts)
        self.calls: list[tuple[str, Route, tuple[Any, ...]]] = []
        self.suspected: list[str | None] = []
        self.owner = owner
        self.leases_over: set[str] = set()
        self.watch = ReplicaWatch(self.is_lost)

    async def is_lost(self, replica: str) -> bool:
        return replica in self.leases_over

    async def instead(self, lost: str | None, affinity: str) -> NotHere:
        return NotHere(lost or "", "r2")

    async def told(self, method: str, route: Route, *args: Any) -> AsyncGenerator[Any, None]:
        self.calls.append((method, route, args))
        script = self.scripts.pop(0)
        for answer in script:
            await asyncio.sleep(0)
            if answer is LOST:
                raise RayActorError
            if isinstance(answer, float):  # nothing is told for so long
                await asyncio.sleep(answer)
                continue
            yield answer

    async def lost(self, replica: str | None) -> None:
        self.suspected.append(replica)

    async def locate(self, key: SessionKey) -> Placed | None:
        return Placed(key, Epoch(1, 1), self.owner, ()) if self.owner else None


def taken(fake: Fake, turn: TurnRequest) -> list[TurnEvent]:
    async def scenario() -> list[TurnEvent]:
        stream: Any = LastingStream(fake, fake)  # pyright: ignore[reportArgumentType]
        async with asyncio.timeout(10):
            return [told.event async for told in stream.taken(turn)]

    return asyncio.run(scenario())


def followed(fake: Fake, after: EventId | None = None) -> list[TurnEvent]:
    async def scenario() -> list[TurnEvent]:
        stream: Any = LastingStream(fake, fake)  # pyright: ignore[reportArgumentType]
        async with asyncio.timeout(10):
            return [told.event async for told in stream.followed(KEY, TURN, after, None)]

    return asyncio.run(scenario())


def asked(key: SessionKey | None = KEY, **more: Any) -> TurnRequest:
    return TurnRequest(TURN, "history", (), key, tenant="t" * 64, **more)


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployment.lasting_stream.AGAIN_SECONDS", 0.001)


# ------------------------------------------------------------------------------------------------ with a session


def test_a_replica_that_dies_before_the_first_event_is_asked_again_for_the_same_turn():
    fake = Fake([LOST], [opened("r2"), delta(5, 0), closed()])
    events = taken(fake, asked())
    assert events == [opened("r2").event, delta(5, 0).event, closed().event]
    assert [method for method, _, _ in fake.calls] == ["take_turn", "take_turn"]
    assert all(args[0].turn == TURN for _, _, args in fake.calls) and fake.suspected == ["r1"]


@pytest.mark.parametrize("end", [LOST, MOVED, NotHere("r1", "r2")], ids=["dies", "moves", "is not the owner"])
def test_a_session_turn_is_followed_where_it_goes_on_after_the_last_event(end: Any):
    fake = Fake([opened(), delta(5, 0), end], [opened("r2"), delta(5, 1), closed()])
    assert taken(fake, asked()) == [opened().event, delta(5, 0).event, delta(5, 1).event, closed().event]
    method, _, (key, turn, after) = fake.calls[1]
    assert (method, key, turn) == ("follow_turn", KEY, TURN) and str(after) == delta(5, 0).id


@pytest.mark.parametrize("key", [KEY, None])
def test_who_asked_again_for_a_turn_that_runs_follows_that_turn(key: SessionKey | None):
    fake = Fake([opened(), delta(5, 0), MOVED], [opened("r2"), delta(5, 1), closed()])
    again = replace(asked(key, idempotency_key="k"), turn="b" * 32)
    assert taken(fake, again)[1:] == [delta(5, 0).event, delta(5, 1).event, closed().event]
    method, _, (_, turn, _) = fake.calls[1]
    assert (method, turn) == ("follow_turn", TURN)


@pytest.mark.parametrize("read", [lambda fake: taken(fake, asked()), followed], ids=["begun", "followed"])
def test_two_replicas_that_name_each_other_are_asked_again_after_a_pause(read: Any, monkeypatch: pytest.MonkeyPatch):
    """As when one that is about to go is the owner of what it does not hold: by its own word, or by nobody's name."""
    pauses: list[float] = []

    async def sleep(seconds: float, sleep: Any = asyncio.sleep) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr("deployment.lasting_stream.asyncio.sleep", sleep)
    monkeypatch.setattr("deployment.lasting_stream.AGAIN_SECONDS", 0.125)
    circle = [[NotHere("", "r2")], [NotHere("r2", "r1")]]
    fake = Fake(*circle, *circle, [opened(), delta(5, 0), closed()])
    assert read(fake) == [opened().event, delta(5, 0).event, closed().event]
    assert [route.replica for _, route, _ in fake.calls] == ["r1", "r2", "r1", "r2", "r1"]
    assert pauses.count(0.125) == 2, "one that is named and was not asked is asked at once"


def test_a_turn_that_is_lost_before_it_published_anything_is_followed_from_its_beginning():
    fake = Fake([opened(), LOST], [LOST], [opened("r2"), delta(5, 0), closed()])
    assert taken(fake, asked()) == [opened().event, delta(5, 0).event, closed().event]
    assert [call[0] for call in fake.calls] == ["take_turn", "follow_turn", "follow_turn"]
    assert [call[2][2] for call in fake.calls[1:]] == [None, None]


def test_a_refusal_is_the_end_and_a_session_that_is_gone_is_one():
    refused = Told("", Refused(409, "session_busy", "x"))
    assert taken(Fake([refused]), asked()) == [refused.event]
    fake = Fake([opened(), delta(5, 0), MOVED])

    async def nowhere(key: SessionKey) -> Placed | None:
        return None if fake.calls else Placed(key, Epoch(1, 1), "r1", ())

    fake.locate = nowhere
    last = taken(fake, asked())[-1]
    assert isinstance(last, Refused) and last.status == 404


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployment.replica_watch.SILENT_SECONDS", 0.02)
    monkeypatch.setattr("deployment.replica_watch.LOOK_SECONDS", 0.01)


def test_a_silent_replica_whose_lease_is_over_is_left_for_another_before_any_connection_ends(impatient: None):
    for key in (KEY, None):
        fake = Fake([opened(), delta(5, 0, rounds=key is None), 9.0], [opened("r2"), delta(5, 1), closed()])
        fake.leases_over.add("r1")
        told = taken(fake, asked(key))
        assert [type(event) for event in told] == [Opened, Delta, Delta, Closed]
        assert [route.replica for _, route, _ in fake.calls] == ["r1" if key else None, "r2"]


@pytest.mark.parametrize("key", [KEY, None])
def test_a_first_turn_that_nobody_says_it_has_is_asked_of_another_by_name(key: SessionKey | None, impatient: None):
    fake = Fake([9.0], [0.1, opened("r2"), delta(5, 0), closed()], owner=None)
    assert taken(fake, asked(key)) == [opened("r2").event, delta(5, 0).event, closed().event]
    assert [(route.replica, route.receipt) for _, route, _ in fake.calls] == [(None, True), ("r2", False)]
    assert all(args[0].turn == TURN for _, _, args in fake.calls), "whoever began it finds it"


def test_a_first_turn_is_waited_for_where_somebody_has_it_and_followed_elsewhere_once_his_lease_is_over(
    impatient: None,
):
    fake = Fake([Received("r1"), 0.1, opened(), delta(5, 0), closed()], owner=None)
    assert taken(fake, asked()) == [opened().event, delta(5, 0).event, closed().event] and len(fake.calls) == 1
    fake = Fake([Received("r1"), 9.0], [opened("r2"), delta(5, 0), closed()], owner=None)
    fake.leases_over.add("r1")
    assert taken(fake, asked()) == [opened("r2").event, delta(5, 0).event, closed().event] and len(fake.calls) == 2


def test_a_silent_replica_that_has_its_lease_is_waited_for(impatient: None):
    fake = Fake([opened(), 0.1, delta(5, 0), 0.1, closed()])
    assert taken(fake, asked()) == [opened().event, delta(5, 0).event, closed().event] and len(fake.calls) == 1


def test_who_goes_on_in_silence_is_not_taken_for_the_replica_that_died_before(impatient: None):
    told = [delta(5, at, rounds=True) for at in range(2)]
    fake = Fake([opened(), told[0], LOST], [Received("r2"), 0.1, opened("r2"), *told, closed()])
    fake.leases_over.add("r1")
    assert taken(fake, asked(None)) == [opened().event, *(one.event for one in told), closed().event]
    assert len(fake.calls) == 2 and fake.suspected == ["r1"]


def test_who_tells_is_watched_and_not_the_replica_that_was_asked_for(impatient: None):
    fake = Fake([opened("r2"), 0.1, delta(5, 0), closed()], owner="r1")
    fake.leases_over.add("r1")
    assert taken(fake, asked()) == [opened("r2").event, delta(5, 0).event, closed().event] and len(fake.calls) == 1
    fake = Fake([opened("r3"), 9.0], [opened("r2"), delta(5, 0), closed()], owner="r1")
    fake.leases_over.add("r3")
    assert taken(fake, asked())[1:] == [delta(5, 0).event, closed().event]


def test_who_leaves_a_stream_whose_replica_is_lost_has_left(impatient: None):
    async def scenario() -> None:
        fake = Fake([opened(), 9.0])
        fake.leases_over.add("r1")
        stream: Any = LastingStream(fake, fake)  # pyright: ignore[reportArgumentType]
        reading = asyncio.create_task(anext(aiter_rest(stream.taken(asked()))))
        await asyncio.sleep(0.005)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    asyncio.run(scenario())


async def aiter_rest(events: AsyncGenerator[Told, None]) -> AsyncGenerator[Told, None]:
    await anext(events)
    async for told in events:
        yield told


def test_a_turn_that_was_silent_for_long_is_looked_for_like_any_other(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("deployment.lasting_stream.GIVE_UP_SECONDS", 0.2)
    fake = Fake([opened(), 0.3, LOST], [LOST], [opened("r2"), delta(5, 0), 0.3, LOST], [delta(5, 1), closed()])
    assert taken(fake, asked())[1:] == [delta(5, 0).event, delta(5, 1).event, closed().event]


def test_a_turn_that_nobody_goes_on_with_ends_in_a_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("deployment.lasting_stream.GIVE_UP_SECONDS", 0.02)
    fake = Fake([opened(), delta(5, 0), LOST], *[[LOST]] * 1000)
    last = taken(fake, asked())[-1]
    assert isinstance(last, Refused) and (last.status, last.code) == (503, "replica_lost")


def test_the_events_of_a_turn_that_ran_elsewhere_are_asked_for_there():
    fake = Fake([Elsewhere("r9", "b" * 32)], [opened("r9"), delta(5, 0), closed()])
    assert taken(fake, asked())[1:] == [delta(5, 0).event, closed().event]
    method, route, (_, turn, _) = fake.calls[1]
    assert (method, route.replica, turn) == ("follow_kept_turn", "r9", "b" * 32)
    last = taken(Fake([Elsewhere("r9", "b" * 32)], [LOST]), asked())[-1]
    assert isinstance(last, Refused) and last.status == 410


def test_the_events_of_a_turn_that_ran_elsewhere_are_asked_for_after_being_sent_on_too():
    fake = Fake([NotHere("r1", "r2")], [Elsewhere("r9", TURN)], [opened("r9"), delta(5, 0), closed()])
    assert followed(fake)[1:] == [delta(5, 0).event, closed().event]
    method, route, args = fake.calls[2]
    assert (method, route.replica, *args) == ("follow_kept_turn", "r9", KEY, TURN, None)


def test_the_events_of_a_turn_that_ran_elsewhere_end_once_the_lease_of_who_tells_them_is_over(impatient: None):
    fake = Fake([Elsewhere("r9", "b" * 32)], [opened("r9"), 9.0])
    fake.leases_over.add("r9")
    last = taken(fake, asked())[-1]
    assert isinstance(last, Refused) and last.status == 410


def test_a_follower_is_told_the_first_event_and_what_comes_after_his_own():
    after = EventId(TURN, START + 1, digest_of([5]))
    fake = Fake([opened(), delta(5, 1), MOVED], [opened("r2"), delta(5, 2), closed()])
    assert followed(fake, after) == [opened().event, delta(5, 1).event, delta(5, 2).event, closed().event]
    assert [str(call[2][2]) for call in fake.calls] == [str(after), delta(5, 1).id]


# ------------------------------------------------------------------------------------------------ without a session


def test_a_turn_without_a_log_goes_on_from_the_rounds_that_were_told_with_the_seed_that_it_began_with():
    told = [delta(5, at, rounds=True) for at in range(3)]
    fake = Fake([opened(), *told[:2], LOST], [opened("r2"), *told, closed()])
    assert taken(fake, asked(None)) == [opened().event, *(one.event for one in told), closed().event]
    first, second = (args[0] for _, _, args in fake.calls)
    assert first.resumed == () and second.resumed == ((*rounds_of(told[0]), *rounds_of(told[1])),)
    assert (first.draws, second.draws) == (None, SEED)
    assert first.seed is second.seed is None, "a retry must be the same request"


def test_choices_that_are_over_are_not_told_again_when_the_others_go_on():
    def one(choice: int, at: int) -> Told:
        return delta(5 + choice, at, choice, n=2, rounds=True)

    fake = Fake(
        [opened(n=2), one(0, 0), one(1, 0), closed(0), LOST],
        [opened("r2", n=2), one(1, 0), one(0, 0), closed(0), one(1, 1), LOST],
        [opened("r3", n=2), one(0, 0), one(1, 0), one(1, 1), closed(1), closed(0)],
    )
    events = taken(fake, asked(None, n=2))
    assert events == [
        opened(n=2).event, one(0, 0).event, one(1, 0).event, closed(0).event, one(1, 1).event, closed(1).event,
    ]  # fmt: skip
    assert [len(rounds) for rounds in fake.calls[2][2][0].resumed] == [1, 2]


def test_a_turn_that_is_lost_before_its_first_round_is_no_repeated_request():
    told = [delta(5 + choice, 0, choice, n=2, rounds=True) for choice in (0, 1)]
    fake = Fake([opened(n=2), LOST], [opened("r2", n=2), *told, closed(0), closed(1)])
    scored = asked(None, n=2, idempotency_key="k", echo=True, logprobs=0)
    assert taken(fake, scored)[1:3] == [one.event for one in told]
    assert fake.calls[1][2][0].resumed == ((), ()), "the key must not lead to the turn that was lost"


def test_a_turn_with_a_key_is_followed_in_a_session_of_its_own():
    fake = Fake([opened(), delta(5, 0), LOST], [opened("r2"), delta(5, 1), closed()])
    assert taken(fake, asked(None, idempotency_key="k"))[1:] == [delta(5, 0).event, delta(5, 1).event, closed().event]
    (first, _, (begun,)), (second, _, (key, turn, _)) = fake.calls
    assert (first, second) == ("take_turn", "follow_turn") and (key, turn) == (begun.key, TURN)
    assert is_keyed(key) and key.tenant == begun.tenant


def test_choices_of_a_turn_with_a_key_are_followed_from_the_beginning_and_each_goes_on_where_it_was():
    """How the events of several follow each other is another matter at each replica."""

    def one(choice: int, at: int) -> Told:
        return delta(5 + choice, at, choice, n=2)

    fake = Fake(
        [opened(n=2), one(0, 0), one(1, 0), one(0, 1), closed(0), LOST],
        [opened("r2", n=2), one(1, 0), one(1, 1), one(0, 0), one(0, 1), closed(0), LOST],
        [opened("r3", n=2), one(0, 0), one(0, 1), closed(0), one(1, 0), one(1, 1), one(1, 2), closed(1)],
    )
    assert taken(fake, asked(None, n=2, idempotency_key="k")) == [
        opened(n=2).event, one(0, 0).event, one(1, 0).event, one(0, 1).event, closed(0).event, one(1, 1).event,
        one(1, 2).event, closed(1).event,
    ]  # fmt: skip
    assert [(method, args[2]) for method, _, args in fake.calls[1:]] == [("follow_turn", None)] * 2
