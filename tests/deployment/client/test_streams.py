"""Streams that break: what the reader has in the end is the whole answer, and nothing of it twice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployment.client import (
    Answer,
    AnswerEvent,
    AsyncClient,
    Began,
    Client,
    Contradiction,
    Ended,
    Gone,
    Interrupted,
    InvalidRequest,
    Resumed,
    Text,
    UnexpectedAnswer,
    Unreachable,
    Usage,
)
from tests.deployment.client.fake_server import (
    FACTS,
    MESSAGES,
    START,
    TEXT,
    TURN,
    Body,
    FakeServer,
    Plan,
    Time,
    cut,
    lost,
    published,
    refused,
    whole_text,
    written,
)

CUTS = [3, 7, 12]
quickly = settings(deadline=None, derandomize=True)
IDS = len(published(CUTS)._published[0])
WHOLE = whole_text()


def client(server: FakeServer, time: Time | None = None, seconds: float = 60.0) -> Client:
    time = time or Time()
    return Client(
        "http://server", patience=time.patience(seconds), transport=server.transport, sleep=time.sleep
    )  # fmt: skip


def events(server: FakeServer, session: str | None = "trip", **how: Any) -> list[AnswerEvent]:
    return list(client(server).stream(MESSAGES, session=session, **how))


def content(told: list[AnswerEvent], choice: int = 0) -> str:
    return "".join(event.content for event in told if isinstance(event, Text) and event.choice == choice)


def parts(told: list[AnswerEvent]) -> list[AnswerEvent]:
    """Without what is said of the connection."""
    return [event for event in told if not isinstance(event, Interrupted | Resumed)]


# ------------------------------------------------------------------------------------------------ whole


def test_a_stream_begins_has_text_at_positions_ends_and_is_counted():
    server = FakeServer(published(CUTS))
    began, *texts, ended, usage = events(server)
    assert began == Began(TURN, "demo") and usage == Usage(START, IDS, 8)
    assert [text.position for text in texts if isinstance(text, Text)] == [13, 17, 22, START + IDS, START + IDS]
    assert isinstance(ended, Ended) and (ended.finish_reason, ended.rounds, ended.acceptance_length) == (
        "stop", (2, 1), 2.5,
    )  # fmt: skip
    assert ended.resume is not None and (ended.resume.hit, ended.resume.reused) == (FACTS.hit, FACTS.reused)
    assert content(texts) == WHOLE and WHOLE[:-1] in TEXT and WHOLE.endswith("�")
    (request,) = server.asked
    assert request.url.path == "/v1/chat/completions" and request.headers["x-session-id"] == "trip"
    assert len(request.headers["idempotency-key"]) == 32
    assert json.loads(request.content)["stream_options"] == {"include_usage": True}


def test_a_whole_answer_is_collected_from_its_stream_with_all_choices_and_log_probabilities():
    server = FakeServer(published(CUTS, choices=2, logprobs=True), [cut(700), lost()])
    answer = client(server).ask(MESSAGES, options={"n": 2, "logprobs": True})
    assert isinstance(answer, Answer) and answer.interruptions == 1 and answer.turn == TURN
    assert [choice.content for choice in answer.choices] == [WHOLE] * 2
    for choice in answer.choices:
        assert [entry["logprob"] for entry in choice.logprobs] == [-float(position) for position in range(IDS)]
    assert answer.usage.completion_tokens == 2 * IDS and json.loads(server.asked[0].content)["n"] == 2


# ------------------------------------------------------------------------------------------------ broken


@pytest.mark.parametrize("session", ["trip", None])
def test_a_stream_that_breaks_after_any_byte_is_whole_and_has_nothing_twice(session: str | None):
    stream = published(CUTS)
    undisturbed = events(FakeServer(stream), session)
    for sent in range(len(written(stream, None)) + 1):
        server = FakeServer(stream, [cut(sent)])
        told = events(server, session)
        assert parts(told) == undisturbed, sent
        if len(server.asked) == 1:
            assert sent >= len(written(stream, None)) - 1, "only the last line's end may be missing"
            continue
        first, second = server.asked
        if session and any(isinstance(event, Began) for event in told[: told.index(Interrupted("connection reset"))]):
            assert second.url.path == f"/v1/sessions/trip/turns/{TURN}/events"
        else:
            assert second.content == first.content
            assert second.headers["idempotency-key"] == first.headers["idempotency-key"]


@quickly
@given(
    cuts=st.lists(st.integers(0, 2500), max_size=5),
    bounds=st.sets(st.integers(1, IDS - 1), max_size=6).map(sorted),
    size=st.integers(1, 400),
    session=st.sampled_from(["trip", None]),
    logprobs=st.booleans(),
)
def test_streams_that_break_again_and_again_in_parts_of_any_size_are_whole(
    cuts: list[int], bounds: list[int], size: int, session: str | None, logprobs: bool
):
    stream = published(bounds, logprobs=logprobs)
    told = events(FakeServer(stream, [cut(sent, size) for sent in cuts]), session)
    assert content(told) == WHOLE
    entries = [entry for event in told if isinstance(event, Text) for entry in event.logprobs]
    assert [entry["logprob"] for entry in entries] == [-float(position) for position in range(IDS if logprobs else 0)]
    assert [type(event) for event in told].count(Ended) == 1 and isinstance(told[-1], Usage | Resumed)
    positions = [event.position for event in told if isinstance(event, Text)]
    assert positions == sorted(positions)


@quickly
@given(first=st.integers(0, 9000), bounds=st.sets(st.integers(1, IDS - 1), max_size=6).map(sorted))
def test_a_turn_that_is_told_again_in_other_pieces_is_whole(first: int, bounds: list[int]):
    """As after a move: events may end elsewhere, and the text is the same."""
    server = FakeServer(published(CUTS, choices=2, logprobs=True))
    other = published(bounds, choices=2, logprobs=True)
    server.plans = [cut(first), lambda data: Body(written(other, None))]
    answer = client(server).ask(MESSAGES)
    assert [choice.content for choice in answer.choices] == [WHOLE] * 2
    for choice in answer.choices:
        assert [entry["logprob"] for entry in choice.logprobs] == [-float(position) for position in range(IDS)]


def test_the_async_client_reads_the_same():
    stream, time = published(CUTS), Time()

    async def scenario(sent: int) -> list[AnswerEvent]:
        server = FakeServer(stream, [cut(sent, 50), lost()])
        how = {"patience": time.patience(), "transport": server.transport, "sleep": time.sleep_async}
        async with AsyncClient("http://server/v1/", **how) as aclient:
            return [event async for event in aclient.stream(MESSAGES, session="trip", append=True)]

    for sent in range(0, len(written(stream, None)), 97):
        assert parts(asyncio.run(scenario(sent))) == events(FakeServer(stream))


def test_whoever_leaves_the_loop_and_closes_it_closes_the_connection():
    server = FakeServer(published(CUTS), [lambda data: Body(data, size=300)])
    told = client(server).stream(MESSAGES)
    next(told)
    told.close()
    assert server.bodies[0].closed and len(server.asked) == 1


def test_an_append_turn_goes_to_its_sessions_route_whatever_its_name_looks_like():
    server = FakeServer(published(CUTS), [cut(900)])
    events(server, "my/trip?", append=True)
    assert [request.url.raw_path.split(b"?")[0] for request in server.asked] == [
        b"/v1/sessions/my%2Ftrip%3F/turns", f"/v1/sessions/my%2Ftrip%3F/turns/{TURN}/events".encode(),
    ]  # fmt: skip


def told_event(event: str) -> Plan:
    """The beginning of the stream, and then this event."""
    return lambda data: Body(data[: data.index(b"\n\n", 600) + 2] + event.encode())


@pytest.mark.parametrize(
    "last",
    [
        "event: resume\ndata: {}\n\ndata: what comes after it is not read\n\n",
        'id: \ndata: {"error": {"message": "m", "type": "unavailable_error", "code": "replica_lost"}}\n\n',
        "",
    ],
    ids=["resume", "replica_lost", "end"],
)
def test_a_turn_that_goes_on_elsewhere_is_followed_there(last: str):
    server = FakeServer(published(CUTS), [told_event(last)])
    told = events(server)
    assert content(told) == WHOLE and server.asked[1].url.path.endswith("/events")
    assert [type(event) for event in told].count(Interrupted) == 1


# ------------------------------------------------------------------------------------------------ contradictions


def again(change: Callable[[bytes], bytes], sent: int = 900) -> list[Plan]:
    """A connection that breaks, and one that is not what it should be."""
    return [cut(sent), lambda data: Body(change(data))]


def edited(data: bytes, number: int, change: Callable[[str, Any], tuple[str, Any]]) -> bytes:
    """With one event's id and document changed."""
    blocks = data.decode().split("\n\n")
    place, document = blocks[number].removeprefix("id: ").split("\ndata: ")
    place, document = change(place, json.loads(document))
    blocks[number] = f"id: {place}\ndata: {json.dumps(document)}"
    return "\n\n".join(blocks).encode()


