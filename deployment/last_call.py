"""When must an ingress that Serve is ending let go of its clients? It is told nothing, so it asks while it has any.

Serve waits for open streams for a while, and then cuts them. Shortly before, each of them ends with a word that says
where to go on; until then it runs on, since most end by themselves and not every client can follow.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from deployment.errors import Refused
from deployment.wire import Told

ASK_SECONDS = 1.0

REPLACED = Refused(
    503,
    "server_replaced",
    "the server that held this connection is being replaced; the turn goes on for a while, and the same request with "
    "its Idempotency-Key, or with x-session-retry: 1 in its session, finds it",
)

log = logging.getLogger("ray.serve")


@dataclass(frozen=True)
class Departing:
    """Instead of a turn's next event: nothing more comes over this connection."""


class LastCall:
    """`is_stopping`: whether Serve is ending this ingress; `grace`: seconds that streams may then go on."""

    def __init__(self, is_stopping: Callable[[], Awaitable[bool]], grace: float) -> None:
        self._is_stopping = is_stopping
        self._grace = grace
        self._due = asyncio.Event()
        self._readers = 0
        self._watching: asyncio.Task[None] | None = None

    async def bounded(self, events: AsyncGenerator[Told, None]) -> AsyncGenerator[Told | Departing, None]:
        """The same events, with Departing as the last one if the time is up before they end."""
        self._readers += 1
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())
        due = asyncio.create_task(self._due.wait())
        try:
            async with aclosing(events):
                while True:
                    coming = asyncio.ensure_future(anext(events, None))
                    try:
                        await asyncio.wait((coming, due), return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        if not coming.done():
                            coming.cancel()
                            await asyncio.wait((coming,))
                    told = None if coming.cancelled() else coming.result()
                    if told is None:
                        break
                    yield told
            if coming.cancelled():
                yield Departing()
        finally:
            due.cancel()
            self._readers -= 1

    async def _watch(self) -> None:
        while self._readers and not await self._is_stopping():
            await asyncio.sleep(ASK_SECONDS)
        if self._readers:
            log.warning("this ingress is being replaced: streams that are open in %.0f s end then", self._grace)
            await asyncio.sleep(self._grace)
            self._due.set()
