"""Does a replica's engine get on with its work? One that has some and finishes none of it is stuck, whatever the
reason: a step that never returns, as with a lost device, or steps that do nothing."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable

from deployment.engine.commands import Inspect
from deployment.engine.events import Facts
from deployment.engine.service import EngineService

ANSWER_SECONDS = 5.0
"""A step that takes longer is looked after by the next check: Serve would count a check that waits as a failed one."""


class EngineStuck(RuntimeError):
    """The engine must be replaced. The message is one sentence."""


class EngineHealth:
    """`patience`: seconds without anything finished after which an engine that has work is stuck."""

    def __init__(self, service: EngineService, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._service = service
        self._patience = patience
        self._clock = clock
        self._asking: asyncio.Task[Facts] | None = None
        self._asked_at = 0.0
        self._work: int | None = None
        self._worked_at = 0.0

    async def check(self) -> None:
        """Raises `EngineStuck`; EngineError where the engine has ended. To be called every few seconds."""
        if self._asking is None:
            self._asking, self._asked_at = asyncio.create_task(self._facts()), self._clock()
        await asyncio.wait([self._asking], timeout=min(ANSWER_SECONDS, self._patience))
        if not self._asking.done():
            self._silent()
            return
        asking, self._asking = self._asking, None
        self._heard(asking.result())

    async def _facts(self) -> Facts:
        answer = await self._service.call(Inspect(secrets.token_hex(8)))
        assert isinstance(answer, Facts)
        return answer

    def _silent(self) -> None:
        seconds = self._clock() - self._asked_at
        if seconds > self._patience:
            raise EngineStuck(
                f"the engine has not answered for {seconds:.0f} s, so that its step does not end "
                f"(stuck_seconds is {self._patience:g})"
            )

    def _heard(self, answer: Facts) -> None:
        now, running, waiting = self._clock(), answer.facts["lanes_running"], answer.facts["turns_queued"]
        if answer.work != self._work or not (running or waiting):
            self._work, self._worked_at = answer.work, now
        elif now - self._worked_at > self._patience:
            raise EngineStuck(
                f"the engine has {running} turns in lanes and {waiting} that wait, and has finished nothing of them "
                f"for {now - self._worked_at:.0f} s (stuck_seconds is {self._patience:g})"
            )
