"""A turn with an Idempotency-Key and no session outlives its replica; and ends when nobody may ask for it any more."""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import closing
from dataclasses import replace
from typing import Any, cast

import pytest

from deployment.engine.commands import Submit, Suspend
from deployment.errors import RequestError
from deployment.held_turn import HeldTurn
from deployment.keyed_expiry import KeyedExpiry
from deployment.keyed_turns import KEYED, is_keyed, with_session
from deployment.ownership.log import HeadMoved
from deployment.ownership.messages import Placed
from deployment.ownership.words import NOTHING, SessionKey
from deployment.session import Session
from deployment.turn_table import KEPT_SECONDS
from deployment.wire import Closed, Delta, Moved, Opened, Route, TokenFact, TurnEvent, TurnRequest
from tests.deployment.in_process import World
from tests.deployment.places import Place, asked, ids_of, images, places, run, told, undisturbed
from tests.state.samples import TURN

TENANT = "t" * 64
ROOM = 1 << 30
_turns = itertools.count(1)


def keyed(key: str, **fields: Any) -> TurnRequest:
    """Each time another request, as clients send it."""
    request = replace(asked(24, "Count from 3."), key=None, turn=f"{next(_turns):032x}", idempotency_key=key, **fields)
    return with_session(request)


def submitted(place: Place) -> list[Submit]:
    """What the replica's engine is asked for from now on."""
    seen: list[Submit] = []
    turn = place.service.turn

    def noted(submit: Submit) -> Any:
        seen.append(submit)
        return turn(submit)

    place.service.turn = noted
    return seen


def same(events: list[TurnEvent], request: TurnRequest) -> bool:
    return ids_of(events) == undisturbed(request)


@pytest.mark.parametrize(
    "fields",
    [{"key": SessionKey(TENANT, "s")}, {"idempotency_key": None}, {"mode": "prompt", "echo": True, "logprobs": 0}],
)
def test_only_a_turn_with_a_key_and_no_session_gets_one_unless_its_prompt_is_scored(fields: dict[str, Any]):
    request = replace(asked(), **{"key": None, "idempotency_key": "k", **fields})
    assert with_session(request) is request
    other = with_session(replace(asked(), key=None, idempotency_key="k", n=2, echo=True))
    assert other.key is not None and is_keyed(other.key) and other.key.tenant == TENANT
    assert with_session(replace(other, key=None, tenant="u" * 64)).key != other.key
    assert " " in KEYED, "a client's names have none"


def test_a_retry_after_the_replicas_death_finds_the_answer_or_goes_on():
    async def steps() -> None:
        async with places() as (_, (a, b)):
            done, running = keyed("done"), keyed("running", seed=12)
            first = await told(await a.begin(done))
            assert same(first, done) and isinstance(first[0], Opened) and first[0].session is None
            held = await a.begin(running)
            before = await told(held, tokens=5)
            assert 0 < len(ids_of(before)) < 24
            a.die()
            asked_of_b = submitted(b)
            again = await b.begin(keyed("done"))
            assert again.id == done.turn and ids_of(await told(again)) == ids_of(first)
            assert not asked_of_b, "the answer is told from the log"
            again = await b.begin(keyed("running", seed=12))
            assert again.id == running.turn and same(await told(again), running)
            assert [submit.session for submit in asked_of_b] == [None], "the engine keeps no state of it"

    run(steps)


