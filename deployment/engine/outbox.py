"""When do events leave? At once; or, of a round on a card, while the card is busy with the next one.

Between a verdict and the next launch the card has nothing to do. What a round's client is told can wait for that
launch, and nothing else may: whatever is said later takes what is held with it, so that the order stays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator

from deployment.engine.events import Event


class Outbox:
    """`emit` receives every event, in order."""

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        self._held: list[Event] = []
        self._holding = False

    def send(self, event: Event) -> None:
        self._held.append(event)
        if not self._holding:
            self.release()

    @contextlib.contextmanager
    def holding(self) -> Generator[None, None, None]:
        """What is sent within stays until `release`, or until something is sent afterwards."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False

    def release(self) -> None:
        held, self._held = self._held, []
        for event in held:
            self._emit(event)
