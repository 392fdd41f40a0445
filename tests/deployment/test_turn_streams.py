"""A turn's stream: who reads it, from where, and what happens when nobody does."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployment.errors import Refused, RequestError
from deployment.event_ids import EventId, parse_event_id
from deployment.held_turn import HeldTurn
from deployment.parsing.turn_text import TurnText
from deployment.turn_stream import Place, TurnStream
from deployment.turn_table import TurnTable
from deployment.wire import Closed, Delta, Moved, Opened, Told, TurnRequest
from model import DEMO
from model.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(DEMO / "target")
START = 10
TURN = "0123456789abcdef0123456789abcdef"
OPENED = Opened("r", "m", 7, START, 4, None, TURN)
TEXT = "3 Grüße, 5 €, 7 🎈 und viele andere Zeichen: ñ, 語, ж."
IDS = tuple(TOKENIZER.encode(TEXT))


def closed(choice: int = 0) -> Closed:
    return Closed("stop", len(IDS), (1,), 1.0, 0.1, None, choice)


def request(**fields: Any) -> TurnRequest:
    return TurnRequest(TURN, "history", (), **fields)


def stream(choices: int = 1) -> TurnStream:
    return TurnStream(TURN, choices, START, lambda _: TurnText(TOKENIZER, ()))


def deltas(cuts: list[int]) -> list[Delta]:
    """`IDS` in pieces that end at `cuts`, as a turn publishes them."""
    text, told = TurnText(TOKENIZER, ()), []
    for begin, end in zip([0, *cuts], [*cuts, len(IDS)], strict=True):
        said = text.push(IDS[begin:end])
        told.append(Delta(said.reasoning, said.content, 0, (), IDS[begin:end], START + end))
    return told


def finished(cuts: list[int]) -> TurnStream:
    published = stream()
    for event in (OPENED, *deltas(cuts), closed()):
        published.publish(event)
    return published


async def read(source: TurnStream, after: EventId | None = None) -> list[Told]:
    return [told async for told in source.read(Place() if after is None else source.place_after(after))]


def content(told: list[Told]) -> str:
    return "".join(one.event.content for one in told if isinstance(one.event, Delta | Closed))


def after(position: int, ids: tuple[int, ...] = IDS, **fields: Any) -> EventId:
    """The id of a position, by its definition."""
    data = b"".join(token.to_bytes(4, "little") for token in ids[: position - START])
    return EventId(TURN, position, hashlib.sha256(data).hexdigest()[:8], **fields)


# ------------------------------------------------------------------------------------------------ reading


def test_an_events_id_names_turn_position_and_the_hash_of_all_ids_so_far():
    told = asyncio.run(read(finished([3, 8])))
    assert [one.id for one in told] == [str(after(place)) for place in (10, 13, 18, START + len(IDS), START + len(IDS))]
    assert parse_event_id(told[1].id, "after") == after(13)
    assert told[0].id == f"{TURN}.10.e3b0c442"


@given(st.data())
def test_whoever_goes_on_after_any_event_gets_exactly_the_text_that_is_missing(data: st.DataObject):
    cuts = sorted(data.draw(st.sets(st.integers(1, len(IDS) - 1), max_size=6)))
    whole = finished(cuts)

    async def both() -> None:
        told = await read(whole)
        assert content(told) == TEXT
        for index in range(len(told) - 1):
            seen, rest = told[: index + 1], await read(whole, parse_event_id(told[index].id, "after"))
            assert rest[0] == told[0] and content(seen) + content(rest[1:]) == TEXT
            assert rest[1:] == told[index + 1 :]

    asyncio.run(both())


@given(st.integers(0, len(IDS)), st.sets(st.integers(1, len(IDS) - 1), max_size=5))
def test_a_position_inside_an_event_is_gone_on_from_by_its_ids(known: int, cuts: set[int]):
    rest = asyncio.run(read(finished(sorted(cuts)), after(START + known)))
    ids = [token for one in rest if isinstance(one.event, Delta) for token in one.event.token_ids]
    seen = TurnText(TOKENIZER, ())
    seen.push(IDS[:known])
    assert tuple(ids) == IDS[known:] and seen.content + content(rest) == TEXT


def test_the_end_of_a_stop_string_is_cut_for_late_readers_too():
    text = TurnText(TOKENIZER, ())
    cut = len("andere Zeichen: ñ, 語, ж.")
    source = stream()
    source.publish(OPENED)
    said = text.push(IDS, cut)
    source.publish(Delta(said.reasoning, said.content, 0, (), IDS, START + len(IDS), cut))
    source.publish(closed())
    known = len(TOKENIZER.encode("3 Grüße"))
    assert IDS[:known] == tuple(TOKENIZER.encode("3 Grüße"))
    assert content(asyncio.run(read(source, after(START + known)))) == ", 5 €, 7 🎈 und viele "


def test_readers_of_a_running_turn_get_each_event_once_and_a_slow_one_holds_nobody_up():
    async def scenario() -> None:
        source = stream()
        fast = asyncio.create_task(read(source))
        slow = source.read(Place())
        events = [OPENED, *deltas([4, 9]), closed()]
        for event in events:
            source.publish(event)
            await asyncio.sleep(0)
        assert [one.event for one in await fast] == events
        assert [one.event async for one in slow] == events
        source.publish(Refused(500, "late", "dropped"))
        assert [one.event for one in await read(source)] == events

    asyncio.run(scenario())


def test_choices_share_a_stream_and_an_id_names_one_place_for_all_of_them():
    source = stream(choices=2)
    first, second = deltas([5])
    events = [
        OPENED, OPENED, Delta("", "x", 1, (), (9,), START + 1), first, closed(1), second, closed(0),
    ]  # fmt: skip
    for event in events:
        source.publish(event)
    told = asyncio.run(read(source))
    assert [one.event for one in told] == events[1:]
    assert told[1].id == str(after(11, (9,), choice=1)) and told[2].id == str(after(15, choice=0))
    rest = asyncio.run(read(source, after(15, choice=0)))
    assert [one.event for one in rest] == [OPENED, closed(1), second, closed(0)]
    with pytest.raises(RequestError) as caught:
        source.place_after(after(15))
    assert caught.value.refused.status == 400 and "choices 0 to 1" in caught.value.refused.message


@pytest.mark.parametrize(
    ("seen", "status", "code", "told"),
    [
        (EventId("f" * 32, 12, "e3b0c442"), 400, "invalid_request", TURN),
        (EventId(TURN, 12, "00000000"), 409, "event_mismatch", after(12).digest),
        (EventId(TURN, 9, "e3b0c442"), 409, "event_out_of_turn", "10 to"),
        (after(START + len(IDS) + 1), 409, "event_out_of_turn", str(START + len(IDS))),
        (after(12, choice=0), 400, "invalid_request", "no choice"),
    ],
)
def test_an_event_id_that_this_stream_cannot_have_given_is_refused_with_what_would_be_right(
    seen: EventId, status: int, code: str, told: str
):
    with pytest.raises(RequestError) as caught:
        finished([4]).place_after(seen)
    refused = caught.value.refused
    assert (refused.status, refused.code, refused.param) == (status, code, "after") and told in refused.message


@pytest.mark.parametrize("text", ["", "x", f"{TURN}.1", f"{TURN}.1.e3b0c44", f"{TURN.upper()}.1.e3b0c442", "1.2.3.4.5"])
def test_text_that_is_no_event_id_is_refused_by_name(text: str):
    with pytest.raises(RequestError) as caught:
        parse_event_id(text, "Last-Event-ID")
    assert caught.value.refused.status == 400 and caught.value.refused.param == "Last-Event-ID"


# ------------------------------------------------------------------------------------------------ readers that leave


class Clock:
    """Timers that fire when they are told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, Callable[[], None], Timer]] = []

    def later(self, seconds: float, call: Callable[[], None]) -> Timer:
        timer = Timer()
        self._timers.append((self.now + seconds, call, timer))
        return timer

    def advance(self, seconds: float) -> None:
        self.now += seconds
        due = [entry for entry in self._timers if entry[0] <= self.now]
        self._timers = [entry for entry in self._timers if entry[0] > self.now]
        for _, call, timer in due:
            if not timer.cancelled:
                call()