@pytest.mark.parametrize("text", [True, False], ids=["text", "token ids"])
def test_a_text_completion_that_is_asked_for_again_after_its_replicas_death_is_the_same_one(text: bool):
    def completion(key: str) -> TurnRequest:
        prompt = "Count from 3." if text else (5, 6, 7, 8)
        return keyed(key, mode="prompt", messages=(), prompt=prompt, logprobs=2, seed=13)

    async def steps() -> None:
        async with places() as (_, (a, b)):
            unlogged = replace(completion("other"), key=None, idempotency_key=None)
            expected = ids_of(await told(await a.begin(unlogged)))
            done, running = completion("done"), completion("running")
            first = await told(await a.begin(done))
            held = await a.begin(running)
            assert 0 < len(ids_of(await told(held, tokens=5))) < 24
            a.die()
            again = [await b.begin(completion(key)) for key in ("done", "running")]
            assert [held.id for held in again] == [done.turn, running.turn]
            events = [await told(held) for held in again]
            assert ids_of(first) == ids_of(events[0]) == ids_of(events[1]) == expected
            scored = [[one.logprobs for one in turn if isinstance(one, Delta)] for turn in (first, *events)]
            assert scored[0] and list(map(_joined, scored)) == [_joined(scored[0])] * 3

    run(steps)


def session_of(place: Place, request: TurnRequest) -> Session:
    assert request.key is not None
    session = place.keeper.held(request.key)
    assert session is not None
    return session


def said(events: list[TurnEvent], n: int) -> list[tuple[int, ...]]:
    """The ids of each choice."""
    return [ids_of([one for one in events if isinstance(one, Delta) and one.choice == choice]) for choice in range(n)]


def test_choices_go_on_after_their_replicas_death_each_with_what_was_published_of_it():
    """The first one ends long before the others, so that of one turn some choices are over and others run."""
    how: dict[str, Any] = {"n": 3, "temperature": 1.2, "ignore_eos": False, "logprobs": 1, "seed": 5}

    async def steps() -> None:
        async with places() as (_, (a, b)):
            alone = await told(await a.begin(replace(keyed("k", **how), key=None, idempotency_key=None)))
            expected, ends = said(alone, 3), [one for one in alone if isinstance(one, Closed)]
            assert len(set(expected)) == 3 and len({len(ids) for ids in expected}) > 1, "they end together"
            request = keyed("k", **how)
            held = await a.begin(request)
            before: list[TurnEvent] = []
            async for one in held.read():
                before.append(one.event)
                if isinstance(one.event, Closed):
                    break
            cut = said(before, 3)
            over = {one.choice for one in before if isinstance(one, Closed)}
            assert any(ids and len(ids) < len(whole) for ids, whole in zip(cut, expected, strict=True))
            assert 0 in over, "what is over is told of the first choice"
            assert session_of(a, request).running is held, "it is over with its last choice"
            a.die()
            asked_of_b = submitted(b)
            again = await b.begin(keyed("k", **how))
            assert again.id == request.turn and again.ended_at is None, "it runs, whichever choice is over"
            assert await b.begin(keyed("k", **how)) is again
            events = await told(again)
            assert isinstance(events[0], Opened) and events[0].choices == 3
            assert said(events, 3) == expected and 0 < len(asked_of_b) < 3
            assert any(submit.resumed is not None for submit in asked_of_b)
            closed = [one for one in events if isinstance(one, Closed)]
            assert {(one.choice, one.finish_reason) for one in closed} == {(e.choice, e.finish_reason) for e in ends}
            scores = [fact for one in events if isinstance(one, Delta) for fact in one.logprobs]
            assert len(scores) == sum(map(len, expected))
            session = session_of(b, request)
            assert session.running is None
            assert [(turn.id, turn.idempotency_key) for turn in session.turns] == [(request.turn, "k")]

    run(steps)


def test_choices_that_are_over_are_told_after_their_replicas_death():
    async def steps() -> None:
        async with places() as (_, (a, b)):
            request = keyed("k", n=2)
            first = await told(await a.begin(request))
            session = session_of(a, request)
            assert session.running is None and len(session.turns) == 1
            a.die()
            asked_of_b = submitted(b)
            again = await b.begin(keyed("k", n=2))
            assert again.id == request.turn and said(await told(again), 2) == said(first, 2)
            assert not asked_of_b
            with pytest.raises(RequestError, match="another body"):
                await b.begin(keyed("k", n=3))

    run(steps)


