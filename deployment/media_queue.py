"""Whose media are decoded next? Tenants take turns, each with what it asked for first; and who may wait at all.

A file waits as it was sent, in memory: so there is an end to how many requests wait and to their bytes, and a tenant
may have half of both. What is refused may come again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from deployment.engine.errors import OVERLOADED
from deployment.errors import RequestError

MOST_REQUESTS = 256
MOST_BYTES = 1 << 30
"""Of all requests whose media wait or are being decoded."""

T = TypeVar("T")


class MediaQueue:
    def __init__(self, threads: Executor, places: int) -> None:
        """`places`: how many requests are worked on at a time."""
        self._threads = threads
        self._free = places
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._bytes: dict[str, list[int]] = {}
        """Of each request that is here, by its tenant."""

    async def run(self, tenant: str, size: int, function: Callable[..., T], *args: Any) -> T:
        """What the function returns, on a thread. `size`: bytes that wait with it. RequestError: 429."""
        self._check_room(tenant, size)
        self._bytes.setdefault(tenant, []).append(size)
        try:
            await self._place(tenant)
        except asyncio.CancelledError:
            self._forget(tenant, size)
            raise
        working: Future[T] = self._threads.submit(function, *args)
        loop = asyncio.get_running_loop()
        try:
            return await asyncio.shield(asyncio.wrap_future(working))
        finally:
            # Whoever does not want it any more leaves its thread at work: the place is free when that is.
            if working.done() or working.cancel():
                self._done(tenant, size)
            else:
                working.add_done_callback(lambda _: loop.call_soon_threadsafe(self._done, tenant, size))

    def _check_room(self, tenant: str, size: int) -> None:
        own = self._bytes.get(tenant, [])
        every = [one for each in self._bytes.values() for one in each]
        for here, share, param in ((own, 2, "messages"), (every, 1, None)):
            if len(here) >= MOST_REQUESTS // share or sum(here) + size > max(MOST_BYTES // share, size):
                whose = "of yours " if param else ""
                what = f"{len(here)} requests {whose}with images or videos wait already, which is all that may"
                raise RequestError(429, OVERLOADED, f"{param}: {what}" if param else what, param)

    async def _place(self, tenant: str) -> None:
        if self._free:
            self._free -= 1
            return
        called: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(called)
        try:
            await called
        except asyncio.CancelledError:
            if not called.cancelled():
                self._next()
            elif called in self._waiting.get(tenant, ()):
                self._left(tenant, called)
            raise

    def _left(self, tenant: str, called: asyncio.Future[None]) -> None:
        self._waiting[tenant].remove(called)
        if not self._waiting[tenant]:
            del self._waiting[tenant]

    def _done(self, tenant: str, size: int) -> None:
        self._forget(tenant, size)
        self._next()

    def _forget(self, tenant: str, size: int) -> None:
        self._bytes[tenant].remove(size)
        if not self._bytes[tenant]:
            del self._bytes[tenant]

    def _next(self) -> None:
        """The place goes to the tenant that has waited longest for one, or is free."""
        while self._waiting:
            tenant, line = self._waiting.popitem(last=False)
            called = line.popleft()
            if line:
                self._waiting[tenant] = line
            if not called.done():  # who has left in this very moment has not said so yet
                called.set_result(None)
                return
        self._free += 1