class Timer:
    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Running:
    def __init__(self) -> None:
        self.cancels = 0
        self.told: list[str] = []

    def cancel(self) -> None:
        self.cancels += 1

    async def ended(self) -> None: ...

    async def suspend(self) -> None:
        self.told.append("suspend")

    def go_on(self, elsewhere: Moved | None) -> None:
        self.told.append(f"elsewhere: {elsewhere}")

    def moved(self) -> None:
        self.told.append("moved")


def held(linger: float) -> tuple[HeldTurn, Clock, Running]:
    clock, choice = Clock(), Running()
    turn = HeldTurn(request(), stream(), linger, clock.later)
    turn.run([choice])
    turn.stream.publish(OPENED)
    return turn, clock, choice


def test_a_turn_that_nobody_could_ask_for_again_is_cancelled_as_soon_as_its_last_reader_leaves():
    async def scenario() -> None:
        turn, _, choice = held(linger=0)
        async with aclosing(turn.read()) as one:
            await anext(one)
            async with aclosing(turn.read()) as other:
                await anext(other)
            assert not choice.cancels and not turn.unread
        assert choice.cancels == 1 and turn.abandoned and turn.unread

    asyncio.run(scenario())


def test_a_turn_lingers_only_while_no_reader_is_there_and_a_new_one_stops_the_clock():
    async def scenario() -> None:
        turn, clock, choice = held(linger=30)
        clock.advance(29)
        for _ in range(2):
            async with aclosing(turn.read()) as reader:
                await anext(reader)
                clock.advance(1000)
            clock.advance(29)
        assert not choice.cancels
        clock.advance(1)
        assert choice.cancels == 1 and turn.abandoned

    asyncio.run(scenario())


