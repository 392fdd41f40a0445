"""A request's turn while this replica has it: its choices, who reads them, and when nobody does any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from functools import cached_property
from typing import Protocol

from deployment.event_ids import EventId
from deployment.turn_records import request_sha256
from deployment.turn_stream import Place, TurnStream
from deployment.wire import Moved, Told, TurnRequest


class Choice(Protocol):
    """One answer that runs."""

    def cancel(self) -> None: ...

    async def ended(self) -> None: ...

    async def suspend(self) -> None: ...

    def go_on(self, elsewhere: Moved | None) -> None: ...

    def moved(self) -> None: ...


class Timer(Protocol):
    def cancel(self) -> None: ...


Later = Callable[[float, Callable[[], None]], Timer]
"""Calls a function so many seconds later, unless the timer is cancelled."""


def call_later(seconds: float, call: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(seconds, call)


class HeldTurn:
    """It belongs to the replica, not to a request: readers come and go. Once it has had none for `linger` seconds, it
    is cancelled at its next commit boundary; committed tokens stay (decision 22). One that is unattended needs none."""

    def __init__(self, request: TurnRequest, stream: TurnStream, linger: float, later: Later) -> None:
        self.id = request.turn
        self.request = request
        self.stream = stream
        self.abandoned = False
        self.ended_at: float | None = None
        self._linger = linger
        self._later = later
        self._choices: list[Choice] = []
        self._readers = 0
        self._timer: Timer | None = None

    @cached_property
    def sha256(self) -> bytes:
        """Tells a repeated request from another one. A long body takes its time, and few are asked for again."""
        return request_sha256(self.request)

    def run(self, choices: Iterable[Choice]) -> None:
        """Who asked for the turn reads it by now, or has `linger` seconds for it."""
        self._choices = list(choices)
        self._timer = self._later(self._linger, self.cancel) if self._linger and self.left else None

    @property
    def unread(self) -> bool:
        return not self._readers

    @property
    def left(self) -> bool:
        """Whether nobody wants it any more, as far as is known."""
        return self.unread and not self.request.unattended

    async def read(self, after: EventId | None = None) -> AsyncGenerator[Told, None]:
        """The turn's first event, then all others, or those after the id `after`. RequestError: see
        `TurnStream.place_after`."""
        self._readers += 1
        self._watch()
        try:
            place = Place()
            if after is not None:
                # A turn that has come from elsewhere first tells what was told there.
                await self.stream.begun()
                place = self.stream.place_after(after) if self.stream.opened else place
            async for told in self.stream.read(place):
                yield told
        finally:
            self._readers -= 1
            self._watch()

    def cancel(self) -> None:
        """Ends the turn at its next commit boundary."""
        self.abandoned = True
        for choice in self._choices:
            choice.cancel()

    async def ended(self) -> None:
        await asyncio.gather(*(choice.ended() for choice in self._choices))

    async def suspend(self) -> None:
        """Stops all choices of a session's turn until `go_on`: see `RunningTurn.suspend`."""
        for choice in self._choices:
            await choice.suspend()

    def go_on(self, elsewhere: Moved | None) -> None:
        for choice in self._choices:
            choice.go_on(elsewhere)

    def moved(self) -> None:
        """The session has another owner."""
        for choice in self._choices:
            choice.moved()

    def over(self) -> None:
        """The stream has had its last event. A refusal of one choice ends the others."""
        self._watch()
        if len(self._choices) > 1:
            for choice in self._choices:
                choice.cancel()

    def _watch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.stream.over or not self.left:
            return
        if self._linger:
            self._timer = self._later(self._linger, self.cancel)
        else:
            self.cancel()
