"""Clients that leave before their answer is over, as Serve tells of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from ray.exceptions import TaskCancelledError
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from deployment.ingress import api
from deployment.leaving_clients import LeavingClients


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_stream_whose_reader_has_left_ends_and_raises_nothing(cancelled: bool):
    closed = False

    async def parts() -> AsyncGenerator[str, None]:
        nonlocal closed
        try:
            while True:
                yield "more"
                await asyncio.sleep(0.001)
        finally:
            closed = True

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await StreamingResponse(parts())(scope, receive, send)

    async def receive() -> Message:
        await asyncio.sleep(0.01)
        if cancelled:
            raise TaskCancelledError
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None: ...

    async def left() -> None:
        async with asyncio.timeout(10):
            await LeavingClients(app)({"type": "http", "asgi": {"spec_version": "2.0"}}, receive, send)

    asyncio.run(left())
    assert closed


def test_the_application_hears_of_clients_in_that_way():
    assert LeavingClients in [layer.cls for layer in api.user_middleware]
