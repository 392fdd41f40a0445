"""Is the replica that a stream comes from still there?

Where its process ends, the connection does, and Ray says so. Where its node was cut off or lost its power, nothing says
so until Ray's health checks have failed, by default after a minute; the directory knows sooner, by the replica's lease.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from deployment.locks import Locks

SILENT_SECONDS = 3.0
"""A stream that was silent for so long may be one of a lost replica: or its turn waits for a lane, or has a long
prompt."""

LOOK_SECONDS = 1.0
"""How old what is known of a replica may be, so that all streams of one ask once in this time."""

T = TypeVar("T")


class ReplicaLost(Exception):
    """Nothing comes from the replica any more, and others may take over from it. `replica`: None where nobody knows who
    was asked."""

    def __init__(self, replica: str | None) -> None:
        super().__init__(replica)
        self.replica = replica


@dataclass
class _Wait:
    """`task` waits since `since` for what comes next; None: nobody does. `lost`: it was cancelled for that reason."""

    task: asyncio.Task[object] | None = None
    since: float = 0.0
    lost: bool = False


class ReplicaWatch:
    """Of one ingress. `is_lost` asks the directory."""

    def __init__(self, is_lost: Callable[[str], Awaitable[bool]]) -> None:
        self._ask = is_lost
        self._known: dict[str, tuple[float, bool]] = {}
        self._asking = Locks()

    async def over(self, told: AsyncGenerator[T, None], replica: Callable[[], str | None]) -> AsyncGenerator[T, None]:
        """The same, or `ReplicaLost`. `replica`: who should tell it; None: nobody has said that it has the call, which
        in silence is as good as lost."""
        wait, end = _Wait(), object()
        watching = asyncio.create_task(self._watch(wait, replica))
        try:
            async with aclosing(told):
                while True:
                    wait.task, wait.since = asyncio.current_task(), time.monotonic()
                    assert wait.task is not None
                    cancelled = wait.task.cancelling()
                    try:
                        one = await anext(told, end)
                    except asyncio.CancelledError:
                        if wait.lost and wait.task.uncancel() <= cancelled:
                            raise ReplicaLost(replica()) from None
                        raise
                    wait.task = None
                    if one is end:
                        return
                    yield one  # pyright: ignore[reportReturnType]
        finally:
            watching.cancel()

    async def answer(self, coming: Awaitable[T], replica: str | None) -> T:
        """The answer to one call, or `ReplicaLost`."""
        asked = asyncio.ensure_future(_awaited(coming))
        try:
            while not (await asyncio.wait((asked,), timeout=SILENT_SECONDS))[0]:
                if replica is not None and await self._is_lost(replica):
                    raise ReplicaLost(replica)
            return asked.result()
        finally:
            asked.cancel()

    async def _watch(self, wait: _Wait, replica: Callable[[], str | None]) -> None:
        while not wait.lost:
            await asyncio.sleep(LOOK_SECONDS)
            name, task, since = replica(), wait.task, wait.since
            if task is None or time.monotonic() - since < SILENT_SECONDS:
                continue
            lost = name is None or await self._is_lost(name)
            if lost and (wait.task, wait.since) == (task, since):
                wait.lost = True
                task.cancel()

    async def _is_lost(self, replica: str) -> bool:
        async with self._asking.of(replica):
            asked, lost = self._known.get(replica, (float("-inf"), False))
            if time.monotonic() - asked >= LOOK_SECONDS:
                lost = await self._ask(replica)
                now = time.monotonic()
                # What is too old to be believed goes: replicas come and go for as long as the ingress lives.
                self._known = {name: known for name, known in self._known.items() if now - known[0] < LOOK_SECONDS}
                self._known[replica] = now, lost
            return lost


async def _awaited(coming: Awaitable[T]) -> T:
    return await coming