def test_choices_of_a_running_turn_move_together():
    async def steps() -> None:
        async with places() as (_, (a, b)):
            expected = said(await told(await a.begin(replace(keyed("k", n=2), key=None, idempotency_key=None))), 2)
            request = keyed("k", n=2)
            held = await a.begin(request)
            reading = asyncio.create_task(told(held))
            while min(map(len, said(await told(held, tokens=6), 2))) < 1:
                await asyncio.sleep(0)
            session = session_of(a, request)
            call, stood = a.service.call, set[str]()

            async def noted(command: Any) -> Any:
                if isinstance(command, Suspend):
                    stood.add(command.turn)
                return await call(command)

            a.service.call = noted
            assert await a.keeper.move(session, b.replica.name)
            assert isinstance((await reading)[-1], Moved)
            assert stood == {request.turn, f"{request.turn}.1"}
            there = await b.desk.find(Route("x"), session.key, request.turn)
            assert isinstance(there, HeldTurn) and said(await told(there), 2) == expected

    run(steps)


def _joined(told: list[tuple[TokenFact, ...]]) -> list[bytes]:
    return [fact.data for facts in told for fact in facts]


def test_a_keyed_turn_ends_a_day_after_its_end_also_if_its_replica_is_gone():
    async def steps() -> None:
        async with places() as (world, (a, b)):
            request = keyed("once")
            await told(await a.begin(request))
            assert not images(world), "its log is enough"
            a.die()
            now = time.time()
            expiry = KeyedExpiry(b.keeper, b.replica.link, ROOM, lambda: now)
            await expiry.sweep()
            assert [session.key for session in b.keeper.all()] == [request.key], "it is taken over, and stays"
            now += KEPT_SECONDS + 60
            await expiry.sweep()
            assert b.keeper.all() == ()
            assert world.directory.unowned(KEYED, time.monotonic()) == ()
            for store in world.stores.values():
                store.forget_tombstones(now)
                store.forget_tombstones(now + 3600)
                assert store.index() == (), "nobody asked for its end: it was forgotten within the hour"
            again = await b.begin(keyed("once"))
            assert again.id != request.turn, "its key is free again"
            await told(again)

    run(steps)


def test_logs_of_keyed_turns_take_so_many_bytes_and_the_longest_ended_go_first():
    async def steps() -> None:
        async with places() as (world, (a, b)):
            for number in range(4):
                await told(await a.begin(keyed(f"{number}")))
            running = await a.begin(keyed("runs", seed=14))
            await told(running, tokens=3)
            size = [a.keeper.copies.bytes_of(one) for one in a.keeper.all()]
            _, _, third, fourth, last = (one.key for one in a.keeper.all())
            assert min(size) > 4 * len(running.request.messages[0]["content"]), "prompt and request"
            room = world.stores["x"]._storage.room  # pyright: ignore[reportAttributeAccessIssue]
            kept = size[2]
            await KeyedExpiry(a.keeper, a.replica.link, kept).end_surplus()
            assert running.ended_at is None and [one.key for one in a.keeper.all()] == [third, fourth, last]
            freed = world.stores["x"]._storage.room - room  # pyright: ignore[reportAttributeAccessIssue]
            assert freed > size[0], "the store has their room back"
            await KeyedExpiry(a.keeper, a.replica.link, 0).end_surplus()
            assert [one.key for one in a.keeper.all()] == [fourth, last], "nor does one that runs, or has just ended"
            await told(running)
            a.die()
            await told(await b.begin(keyed("runs", seed=14)))
            taken = b.keeper.held(last)
            assert taken is not None and b.keeper.copies.bytes_of(taken) > size[4]

    run(steps)


