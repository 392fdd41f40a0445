"""The client for programs that do other things meanwhile. The same methods as of `Client`, which says what they do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import httpx

from deployment.client import calls
from deployment.client.answers import document_of, pause_after_answer, pause_after_failure
from deployment.client.calls import Call, Message
from deployment.client.connection import Server, has_begun, timeout_of
from deployment.client.events import Answer, AnswerEvent, collected
from deployment.client.outage import Outage, Patience
from deployment.client.reading import TurnReading


class AsyncClient:
    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        api_key: str | None = None,
        *,
        patience: float | Patience = 60.0,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        server = Server.of(url, api_key)
        self._url = server.url
        self._patience = patience if isinstance(patience, Patience) else Patience(patience)
        self._http = httpx.AsyncClient(base_url=server.url, headers=server.headers, transport=transport)
        self._sleep = sleep

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    # ------------------------------------------------------------------------------------------------ turns

    async def ask(
        self,
        messages: Sequence[Message],
        *,
        session: str | None = None,
        append: bool = False,
        options: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
    ) -> Answer:
        told = self.stream(messages, session=session, append=append, options=options, idempotency_key=idempotency_key)
        return collected([event async for event in told])

    def stream(
        self,
        messages: Sequence[Message],
        *,
        session: str | None = None,
        append: bool = False,
        options: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
    ) -> AsyncGenerator[AnswerEvent, None]:
        asked = calls.turn(messages, session, append, options, idempotency_key)
        return self._read(TurnReading(asked, Outage(self._url, self._patience)))

    async def _read(self, reading: TurnReading) -> AsyncGenerator[AnswerEvent, None]:
        while not reading.over:
            call = reading.connect()
            request = call.request(self._http, timeout_of(call))
            try:
                response = await self._http.send(request, stream=True)
                has_begun(request)
                try:
                    if not response.is_success:
                        await response.aread()
                    for event in reading.answered(response):
                        yield event
                    parts = response.aiter_bytes()
                    while not (reading.left or reading.over):
                        part = await anext(parts, None)
                        for event in reading.ended() if part is None else reading.fed(part):
                            yield event
                finally:
                    await response.aclose()
            except httpx.TransportError as error:
                for event in reading.failed(error):
                    yield event
            if not reading.over:
                await self._sleep(reading.pause)

    # ------------------------------------------------------------------------------------------------ sessions, server

    async def models(self) -> list[dict[str, Any]]:
        return await self._listed(calls.models())

    async def replicas(self) -> list[dict[str, Any]]:
        return await self._listed(calls.replicas())

    async def sessions(self) -> list[dict[str, Any]]:
        return await self._listed(calls.sessions())

    async def session(self, name: str) -> dict[str, Any]:
        return await self._told(calls.session(name))

    async def create(self, name: str | None = None) -> dict[str, Any]:
        return await self._told(calls.create(name))

    async def fork(
        self,
        name: str,
        child: str | None = None,
        *,
        checkpoint: str | None = None,
        turn: str | None = None,
        frontier: int | None = None,
    ) -> dict[str, Any]:
        return await self._told(calls.fork(name, child, checkpoint, turn, frontier))

    async def turns(self, name: str) -> list[dict[str, Any]]:
        return await self._listed(calls.turns(name))

    async def checkpoints(self, name: str) -> list[dict[str, Any]]:
        return await self._listed(calls.checkpoints(name))

    async def checkpoint(self, name: str, called: str | None = None) -> dict[str, Any]:
        return await self._told(calls.checkpoint(name, called))

    async def delete_checkpoint(self, name: str, checkpoint: str) -> dict[str, Any]:
        return await self._told(calls.delete_checkpoint(name, checkpoint))

    async def migrate(self, name: str, to: str | None = None) -> dict[str, Any]:
        return await self._told(calls.migrate(name, to))

    async def export(self, name: str) -> bytes:
        return (await self._answer(calls.export(name))).content

    async def import_(self, document: bytes, name: str | None = None) -> dict[str, Any]:
        return await self._told(calls.import_(document, name))

    async def delete(self, name: str) -> dict[str, Any]:
        return await self._told(calls.delete(name))

    async def _listed(self, call: Call) -> list[dict[str, Any]]:
        return list((await self._told(call)).get("data") or [])

    async def _told(self, call: Call) -> dict[str, Any]:
        return document_of(await self._answer(call))

    async def _answer(self, call: Call) -> httpx.Response:
        outage = Outage(self._url, self._patience)
        while True:
            try:
                response = await self._http.send(call.request(self._http, timeout_of(call)))
            except httpx.TransportError as error:
                pause = pause_after_failure(error, call, outage)
            else:
                pause = pause_after_answer(response, call, outage)
                if pause is None:
                    return response
            await self._sleep(pause)
