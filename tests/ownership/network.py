"""A clock, and a network that delays, reorders, drops and repeats what is sent. One seed, one course of events."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

HEAD = "head"


class Network:
    """`calm`: from now on every message comes once, soon."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._reads = random.Random(seed)
        self.now = 0.0
        self.calm = False
        self.cut: set[frozenset[str]] = set()
        self.delivered = 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = 0

    def after(self, seconds: float, action: Callable[..., None], *args: Any) -> None:
        self._numbers += 1
        heapq.heappush(self._events, (self.now + seconds, self._numbers, action, args))

    def send(self, here: str, there: str, deliver: Callable[..., None], *args: Any) -> None:
        """Between two nodes. Nobody learns what became of it."""
        copies = 1
        if not self.calm and here != there:
            chance = self.random.random()
            copies = 0 if chance < 0.03 else 2 if chance < 0.06 else 1
        for _ in range(copies):
            late = not self.calm and self.random.random() < 0.05
            delay = self.random.uniform(0.1, 4.0) if late else self.random.uniform(0.001, 0.05)
            self.after(delay, self._arrive, here, there, deliver, args)

    def read(self, here: str, question: Callable[[], Any], deliver: Callable[[Any], None]) -> None:
        """A question to the head's key-value store. One that does not get through is lost, as its answer is."""
        there, back = self._reads.uniform(0.001, 0.05), self._reads.uniform(0.001, 0.05)

        def answer() -> None:
            self.after(back, self._arrive, HEAD, here, deliver, (question(),))

        self.after(there, self._arrive, here, HEAD, answer, ())

    def reachable(self, here: str, there: str) -> bool:
        return here == there or frozenset((here, there)) not in self.cut

    def step(self, until: float) -> bool:
        """The next event. False: none is left before `until`."""
        if not self._events or self._events[0][0] > until:
            self.now = until
            return False
        self.now, _, action, args = heapq.heappop(self._events)
        action(*args)
        return True

    def _arrive(self, here: str, there: str, deliver: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self.reachable(here, there):
            self.delivered += 1
            deliver(*args)
