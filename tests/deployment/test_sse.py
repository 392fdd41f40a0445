"""What goes over the wire of a stream: chunks with ids, comments in silence, one end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from deployment.answer import AnswerFormat, Choices
from deployment.chat_format import ChatFormat
from deployment.completion_format import CompletionFormat
from deployment.errors import Refused
from deployment.event_ids import EventId
from deployment.last_call import REPLACED, Departing
from deployment.sse import KEEP_ALIVE, chunks, kept_alive
from deployment.wire import Closed, Delta, Opened, SessionFacts, TokenFact, Told, TurnEvent

TURN = "f" * 32
OPENED = Opened("r", "m", 7, 10, 4, None, TURN, created=3)
FACT = TokenFact(b"\xe2\x82", float("-inf"), ((b"a", -0.5),))
EVENTS = [
    Delta("", "Hel", 0, (FACT,), (1,), 11),
    Delta("", "", 0, (), (2,), 12),
    Delta("", "lo", 0, (FACT, FACT), (3, 4), 14),
    Closed("stop", 4, (1, 0), 1.5, 0.1, None, content="�"),
]


SEEN = EventId(TURN, 11, "0a0b0c0d")
"""An event that its reader had on an earlier connection."""
IN_A_SESSION = replace(OPENED, session=SessionFacts("s", "1.2", "none", 0, 10))


async def told(events: list[TurnEvent]) -> AsyncGenerator[Told, None]:
    for number, event in enumerate(events, start=1):
        yield Told(f"id-{number}", event)


def written(shown: AnswerFormat, events: list[TurnEvent], **how: Any) -> list[tuple[str, Any]]:
    """(id, document) of each event, in the stream's order."""

    async def collect() -> list[str]:
        options = {"after": None, "usage": "never", **how}
        return [part async for part in chunks(shown, told(events), **options)]

    parsed = []
    for part in asyncio.run(collect()):
        place, data, *rest = part.split("\n")
        assert place.startswith("id: ") and data.startswith("data: ") and rest == ["", ""]
        text = data.removeprefix("data: ")
        parsed.append((place.removeprefix("id: "), text if text == "[DONE]" else json.loads(text)))
    return parsed


def test_every_event_of_a_stream_has_an_id_and_empty_ones_are_not_sent():
    parts = written(ChatFormat(OPENED), EVENTS, usage="end")
    assert [place for place, _ in parts] == [f"{TURN}.10.e3b0c442", "id-1", "id-3", "id-4", "id-4", "id-4"]
    assert parts[-1][1] == "[DONE]" and parts[-2][1]["choices"] == [] and parts[-2][1]["usage"]["total_tokens"] == 14
    assert {part["id"] for _, part in parts[:-1]} == {f"chatcmpl-{TURN}"}
    last = parts[-3][1]
    assert last["choices"][0]["delta"] == {"content": "�"} and last["choices"][0]["finish_reason"] == "stop"
    assert last["meta_info"]["turn"] == TURN and last["meta_info"]["spec_verify_ct"] == 2


def test_whoever_goes_on_is_not_told_the_beginning_again():
    parts = written(ChatFormat(OPENED), EVENTS[2:], after=SEEN)
    assert [part["choices"][0]["delta"].get("content") for _, part in parts[:-1]] == ["lo", "�"]


def test_an_error_is_the_last_event_and_has_an_id_too():
    parts = written(ChatFormat(OPENED), [EVENTS[0], Refused(500, "broken", "why"), EVENTS[2]])
    assert parts[-1] == ("id-2", Refused(500, "broken", "why").body) and len(parts) == 3


def test_a_text_completion_streams_the_text_that_it_has_as_a_whole():
    shown, choices = CompletionFormat(OPENED), Choices(1)
    for event in EVENTS:
        choices.take(event)
    whole = shown.whole(choices)
    parts = written(shown, EVENTS)
    assert "".join(part["choices"][0]["text"] for _, part in parts[:-1]) == whole["choices"][0]["text"] == "Hello�"
    assert whole["object"] == parts[0][1]["object"] == "text_completion" and whole["id"] == f"cmpl-{TURN}"
    assert whole["choices"][0]["logprobs"] == {
        "tokens": ["�"] * 3,
        "token_logprobs": [-9999.0] * 3,
        "top_logprobs": [{"a": -0.5}] * 3,
        "text_offset": [0, 1, 2],
    }
    assert (whole["choices"][0]["finish_reason"], whole["usage"]["completion_tokens"]) == ("stop", 4)


def test_a_silent_stream_is_kept_alive_by_comments_and_loses_nothing():
    async def scenario() -> tuple[list[str], bool]:
        closed = False

        async def slow() -> AsyncGenerator[str, None]:
            nonlocal closed
            try:
                yield "one"
                await asyncio.sleep(0.25)
                yield "two"
                await asyncio.sleep(100)
            finally:
                closed = True

        parts = []
        stream = kept_alive(slow(), seconds=0.1)
        async for part in stream:
            parts.append(part)
            if parts.count(KEEP_ALIVE) == 3:
                break
        await stream.aclose()
        return parts, closed

    parts, closed = asyncio.run(scenario())
    assert [part for part in parts if part != KEEP_ALIVE] == ["one", "two"] and parts[-1] == KEEP_ALIVE and closed
    assert KEEP_ALIVE.startswith(":") and KEEP_ALIVE.endswith("\n\n")


def departed(opened: Opened, *before: Told) -> list[str]:
    async def events() -> AsyncGenerator[Told | Departing, None]:
        for told in before:
            yield told
        yield Departing()

    async def collect() -> list[str]:
        return [part async for part in chunks(ChatFormat(opened), events(), after=SEEN, usage="end")]

    return asyncio.run(collect())


UNSEEN = Told("id-1", EVENTS[0]), Told("id-2", EVENTS[1])
"""The second has nothing to show: its reader has not heard of it."""


def test_a_connection_that_ends_before_its_turn_says_where_the_session_goes_on():
    *_, last = departed(IN_A_SESSION, *UNSEEN)
    name, place, data, *rest = last.split("\n")
    assert (name, place, rest) == ("event: resume", "id: id-1", ["", ""])
    assert json.loads(data.removeprefix("data: ")) == {"session": "s", "turn": TURN, "after": "id-1"}


def test_whoever_had_been_told_something_before_is_sent_on_from_there_and_not_from_the_turns_start():
    (only,) = departed(IN_A_SESSION)
    _, place, data, *_ = only.split("\n")
    assert place == f"id: {SEEN}" and json.loads(data.removeprefix("data: "))["after"] == str(SEEN)


def test_a_connection_of_a_turn_that_nobody_can_follow_ends_with_an_error():
    *_, last = departed(OPENED, *UNSEEN)
    place, data, *_ = last.split("\n")
    assert place == "id: id-1" and json.loads(data.removeprefix("data: ")) == REPLACED.body
