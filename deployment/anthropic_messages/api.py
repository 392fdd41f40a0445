"""The Anthropic Messages interface: requests in its form become turns of ours, and answers take its form."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from deployment.anthropic_messages.format import PING, MessageFormat, new_request_id
from deployment.anthropic_messages.schema import MessagesBody, PromptBody
from deployment.body_reading import parse
from deployment.request_reading import asking_of, beside, turn_request
from deployment.schemas import TurnBody
from deployment.sse import kept_alive
from deployment.token_api import TokenApi
from deployment.turn_api import TurnApi, begun, told_whole
from deployment.wire import TurnRequest

Body = TypeVar("Body", bound=PromptBody)


class MessagesApi:
    def __init__(self, turns: TurnApi, tokens: TokenApi) -> None:
        self._turns = turns
        self._tokens = tokens

    async def create(self, request: Request) -> Response:
        document, size = await self._turns.document(request)
        body, turn = await beside(size, self._read, MessagesBody, request, document)
        turn = await self._turns.seen(turn, size, body.media_places)
        turn = replace(turn, stop=tuple(body.stop_sequences or ()))
        events = self._turns.events(turn, body.stream)
        opened = await begun(events)
        shown = MessageFormat(opened, new_request_id())
        if body.stream:
            parts = kept_alive(shown.events(events), word=PING)
            return StreamingResponse(parts, media_type="text/event-stream", headers=shown.headers)
        return JSONResponse(shown.whole(await told_whole(opened, events)), headers=shown.headers)

    async def count(self, request: Request) -> Response:
        document, size = await self._turns.document(request)
        body, turn = await beside(size, self._read, PromptBody, request, document)
        count = await self._tokens.count(await self._turns.seen(turn, size, body.media_places))
        return JSONResponse({"input_tokens": count}, headers={"request-id": new_request_id()})

    def _read(self, kind: type[Body], request: Request, document: Any) -> tuple[Body, TurnRequest]:
        body = parse(kind, document)
        self._turns.check_model(body.model)
        return body, turn_request(parse(TurnBody, body.chat), "history", asking_of(request, document))
