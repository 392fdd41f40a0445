"""Turns over HTTP: begun, begun again by a client that was cut off, and followed. Whole or as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from ray.exceptions import RayActorError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from deployment.actors import Cluster
from deployment.answer import AnswerFormat, Choices
from deployment.chat_format import ChatFormat
from deployment.completion_format import CompletionFormat
from deployment.errors import Refused, RequestError, turn_not_kept
from deployment.event_ids import EventId, parse_event_id
from deployment.ownership import Placement, SessionKey
from deployment.refusal import refusal
from deployment.replica_calls import ATTEMPTS, Replicas
from deployment.request_reading import asking_of, completion_request, document_of, turn_request
from deployment.schemas import CompletionBody, GenerationBody, TurnBody, parse
from deployment.sse import chunks, kept_alive
from deployment.wire import Elsewhere, Opened, Route, Told, TurnRequest

_NO_TEXT = Refused(500, "internal_error", "the turn ended before it began")

Events = AsyncGenerator[Told, None]
Format = Callable[[Opened], AnswerFormat]


class TurnApi:
    def __init__(self, replicas: Replicas, cluster: Cluster, model: str) -> None:
        self._replicas = replicas
        self._cluster = cluster
        self._model = model

    async def chat(self, request: Request) -> Response:
        document = await document_of(request)
        body = parse(TurnBody, document)
        return await self._take(body, turn_request(body, "history", asking_of(request, document)), ChatFormat)

    async def append(self, request: Request, key: SessionKey) -> Response:
        document = await document_of(request)
        body = parse(TurnBody, document)
        return await self._take(body, turn_request(body, "append", asking_of(request, document, key)), ChatFormat)

    async def complete(self, request: Request) -> Response:
        document = await document_of(request)
        body = parse(CompletionBody, document)
        return await self._take(body, completion_request(body, asking_of(request, document)), CompletionFormat)

    async def follow(self, request: Request, placement: Placement, turn: str, with_usage: bool) -> Response:
        """A session's turn from its first event, or from after the event that the reader had last."""
        seen, name = request.query_params.get("after"), "after"
        if seen is None:
            seen, name = request.headers.get("last-event-id"), "Last-Event-ID"
        after = parse_event_id(seen, name) if seen else None
        route = Route(str(placement.key), placement.owner, placement)
        return await _answer(
            self._followed(route, placement.key, turn, after), ChatFormat, True, with_usage, after is None
        )

    async def _take(self, body: GenerationBody, turn: TurnRequest, shown: Format) -> Response:
        if body.model is not None and body.model != self._model:
            message = f"model: {body.model!r} is not served; {self._model!r} is"
            raise RequestError(404, "model_not_found", message, "model")
        return await _answer(self._taken(turn), shown, body.stream, body.with_usage, True)

    async def _taken(self, turn: TurnRequest) -> Events:
        """Events of a turn. If its replica dies before the first one, another replica is asked."""
        for attempt in range(ATTEMPTS):
            placement = await self._cluster.locate(turn.key) if turn.key is not None else None
            route = Route(_affinity(turn), placement.owner if placement else None, placement)
            begun = False
            try:
                async with aclosing(self._told(turn.key, None, "take_turn", route, turn)) as events:
                    async for told in events:
                        begun = True
                        yield told
                return
            except RayActorError:
                if begun or attempt + 1 == ATTEMPTS:
                    yield _lost()
                    return

    async def _followed(self, route: Route, key: SessionKey, turn: str, after: EventId | None) -> Events:
        try:
            async with aclosing(self._told(key, after, "follow_turn", route, key, turn, after)) as events:
                async for told in events:
                    yield told
        except RayActorError:
            yield _lost()

    async def _told(self, key: SessionKey | None, after: EventId | None, method: str, *args: Any) -> Events:
        """What the replica that is asked tells, or the one that it names. RayActorError."""
        where: Elsewhere | None = None
        async with aclosing(self._replicas.told(method, *args)) as answers:
            async for answer in answers:
                if isinstance(answer, Elsewhere):
                    where = answer
                else:
                    yield answer if isinstance(answer, Told) else _lost()
        if where is None or key is None:
            return
        route = Route(str(key), where.replica)
        async with aclosing(self._replicas.told("follow_kept_turn", route, key, where.turn, after)) as answers:
            async for answer in answers:
                yield answer if isinstance(answer, Told) else Told("", turn_not_kept(where.turn).refused)


def _affinity(turn: TurnRequest) -> str:
    """What the replica is chosen by where no session's owner is known. The same key finds the replica that runs its
    turn; the same hint finds state."""
    if turn.key is not None:
        return str(turn.key)
    if turn.idempotency_key is not None:
        return f"key/{turn.tenant}/{turn.idempotency_key}"
    return f"hint/{turn.tenant}/{turn.hint}" if turn.hint is not None else turn.turn


def _lost() -> Told:
    message = "the replica that ran this turn is gone; what it had committed before the turn is kept"
    return Told("", Refused(503, "replica_lost", message))


async def _answer(events: Events, shown: Format, stream: bool, with_usage: bool, from_start: bool) -> Response:
    """The first event is awaited before anything is sent, so that a refusal keeps its status."""
    first = await anext(events, Told("", _NO_TEXT))
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
            if isinstance(told.event, Refused):
                return refusal(told.event)
            choices.take(told.event)
    return JSONResponse(written.whole(choices), headers=headers)
