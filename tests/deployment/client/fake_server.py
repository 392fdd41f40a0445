"""A server whose connections break where a test says. What it streams is written by the server's own code."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from deployment.chat_format import ChatFormat
from deployment.client.outage import Patience
from deployment.errors import Refused, RequestError
from deployment.event_ids import parse_event_id
from deployment.parsing.turn_text import TurnText
from deployment.refusal import refusal
from deployment.sse import chunks
from deployment.turn_stream import Place, TurnStream
from deployment.wire import Closed, Delta, Opened, SessionFacts, TokenFact, Told
from model import DEMO
from model.tokenizer import Tokenizer

T = TypeVar("T")

TOKENIZER = Tokenizer.load(DEMO / "target")
START = 10
TURN = "0123456789abcdef0123456789abcdef"
MESSAGES = [{"role": "user", "content": "Hello"}]
TEXT = "3 Grüße, 5 €, ñ, 語 und 7 🎈"
FACTS = SessionFacts("trip", "1.2", "peer", 8, 2, 20)


def published(
    cuts: Sequence[int],
    *,
    choices: int = 1,
    turn: str = TURN,
    text: str = TEXT,
    logprobs: bool = False,
    tools: Mapping[str, Mapping[str, Any]] | None = None,
):
    """A turn that is over: the text's ids in pieces that end at `cuts`, of all choices side by side. The last character
    is never completed, so that it comes with the end."""
    ids = tuple(TOKENIZER.encode(text))[:-1]
    stream = TurnStream(turn, choices, START, lambda _: TurnText(TOKENIZER, (), tools, turn))
    stream.publish(Opened("r1", "demo", 7, START, 8, FACTS, turn, choices=choices))
    texts = [TurnText(TOKENIZER, (), tools, turn) for _ in range(choices)]
    for begin, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        for choice, shown in enumerate(texts):
            new = ids[begin:end]
            facts = tuple(TokenFact(b"x", -float(position), ()) for position in range(begin, end)) if logprobs else ()
            said = shown.push(new)
            stream.publish(Delta(said.reasoning, said.content, choice, facts, new, START + end, calls=said.calls))
    for choice, shown in enumerate(texts):
        rest = shown.flush()
        stream.publish(
            Closed("stop", len(ids), (2, 1), 2.5, 0.5, FACTS, choice, reasoning=rest.reasoning, content=rest.content)
        )
    return stream


def whole_text(cuts: Sequence[int] = ()) -> str:
    """What a reader has in the end who was never disturbed."""
    deltas = [told.event for told in _now(_told(published(cuts), Place()))]
    return "".join(event.content for event in deltas if isinstance(event, Delta | Closed))


def _now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Of a turn that is over nothing has to be waited for; so it works inside a running loop too."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")


async def _told(stream: TurnStream, place: Place) -> list[Told]:
    return [told async for told in stream.read(place)]


@functools.lru_cache(maxsize=256)
def written(stream: TurnStream, after: str | None) -> bytes:
    """The stream's bytes, from the beginning or after an event. RequestError as the server raises it."""
    place = Place() if after is None else stream.place_after(parse_event_id(after, "after"))

    async def write() -> list[str]:
        opened, *told = await _told(stream, place)
        assert isinstance(opened.event, Opened)

        async def events() -> AsyncGenerator[Told, None]:
            for one in told:
                yield one

        shown = ChatFormat(opened.event)
        seen = None if after is None else parse_event_id(after, "after")
        return [part async for part in chunks(shown, events(), after=seen, usage="end")]

    return "".join(_now(write())).encode()


class Body(httpx.SyncByteStream, httpx.AsyncByteStream):
    """Bytes in parts of `size`, of which only the first `sent` arrive."""

    def __init__(self, data: bytes, sent: int | None = None, size: int = 1 << 16) -> None:
        self._data = data if sent is None else data[:sent]
        self._broken = sent is not None
        self._size = size
        self.closed = False

    def __iter__(self) -> Iterator[bytes]:
        for at in range(0, len(self._data), self._size):
            yield self._data[at : at + self._size]
        if self._broken:
            raise httpx.ReadError("connection reset")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self:
            yield part

    def close(self) -> None:
        self.closed = True

    async def aclose(self) -> None:
        self.closed = True


Plan = Callable[[bytes], Body | httpx.Response]
"""What becomes of one connection's stream."""


def cut(sent: int, size: int = 1 << 16) -> Plan:
    return lambda data: Body(data, sent, size)


def lost(error: type[httpx.TransportError] = httpx.ConnectError) -> Plan:
    def fail(data: bytes) -> httpx.Response:
        raise error("nobody is there")

    return fail


def refused(status: int, code: str, message: str = "why", param: str | None = None) -> Plan:
    return lambda data: _refusal(Refused(status, code, message, param))


def plain(status: int) -> Plan:
    return lambda data: httpx.Response(status, text="<html>")


@dataclass
class FakeServer:
    """Serves one turn. `plans`: what becomes of each connection in turn; after the last one, all arrives."""

    stream: TurnStream
    plans: list[Plan] = field(default_factory=list)
    asked: list[httpx.Request] = field(default_factory=list)
    bodies: list[Body] = field(default_factory=list)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        plan = self.plans.pop(0) if self.plans else Body
        try:
            body = plan(written(self.stream, request.url.params.get("after")))
        except RequestError as error:
            return _refusal(error.refused)
        if isinstance(body, httpx.Response):
            return body
        self.bodies.append(body)
        return httpx.Response(200, headers={"content-type": "text/event-stream; charset=utf-8"}, stream=body)

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self)

    @property
    def paths(self) -> list[str]:
        return [f"{request.method} {request.url.path}" for request in self.asked]


def _refusal(told: Refused) -> httpx.Response:
    answer = refusal(told)
    return httpx.Response(answer.status_code, content=bytes(answer.body), headers=dict(answer.headers))


@dataclass
class Time:
    """A clock that only sleeping moves. Every draw is the largest."""

    now: float = 100.0
    slept: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    async def sleep_async(self, seconds: float) -> None:
        self.sleep(seconds)

    def patience(self, seconds: float = 60.0) -> Patience:
        return Patience(seconds, lambda: self.now, lambda: 1.0)