def test_a_tenants_large_turn_costs_no_other_tenant_its_own():
    async def steps(world: World) -> None:
        world.start()
        a = world.replicas["a"]
        expiry = KeyedExpiry(a.keeper, a.link, 2000)

        async def ended(tenant: str, name: str, at: float, records: int) -> Session:
            session = await a.creating.empty(SessionKey(tenant * 64, f"{KEYED}{name}"))
            session.turns = [replace(TURN, ended_at=at)]
            await a.keeper.write(session.key, [HeadMoved(NOTHING, None, 0)] * records)
            return session

        async def left() -> list[str]:
            await expiry.end_surplus()
            return [one.key.session.removeprefix(KEYED) for one in a.keeper.all()]

        now = time.time()
        for number in range(3):
            await ended("u", f"small {number}", now - 100 + number, 1)
        large = await ended("t", "large", now - 10, 200)
        size = a.keeper.copies.bytes_of
        assert size(large) > 2000 > 2 * sum(size(one) for one in a.keeper.all() if one is not large)
        large.running = cast(HeldTurn, object())
        assert await left() == ["small 0", "small 1", "small 2", "large"], "it runs"
        large.running = None
        assert await left() == ["small 0", "small 1", "small 2", "large"], "it has just ended"
        await ended("u", "small 3", now - 5, 1)
        assert await left() == ["small 0", "small 1", "small 2", "small 3"], "its own tenant's share is spent"
        await ended("t", "larger", now - 4, 300)
        other = await ended("v", "large", now - 3, 200)
        await ended("u", "small 4", now - 2, 1)
        assert await left() == ["small 0", "small 1", "small 2", "small 3", "small 4"]
        assert not await a.link.locate(other.key)

    with closing(World("x")) as world:
        run(lambda: steps(world))


def test_what_is_left_where_a_keyed_turn_never_began_ends_once_it_was_seen_twice():
    async def steps(world: World) -> None:
        world.start()
        a = world.replicas["a"]
        expiry = KeyedExpiry(a.keeper, a.link, ROOM)
        left, again, moves = (SessionKey("t" * 64, f"{KEYED}{name}") for name in ("left", "again", "moves"))
        for key in (left, again, moves):
            await a.keeper.acquire(key, None, must_exist=False)
        await expiry.end_empty()
        assert [one.key for one in a.keeper.all()] == [left, again, moves], "its turn may be about to begin"
        kept, moving = a.keeper.held(again), a.keeper.held(moves)
        assert kept is not None and moving is not None
        kept.turns, moving.moving = [TURN], True
        await expiry.end_empty()
        assert [one.key for one in a.keeper.all()] == [again, moves]
        assert await a.link.locate(left) is None

    with closing(World("x")) as world:
        run(lambda: steps(world))


def test_a_turn_that_cannot_be_taken_over_keeps_none_from_its_end():
    class Torn:
        async def unowned(self, beginning: str) -> tuple[Placed, ...]:
            raise OSError("torn")

    async def steps() -> None:
        async with places() as (_, (a, _)):
            await told(await a.begin(keyed("once")))
            expiry = KeyedExpiry(a.keeper, Torn(), ROOM, lambda: time.time() + KEPT_SECONDS + 60)
            with pytest.raises(OSError, match="torn"):
                await expiry.sweep()
            assert a.keeper.all() == ()

    run(steps)


def test_a_running_turn_with_a_key_moves_and_its_reader_hears_all_of_it():
    async def steps() -> None:
        async with places() as (_, (a, b)):
            request = keyed("moves", seed=13)
            held = await a.begin(request)
            reading = asyncio.create_task(told(held))
            while len(ids_of(await told(held, tokens=3))) < 3:
                pass
            session = session_of(a, request)
            movement = await a.keeper.move(session, b.replica.name)
            assert movement is not None and movement.bytes_ahead == 0, "the engine keeps no state of it"
            await reading
            there = await b.desk.find(Route("x"), session.key, request.turn)
            assert isinstance(there, HeldTurn) and same(await told(there), request)

    run(steps)
