"""How long does the client try? With growing pauses, drawn so that many clients do not come back together, and in all
no longer than its patience."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deployment.client.errors import Refusal, Unreachable

FIRST_PAUSE = 0.25
LONGEST_PAUSE = 8.0


@dataclass(frozen=True)
class Patience:
    """`seconds`: how long an outage may last before the client gives up; 0: nothing is tried twice. The rest is for
    tests: the time in seconds, and a draw from [0, 1)."""

    seconds: float
    clock: Callable[[], float] = time.monotonic
    draw: Callable[[], float] = random.random


class Outage:
    """The time since the connection was lost. Only what is new ends it: a server that answers and breaks off again and
    again is as good as none."""

    def __init__(self, server: str, patience: Patience) -> None:
        self._server = server
        self._patience = patience
        self._begun: float | None = None
        self.attempts = 0

    @property
    def lasts(self) -> bool:
        return self._begun is not None

    def pause(self, reason: str, cause: Refusal | None = None) -> float:
        """Seconds to wait before the next attempt. When patience ends: the server's refusal, if it gave one, or
        Unreachable."""
        now = self._patience.clock()
        if self._begun is None:
            self._begun = now
        wait = min(FIRST_PAUSE * 2**self.attempts, LONGEST_PAUSE) * self._patience.draw()
        if cause is not None and cause.retry_after is not None:
            # The same draw on top: all who were told the same second would come in it.
            wait += cause.retry_after
        if now + wait - self._begun >= self._patience.seconds:
            raise cause or Unreachable(f"{self._server} does not answer: {reason}")
        self.attempts += 1
        return wait

    def end(self) -> tuple[float, int]:
        """How long it lasted, and how many attempts it took."""
        lasted = 0.0 if self._begun is None else self._patience.clock() - self._begun
        attempts, self.attempts, self._begun = self.attempts, 0, None
        return lasted, attempts


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds; a date, which this interface does not send, counts as nothing."""
    told = headers.get("retry-after", "")
    return float(told) if told.isascii() and told.isdecimal() else None
