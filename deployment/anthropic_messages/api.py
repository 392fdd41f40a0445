"""The Anthropic Messages interface: requests in its form become turns of ours, and answers take its form."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace

from ray.exceptions import RayActorError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from deployment.anthropic_messages.format import PING, MessageFormat, refusal
from deployment.anthropic_messages.schema import MessagesBody, PromptBody
from deployment.errors import Refused, RequestError
from deployment.request_reading import Asking, asking_of, turn_request
from deployment.schemas import TurnBody, parse
from deployment.sse import kept_alive
from deployment.token_api import TokenApi
from deployment.turn_api import TurnApi, begun, told_whole
from deployment.wire import TurnRequest


class MessagesApi:
    def __init__(self, turns: TurnApi, tokens: TokenApi, refused: Callable[[Refused], None]) -> None:
        """`refused` hears of each refusal."""
        self._turns = turns
        self._tokens = tokens
        self._refused = refused

    async def create(self, request: Request) -> Response:
        return await self._answered(self._create, request)

    async def count(self, request: Request) -> Response:
        return await self._answered(self._count, request)

    async def _create(self, request: Request, name: str) -> Response:
        document, size = await self._turns.document(request)
        body = parse(MessagesBody, document)
        self._turns.check_model(body.model)
        turn = await self._turns.seen(_turn(body, asking_of(request, document)), size)
        turn = replace(turn, stop=tuple(body.stop_sequences or ()))
        events = self._turns.events(turn, body.stream)
        opened = await begun(events)
        shown = MessageFormat(opened, name)
        if body.stream:
            parts = kept_alive(shown.events(events), word=PING)
            return StreamingResponse(parts, media_type="text/event-stream", headers=shown.headers)
        return JSONResponse(shown.whole(await told_whole(opened, events)), headers=shown.headers)

    async def _count(self, request: Request, name: str) -> Response:
        document, size = await self._turns.document(request)
        body = parse(PromptBody, document)
        self._turns.check_model(body.model)
        turn = await self._turns.seen(_turn(body, asking_of(request, document)), size)
        encoded = await self._tokens.encoded(turn)
        return JSONResponse({"input_tokens": len(encoded.ids)}, headers={"request-id": name})

    async def _answered(self, answer: Callable[[Request, str], Awaitable[Response]], request: Request) -> Response:
        """Refusals have this interface's form, and every answer an id."""
        name = f"req_{secrets.token_hex(12)}"
        try:
            return await answer(request, name)
        except RequestError as error:
            refused = error.refused
        except RayActorError:
            refused = Refused(503, "unavailable", "a part of the server is gone and is being replaced; try again")
        self._refused(refused)
        return refusal(refused, name)


def _turn(body: PromptBody, asking: Asking) -> TurnRequest:
    return turn_request(parse(TurnBody, body.chat), "history", asking)