def test_a_turn_that_is_over_is_not_cancelled_whoever_leaves():
    async def scenario() -> None:
        turn, clock, choice = held(linger=30)
        async with aclosing(turn.read()) as reader:
            await anext(reader)
            turn.stream.publish(closed())
            turn.over()
        clock.advance(1000)
        assert not choice.cancels

    asyncio.run(scenario())


def test_a_reader_with_a_wrong_event_id_does_not_count():
    async def scenario() -> None:
        turn, clock, choice = held(linger=30)
        with pytest.raises(RequestError):
            await anext(turn.read(EventId(TURN, 99, "00000000")))
        clock.advance(30)
        assert choice.cancels == 1

    asyncio.run(scenario())


# ------------------------------------------------------------------------------------------------ turns that move


def test_a_stream_that_moves_ends_for_all_its_readers_and_its_turn_is_kept_by_nobody():
    async def scenario() -> None:
        turn, clock, choice = held(linger=30)
        table = TurnTable()
        table.add(turn)
        reading = asyncio.create_task(read(turn.stream))
        turn.stream.publish(deltas([1])[0])
        turn.stream.publish(Moved())
        turn.over()
        table.ended(turn)
        assert [type(one.event) for one in await reading] == [Opened, Delta, Moved]
        assert turn.stream.moved and not len(table)
        clock.advance(1000)
        assert not choice.cancels, "it goes on elsewhere"

    asyncio.run(scenario())


def test_a_turn_that_has_come_back_takes_the_place_of_what_it_was_here_before():
    before, again = (HeldTurn(request(idempotency_key="k"), stream(), 30, Clock().later) for _ in range(2))
    table = TurnTable()
    for turn in (before, again):
        turn.stream.publish(OPENED)
    table.add(before)
    table.add(again)
    before.stream.publish(Moved())
    table.ended(before)
    assert table.running == 1
    again.stream.publish(closed())
    table.ended(again)
    assert (table.running, len(table)) == (0, 1)


def test_who_asks_for_the_rest_of_a_turn_before_its_beginning_is_told_here_waits_for_it():
    async def scenario() -> None:
        turn = HeldTurn(request(), stream(), 30, Clock().later)
        turn.run([Running()])
        reading = asyncio.create_task(anext(turn.read(EventId(TURN, START + len(IDS), "00000000"))))
        await asyncio.sleep(0)
        assert not reading.done() and not turn.unread
        turn.stream.publish(OPENED)
        with pytest.raises(RequestError):
            await reading

    asyncio.run(scenario())


def test_what_a_session_asks_of_its_turn_reaches_the_one_that_runs():
    async def scenario() -> None:
        turn, _, choice = held(linger=30)
        await turn.suspend()
        turn.go_on(None)
        turn.moved()
        assert choice.told == ["suspend", "elsewhere: None", "moved"]

    asyncio.run(scenario())