def with_id(change: Callable[[str], str], number: int) -> Callable[[bytes], bytes]:
    return lambda data: edited(data, number, lambda place, document: (change(place), document))


def with_text(text: str, number: int) -> Callable[[bytes], bytes]:
    def change(place: str, document: Any) -> tuple[str, Any]:
        document["choices"][0]["delta"]["content"] = text
        return place, document

    return lambda data: edited(data, number, change)


def without(number: int) -> Callable[[bytes], bytes]:
    return lambda data: b"\n\n".join(part for at, part in enumerate(data.split(b"\n\n")) if at != number)


def other_hash(place: str) -> str:
    return f"{place[:-8]}00000000"


def only(*numbers: int) -> Callable[[bytes], bytes]:
    return lambda data: b"".join(data.split(b"\n\n")[number] + b"\n\n" for number in numbers)


def ends_early(data: bytes) -> bytes:
    return with_id(position(12), len(data.split(b"\n\n")) - 4)(data)


def position(to: int) -> Callable[[str], str]:
    return lambda place: f"{TURN}.{to}.{place[-8:]}"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (with_id(other_hash, 0), "hash is not|had the hash"),
        (with_id(other_hash, 1), "had the hash"),
        (with_text("x Grüße", 1), "other text"),
        (with_text("", 1), "another length"),
        (with_text("3 Grüße, 5 €, ñ, 語 und", 1), "was not there|other text"),
        (without(1), "other text"),
        (lambda data: only(0, 5, 6, 7)(with_text("", 5)(data)), "without text that was read"),
        (with_id(position(9), 1), "text again"),
        (with_id(lambda place: place.replace(TURN, "f" * 32), 1), "comes in its place"),
        (lambda data: written(published(CUTS, text="etwas anderes als zuvor"), None), "had the hash|other text"),
    ],
)
def test_a_turn_that_is_told_again_differently_is_named(change: Callable[[bytes], bytes], why: str):
    server = FakeServer(published(CUTS), again(change))
    with pytest.raises(Contradiction, match=why):
        events(server, None)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda data: written(published(CUTS), None), "text again"),
        (with_id(position(15), 0), "text again"),
        (with_id(lambda place: place.replace(TURN, "f" * 32), 0), "comes in its place"),
        (ends_early, "ends the turn at another position"),
        (lambda data: data.replace(b'"completion_tokens":', b'"completion_tokens":1'), "of which"),
    ],
)
def test_a_followed_turn_that_does_not_go_on_where_it_was_left_is_named(change: Callable[[bytes], bytes], why: str):
    server = FakeServer(published(CUTS), again(change, 1200))
    with pytest.raises(Contradiction, match=why):
        events(server)


