"""A session that moves while its turn decodes: what its client reads is what it would have read, whatever fails."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deployment.engine.commands import Inspect
from deployment.errors import RequestError
from deployment.moving import Coming, Document, NotComing, Sent, ToDestination
from deployment.ownership.words import Epoch, Order
from deployment.parcels import Parcel
from deployment.wire import Moved, Movement
from tests.deployment.places import (
    KEY,
    LONG,
    TURN,
    Place,
    asked,
    ids_of,
    images,
    opened,
    places,
    run,
    told,
    undisturbed,
)


async def staged(place: Place) -> int:
    """Bytes that its engine holds for sessions on their way."""
    facts: Any = await place.service.call(Inspect("f"))
    return facts.facts["staged_bytes"]


async def until(true: Any, what: str) -> None:
    for _ in range(400):
        if true():
            return
        await asyncio.sleep(0.02)
    raise TimeoutError(what)


# ------------------------------------------------------------------------------------------------ moves


def test_a_sampled_turn_that_moves_three_times_is_token_for_token_the_one_that_stayed():
    async def steps() -> None:
        request = asked()
        async with places() as (_, (a, b)):
            held = await a.begin(request)
            await told(held, 8)
            here, there = a, b
            for tokens in (18, 28, 38):
                movement = await here.move(there)
                assert movement is not None and movement.bytes_ahead > 0 and movement.bytes_in_pause > 0
                assert isinstance((await told(held))[-1], Moved)
                held = await there.turn()
                events = await told(held, tokens)
                facts = opened(events).session
                assert facts is not None and (facts.hit, facts.prefilled) == ("peer", 0)
                assert len(ids_of(events)) < 48, "the turn ended before its last move"
                here, there = there, here
            events = await told(held)
            assert ids_of(events) == undisturbed(request)
            await until(lambda: here.session.running is None, "the turn's end")
            assert [turn.finish_reason for turn in here.session.turns] == ["length"]
            await until(lambda: not len(here.arrivals), "the last verification")
            assert await staged(here) == 0 == await staged(there)

    run(steps)


def test_the_new_owner_gives_the_stores_an_image_while_the_turn_goes_on():
    async def steps() -> None:
        async with places() as (world, (a, b)):
            await told(await a.begin(asked(100)), 10)
            before = images(world)
            assert await a.move(b)
            await until(lambda: images(world) - before, "an image")
            (await b.turn()).cancel()

    run(steps)


def test_an_idle_session_moves_and_its_next_turn_says_where_its_state_came_from(serve_log: pytest.LogCaptureFixture):
    serve_log.set_level(logging.INFO, "ray.serve")

    async def steps() -> None:
        async with places() as (_, (a, b)):
            await told(await a.begin(asked(12)))
            await until(lambda: a.session.free, "the turn's end")
            ledger = a.session.ledger
            movement = await a.move(b)
            assert movement is not None
            counts = a.keeper.transfers.counts
            assert (counts.moved, counts.stayed, counts.bytes_in_pause) == (1, 0, movement.bytes_in_pause)
            assert counts.pauses.total == movement.pause_seconds <= counts.seconds and counts.copied.bytes > 0
            session, hit = await b.keeper.acquire(KEY, None, must_exist=True)
            assert (session.ledger, hit, session.came) == (ledger, "device", "peer")
            frontier = session.frontier
            more = replace(asked(8, "And now?"), turn=f"{8:032x}", mode="append")
            facts = opened(await told(await b.begin(more))).session
            assert facts is not None and (facts.hit, facts.reused) == ("peer", frontier)

    run(steps)
    assert serve_log.text.count(f"turn {TURN} is over") == 1, "where it came to, it is only told again"


def test_a_turn_in_prefill_moves_with_nothing_and_begins_where_it_comes_to():
    async def steps() -> None:
        request = asked(10, prompt=LONG * 6)
        async with places(prefill_chunk=16) as (_, (a, b)):
            await a.begin(request)
            movement = await a.move(b)
            assert movement is not None and movement.bytes_ahead == 0
            assert ids_of(await told(await b.turn())) == undisturbed(request)

    run(steps)


def test_a_turn_that_ends_while_its_pages_go_ahead_leaves_a_session_that_moves_idle():
    async def steps() -> None:
        request = asked(24)
        async with places() as (_, (a, b)):
            held = await a.begin(request)
            receive = b.arrivals.receive

            async def late(message: ToDestination) -> Any:
                if isinstance(message, Coming):
                    await held.ended()
                return await receive(message)

            b.arrivals.receive = late
            assert await a.move(b)
            assert ids_of(await told(held)) == undisturbed(request)
            await until(lambda: b.keeper.held(KEY) is not None, "the takeover")
            assert b.session.free and len(b.session.turns) == 1 and b.session.came == "peer"

    run(steps)


# ------------------------------------------------------------------------------------------------ moves that fail


def _dies(a: Place, b: Place) -> None:
    def die(message: ToDestination) -> ToDestination:
        if isinstance(message, Sent):
            b.die()
        return message

    b.replica.harm = die


def _dies_in_the_pause(a: Place, b: Place) -> None:
    def die(message: ToDestination) -> ToDestination:
        if isinstance(message, Document):
            b.die()
        return message

    b.replica.harm = die


def _has_no_room(a: Place, b: Place) -> None:
    b.service._runner._engine._exchange._staged._most = 10  # pyright: ignore


def _hears_no_offer(a: Place, b: Place) -> None:
    b.replica.deaf = True


@pytest.mark.parametrize("fails", [_dies, _dies_in_the_pause, _has_no_room, _hears_no_offer])
def test_a_destination_that_fails_changes_nothing_for_the_turn_at_its_source(
    fails: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("deployment.ownership.owner.OFFER_SECONDS", 0.3)

    async def steps() -> None:
        request = asked()
        async with places() as (_, (a, b)):
            held = await a.begin(request)
            await told(held, 10)
            fails(a, b)
            assert await a.move(b) is None
            events = await told(held)
            assert ids_of(events) == undisturbed(request) and not any(isinstance(event, Moved) for event in events)
            assert a.keeper.held(KEY) is not None and not a.session.moving
            assert (a.keeper.transfers.counts.moved, a.keeper.transfers.counts.stayed) == (0, 1)
            if isinstance(b.replica.received[-1], NotComing):
                assert not len(b.arrivals) and await staged(b) == 0

    run(steps)


def test_a_session_goes_on_at_its_destination_when_the_source_dies_after_its_offer():
    async def steps() -> None:
        request = asked()
        async with places() as (_, (a, b)):
            await told(await a.begin(request), 10)

            def dies_first(message: Any) -> Any:
                if isinstance(message, Document):
                    asyncio.get_running_loop().call_later(0.02, a.die)  # its offer waits for a renewal by then
                return message

            b.replica.harm = dies_first
            moving = asyncio.create_task(a.move(b))
            await until(lambda: b.keeper.held(KEY) is not None, "the takeover")
            moving.cancel()
            events = await told(await b.turn())
            facts = opened(events).session
            assert ids_of(events) == undisturbed(request)
            assert facts is not None and (facts.hit, facts.prefilled) == ("peer", 0)

    run(steps)


def test_what_came_of_a_session_that_went_on_since_is_not_its_state():
    async def steps() -> None:
        async with places() as (_, (a, b)):
            held = await a.begin(asked())
            await told(held, 10)
            b.replica.deaf = True
            b.replica.harm = lambda message: Coming(KEY, "other") if isinstance(message, NotComing) else message
            moving = asyncio.create_task(a.move(b))
            await until(lambda: any(isinstance(one, Document) for one in b.replica.received), "the document")
            arrival = b.arrivals._arrivals[KEY]
            assert arrival.order is not None and b.arrivals.arrived(KEY, arrival.order) is arrival
            assert b.arrivals.arrived(KEY, Order(arrival.order.epoch, arrival.order.sequence + 1)) is None
            assert b.arrivals.arrived(KEY, Order(Epoch(1, 1), arrival.order.sequence)) is None
            moving.cancel()
            held.cancel()

    run(steps)


def test_a_document_that_cannot_be_loaded_costs_its_state_and_not_the_turn():
    async def steps() -> None:
        request = asked()
        async with places() as (_, (a, b)):
            await told(await a.begin(request), 10)

            def damaged(message: ToDestination) -> ToDestination:
                if isinstance(message, Document):
                    return replace(message, document=np.zeros_like(message.document))
                return message

            b.replica.harm = damaged
            assert await a.move(b)
            assert ids_of(await told(await b.turn())) == undisturbed(request)

    run(steps)


def test_state_that_was_damaged_on_one_node_is_found_afterwards_and_the_turn_goes_on_from_its_ledger():
    async def steps() -> None:
        request = asked(64)
        async with places() as (_, (a, b)):
            await told(await a.begin(request), 10)

            def damaged(message: ToDestination) -> ToDestination:
                if isinstance(message, Sent) and not message.hashed:
                    data = message.parcel.data.copy()
                    data[-1] ^= 1
                    return replace(message, parcel=Parcel(message.parcel.pieces, data))
                return message

            b.replica.harm = damaged
            submitted: list[Any] = []
            turn = b.service.turn
            b.service.turn = lambda submit: (submitted.append(submit), turn(submit))[1]
            assert await a.move(b)
            await until(lambda: len(submitted) == 2, "that the turn begins again")
            events = await told(await b.turn())
            assert len(ids_of(events)) == 64
            first, again = submitted
            assert again.resumed.token_ids[: len(first.resumed.token_ids)] == first.resumed.token_ids
            assert not len(b.arrivals) and await staged(b) == 0

    run(steps)


def test_a_session_moves_to_one_place_at_a_time_and_to_itself_at_no_cost():
    async def steps() -> None:
        async with places() as (_, (a, b)):
            held = await a.begin(asked())
            await told(held, 10)
            assert await a.move(a) == Movement() and not a.session.moving
            moving = asyncio.create_task(a.move(b))
            await asyncio.sleep(0)
            with pytest.raises(RequestError) as refused:
                await a.move(b)
            assert (refused.value.refused.status, refused.value.refused.code) == (409, "session_busy")
            assert await moving
            (await b.turn()).cancel()

    run(steps)


# ------------------------------------------------------------------------------------------------ what has come


def test_what_nobody_comes_for_goes_after_its_time():
    async def steps() -> None:
        async with places(arrival_seconds=0.2) as (_, (_, b)):
            await b.arrivals.receive(Coming(KEY, "m"))
            assert len(b.arrivals) == 1
            await until(lambda: not len(b.arrivals), "its time")
            with pytest.raises(RequestError) as refused:
                await b.arrivals.receive(Document(KEY, "m", Order(Epoch(1, 1), 1), np.zeros(1, np.uint8)))
            assert refused.value.refused.code == "not_expected"

    run(steps)


def test_a_cancel_while_a_turn_is_moved_ends_it_where_it_stays():
    async def steps() -> None:
        async with places() as (_, (a, b)):
            held = await a.begin(asked(300))
            await told(held, 10)

            def cancelled(message: ToDestination) -> ToDestination:
                if isinstance(message, Document):
                    held.cancel()
                    b.die()
                return message

            b.replica.harm = cancelled
            assert await a.move(b) is None
            assert len(ids_of(await told(held))) < 300

    run(steps)
