"""Turns over HTTP: begun, begun again by a client that was cut off, and followed. Whole or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from deployment.answer import AnswerFormat, Choices
from deployment.body_reading import parse
from deployment.chat_format import ChatFormat
from deployment.cluster.transport import Cluster
from deployment.completion_format import CompletionFormat, merged
from deployment.completion_schema import CompletionBody
from deployment.content_parts import PartReader, chat_part
from deployment.errors import Refused, RequestError
from deployment.event_ids import EventId, parse_event_id
from deployment.last_call import REPLACED, Departing, LastCall
from deployment.lasting_stream import LastingStream
from deployment.media_intake import MediaIntake
from deployment.media_limits import MediaLimits
from deployment.metrics.turns import TurnMetrics
from deployment.ownership.messages import Placed
from deployment.ownership.words import SessionKey
from deployment.replica_calls import Replicas
from deployment.request_reading import asking_of, beside, body_of, completion_requests, document_in, turn_request
from deployment.schemas import TurnBody, UsageTold
from deployment.sse import chunks, kept_alive
from deployment.wire import Opened, Told, TurnRequest

_NO_TEXT = Refused(500, "internal_error", "the turn ended before it began")

Format = Callable[[Opened], AnswerFormat]
Bounded = AsyncGenerator[Told | Departing, None]


@dataclass(frozen=True)
class _Asked:
    """A turn, and how its answer is written. `usage`: where a stream says what it used."""

    turn: TurnRequest
    stream: bool
    usage: UsageTold


class TurnApi:
    def __init__(
        self,
        replicas: Replicas,
        cluster: Cluster,
        models: Sequence[str],
        last_call: LastCall,
        media: MediaLimits,
        metrics: TurnMetrics,
    ) -> None:
        """`models`: the names of the one that is served."""
        self._stream = LastingStream(replicas, cluster)
        self._models = models
        self._last_call = last_call
        self._intake = MediaIntake(media)
        self._metrics = metrics

    async def chat(self, request: Request) -> Response:
        return await self._take(await self._asked(request, "history"), ChatFormat)

    async def append(self, request: Request, key: SessionKey) -> Response:
        return await self._take(await self._asked(request, "append", key), ChatFormat)

    async def complete(self, request: Request) -> Response:
        data = await body_of(request)
        document = await document_in(data)
        body, turns = await beside(len(data), self._completions, request, document)
        shown = partial(CompletionFormat, scored=body.logprobs is not None, answered=body.wanted != 0)
        if len(turns) == 1:
            return await self._take(_Asked(turns[0], body.stream, body.usage_told), shown)
        answers = [asyncio.create_task(self._whole(turn, shown)) for turn in turns]
        try:
            return JSONResponse(merged(await asyncio.gather(*answers)))
        finally:
            for answer in answers:  # of a refused one the others go too
                answer.cancel()

    async def follow(self, request: Request, placement: Placed, turn: str, usage: UsageTold) -> Response:
        """A session's turn from its first event, or from after the event that the reader had last."""
        seen, name = request.query_params.get("after"), "after"
        if seen is None:
            seen, name = request.headers.get("last-event-id"), "Last-Event-ID"
        after = parse_event_id(seen, name) if seen else None
        events = self._stream.followed(placement.key, turn, after, placement)
        return await _answer(self._last_call.bounded(events), ChatFormat, True, usage, after)

    def events(self, turn: TurnRequest, streamed: bool) -> Bounded:
        """A turn's events, from its first to its last; a refusal is one. `streamed`: the client gets them one by
        one."""
        return self._metrics.watched(self._last_call.bounded(self._stream.taken(turn)), streamed)

    async def document(self, request: Request) -> tuple[Any, int]:
        """The body of a request that may hold media, and how many bytes it has. RequestError: 400, 413."""
        data = await body_of(request, self._intake.body_bytes)
        return await document_in(data), len(data)

    async def seen(
        self,
        turn: TurnRequest,
        body_bytes: int,
        places: Sequence[str] | None = None,
        reader: PartReader = chat_part,
    ) -> TurnRequest:
        """The turn with its media beside its messages. `places`: where another interface has them. RequestError: 400,
        413."""
        return await self._intake.taken(turn, body_bytes, places, reader)

    def check_model(self, name: str | None) -> None:
        """Raises RequestError (404) for another model than the one that is served."""
        if name is not None and name not in self._models:
            message = f"model: {name!r} is not served; {' or '.join(map(repr, self._models))} is"
            raise RequestError(404, "model_not_found", message, "model")

    async def _asked(
        self, request: Request, mode: Literal["history", "append"], key: SessionKey | None = None
    ) -> _Asked:
        """What is left of a request when its media are out of it: its body is let go of before the turn runs."""
        document, size = await self.document(request)
        asked = await beside(size, self._read, request, document, mode, key)
        return replace(asked, turn=await self.seen(asked.turn, size))

    def _read(
        self, request: Request, document: Any, mode: Literal["history", "append"], key: SessionKey | None
    ) -> _Asked:
        body = parse(TurnBody, document)
        self.check_model(body.model)
        return _Asked(turn_request(body, mode, asking_of(request, document, key)), body.stream, body.usage_told)

    def _completions(self, request: Request, document: Any) -> tuple[CompletionBody, list[TurnRequest]]:
        body = parse(CompletionBody, document)
        self.check_model(body.model)
        return body, completion_requests(body, asking_of(request, document))

    async def _take(self, asked: _Asked, shown: Format) -> Response:
        return await _answer(self.events(asked.turn, asked.stream), shown, asked.stream, asked.usage)

    async def _whole(self, turn: TurnRequest, shown: Format) -> dict[str, Any]:
        """RequestError where there is no whole answer."""
        async with aclosing(self.events(turn, streamed=False)) as events:
            opened = await begun(events)
            return shown(opened).whole(await told_whole(opened, events))


async def begun(events: Bounded) -> Opened:
    """The first event, which is awaited before anything is sent, so that a refusal keeps its status. RequestError."""
    first = await anext(events, Told("", _NO_TEXT))
    if isinstance(first, Told) and isinstance(first.event, Opened):
        return first.event
    await events.aclose()
    if isinstance(first, Departing):
        raise REPLACED.error
    raise (first.event if isinstance(first.event, Refused) else _NO_TEXT).error


async def told_whole(opened: Opened, events: Bounded) -> Choices:
    """Everything that comes after the first event. RequestError."""
    choices = Choices(opened.choices)
    async with aclosing(events):
        async for told in events:
            if isinstance(told, Departing):
                raise REPLACED.error
            if isinstance(told.event, Refused):
                raise told.event.error
            choices.take(told.event)
    return choices


async def _answer(
    events: Bounded, shown: Format, stream: bool, usage: UsageTold, after: EventId | None = None
) -> Response:
    opened = await begun(events)
    written = shown(opened)
    headers = written.answer.headers
    if stream:
        parts = chunks(written, events, after=after, usage=usage)
        return StreamingResponse(kept_alive(parts), media_type="text/event-stream", headers=headers)
    return JSONResponse(written.whole(await told_whole(opened, events)), headers=headers)