def test_a_stream_that_does_not_begin_with_its_beginning_is_named():
    for change, why in ((without(0), "does not open it"), (with_id(other_hash, 0), "not that of no tokens")):
        with pytest.raises(Contradiction, match=why):
            events(FakeServer(published(CUTS), [lambda data, change=change: Body(change(data))]))


def test_log_probabilities_show_a_token_that_is_missing():
    server = FakeServer(published(CUTS, logprobs=True), [lambda data: Body(without(2)(data))])
    with pytest.raises(Contradiction, match="brings 5 tokens' log-probabilities, and 9 tokens"):
        events(server)


def test_another_turn_under_the_same_key_is_taken_only_while_nothing_was_read():
    other = written(published(CUTS, turn="f" * 32), None)
    first_event = written(published(CUTS), None).index(b"\n\n") + 2
    server = FakeServer(published(CUTS), again(lambda data: other, first_event))
    told = events(server, None)
    assert content(told) == WHOLE and [event.turn for event in told if isinstance(event, Began)] == [TURN, "f" * 32]
    with pytest.raises(Contradiction, match="comes in its place"):
        events(FakeServer(published(CUTS), again(lambda data: other)), None)


def test_a_turn_that_ends_in_two_ways_is_named():
    stream = published(CUTS)
    end = written(stream, None).index(b'"completion_tokens"')
    change = lambda data: data.replace(b'"finish_reason":"stop"', b'"finish_reason":"length"')  # noqa: E731
    with pytest.raises(Contradiction, match="in another way"):
        events(FakeServer(stream, again(change, end)))


