"""Turns over HTTP: begun, begun again by a client that was cut off, and followed. Whole or as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from deployment.answer import AnswerFormat, Choices
from deployment.chat_format import ChatFormat
from deployment.cluster.transport import Cluster
from deployment.completion_format import CompletionFormat
from deployment.errors import Refused, RequestError
from deployment.event_ids import parse_event_id
from deployment.last_call import REPLACED, Departing, LastCall
from deployment.lasting_stream import LastingStream
from deployment.media_intake import MediaIntake
from deployment.media_limits import MediaLimits
from deployment.ownership.messages import Placed
from deployment.ownership.words import SessionKey
from deployment.refusal import refusal
from deployment.replica_calls import Replicas
from deployment.request_reading import asking_of, body_of, completion_request, document_in, document_of, turn_request
from deployment.schemas import CompletionBody, GenerationBody, TurnBody, parse
from deployment.sse import chunks, kept_alive
from deployment.wire import Opened, Told, TurnRequest

_NO_TEXT = Refused(500, "internal_error", "the turn ended before it began")

Format = Callable[[Opened], AnswerFormat]
Bounded = AsyncGenerator[Told | Departing, None]


@dataclass(frozen=True)
class _Asked:
    """A turn, and how its answer is written. `with_usage`: a stream ends with a chunk for it."""

    turn: TurnRequest
    stream: bool
    with_usage: bool


class TurnApi:
    def __init__(
        self, replicas: Replicas, cluster: Cluster, model: str, last_call: LastCall, media: MediaLimits
    ) -> None:
        self._stream = LastingStream(replicas, cluster)
        self._model = model
        self._last_call = last_call
        self._intake = MediaIntake(media)

    async def chat(self, request: Request) -> Response:
        return await self._take(await self._asked(request, "history"), ChatFormat)

    async def append(self, request: Request, key: SessionKey) -> Response:
        return await self._take(await self._asked(request, "append", key), ChatFormat)

    async def complete(self, request: Request) -> Response:
        document = await document_of(request)
        body = parse(CompletionBody, document)
        self._check_model(body)
        turn = completion_request(body, asking_of(request, document))
        return await self._take(_Asked(turn, body.stream, body.with_usage), CompletionFormat)

    async def follow(self, request: Request, placement: Placed, turn: str, with_usage: bool) -> Response:
        """A session's turn from its first event, or from after the event that the reader had last."""
        seen, name = request.query_params.get("after"), "after"
        if seen is None:
            seen, name = request.headers.get("last-event-id"), "Last-Event-ID"
        after = parse_event_id(seen, name) if seen else None
        events = self._stream.followed(placement.key, turn, after, placement)
        return await _answer(self._last_call.bounded(events), ChatFormat, True, with_usage, after is None)

    async def _asked(
        self, request: Request, mode: Literal["history", "append"], key: SessionKey | None = None
    ) -> _Asked:
        """What is left of a request when its media are out of it: its body is let go of before the turn runs."""
        data = await body_of(request, self._intake.body_bytes)
        document = await document_in(data)
        body = parse(TurnBody, document)
        self._check_model(body)
        turn = turn_request(body, mode, asking_of(request, document, key))
        return _Asked(await self._intake.taken(turn, len(data)), body.stream, body.with_usage)

    def _check_model(self, body: GenerationBody) -> None:
        if body.model is not None and body.model != self._model:
            message = f"model: {body.model!r} is not served; {self._model!r} is"
            raise RequestError(404, "model_not_found", message, "model")

    async def _take(self, asked: _Asked, shown: Format) -> Response:
        events = self._last_call.bounded(self._stream.taken(asked.turn))
        return await _answer(events, shown, asked.stream, asked.with_usage, True)


async def _answer(events: Bounded, shown: Format, stream: bool, with_usage: bool, from_start: bool) -> Response:
    """The first event is awaited before anything is sent, so that a refusal keeps its status."""
    first = await anext(events, Told("", _NO_TEXT))
    if isinstance(first, Departing):
        return refusal(REPLACED)
    if not isinstance(first.event, Opened):
        await events.aclose()
        return refusal(first.event if isinstance(first.event, Refused) else _NO_TEXT)
    written = shown(first.event)
    headers = written.answer.headers
    if stream:
        parts = chunks(written, events, from_start=from_start, with_usage=with_usage)
        return StreamingResponse(kept_alive(parts), media_type="text/event-stream", headers=headers)
    choices = Choices(first.event.choices)
    async with aclosing(events):
        async for told in events:
            if isinstance(told, Departing):
                return refusal(REPLACED)
            if isinstance(told.event, Refused):
                return refusal(told.event)
            choices.take(told.event)
    return JSONResponse(written.whole(choices), headers=headers)