@pytest.mark.parametrize(
    "data",
    [
        b"data: {}\n\n", b"data: [1]\n\n", b"data: no\n\n", b"data: [DONE]\n\n", b'data: {"error": 3}\n\n',
        b'id: 1\ndata: {"choices": [{}]}\n\n', b'data: {"choices": [], "usage": {}}\n\n',
    ],
)  # fmt: skip
def test_what_is_no_stream_of_this_interface_is_named(data: bytes):
    with pytest.raises(UnexpectedAnswer):
        events(FakeServer(published(CUTS), [lambda _: Body(data)]))
    answer = httpx.Response(200, json={"choices": []})
    with pytest.raises(UnexpectedAnswer, match="event stream"):
        events(FakeServer(published(CUTS), [lambda _: answer]))


def test_a_refusal_in_the_middle_is_raised_with_its_code():
    error = {"error": {"message": "no token is allowed", "type": "invalid_request_error", "code": "grammar_dead_end"}}
    server = FakeServer(published(CUTS), [told_event(f"id: \ndata: {json.dumps(error)}\n\n")])
    with pytest.raises(InvalidRequest) as caught:
        events(server)
    assert caught.value.code == "grammar_dead_end" and len(server.asked) == 1


def test_a_turn_that_is_not_kept_any_more_is_named():
    with pytest.raises(Gone, match="not kept"):
        events(FakeServer(published(CUTS), [cut(900), refused(410, "turn_not_kept", "not kept")]))


# ------------------------------------------------------------------------------------------------ silence


@contextlib.contextmanager
def slow(before: float) -> Iterator[tuple[str, list[float]]]:
    """A server whose answer begins so many seconds after its request, has one part, and then says nothing more; to who
    asks for the rest it says nothing at all. Its URL, and the times of requests."""
    part = written(published(CUTS), None)[:600]
    over = threading.Event()
    asked: list[float] = []

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            asked.append(time.monotonic())
            over.wait(before)
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            self.wfile.write(part)
            over.wait(30)

        def do_GET(self) -> None:
            asked.append(time.monotonic())
            over.wait(5)

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        over.set()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_an_answer_that_has_not_begun_may_be_silent_and_one_that_has_may_not(
    kind: type[Client | AsyncClient], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("deployment.client.connection.SILENT_SECONDS", 0.2)
    with slow(before=0.6) as (url, asked):
        events = until_unreachable(kind(url, patience=0))
        waited = time.monotonic() - asked[0]
    assert isinstance(events[0], Began) and any(isinstance(event, Text) for event in events)
    assert 0.8 <= waited < 10 and len(asked) == 1


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_the_rest_of_a_turn_that_has_begun_may_not_be_silent_either(
    kind: type[Client | AsyncClient], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("deployment.client.connection.SILENT_SECONDS", 0.2)
    with slow(before=0.0) as (url, asked):
        events = until_unreachable(kind(url, patience=0.4), session="trip")
        waited = time.monotonic() - asked[1]
    assert any(isinstance(event, Text) for event in events) and isinstance(events[-1], Interrupted)
    assert 0.2 <= waited < 4


def until_unreachable(client: Client | AsyncClient, session: str | None = None) -> list[AnswerEvent]:
    """A turn's events, up to where the client gives up."""
    events: list[AnswerEvent] = []

    async def read() -> None:
        stream = client.stream(MESSAGES, session=session)
        if isinstance(stream, AsyncGenerator):
            async for event in stream:
                events.append(event)
        else:
            for event in stream:
                events.append(event)

    with pytest.raises(Unreachable):
        asyncio.run(read())
    return events
