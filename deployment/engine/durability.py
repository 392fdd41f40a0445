"""An engine's way to the durable tier that its options name, and back: who opens it, who writes, who hears of it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from deployment.durable_store import open_place
from deployment.engine.durable_sessions import DurableSessions, KindsAt, Outcome
from deployment.engine.events import Event, Stored
from deployment.engine.options import EngineOptions
from model.errors import ModelError
from state.background import BackgroundWriter
from state.document import open_document
from state.durable import DurableTier, Published
from state.errors import StateError
from state.names import Order, SessionKey

PLACES = 256
"""Sessions that may wait to be written."""

WAITING_BYTES = 2 << 30
"""Of their segments, which wait with them in memory; and no more than one session's beyond."""

TOKEN_SECONDS = 1e-4
"""What a token takes to prefill. It weighs checkpoints against each other when the budget is used up, no more."""

CLOSE_SECONDS = 60.0

logger = logging.getLogger(__name__)


def open_tier(place: str, budget: int, key_env: str | None = None) -> DurableTier:
    """The tier in a place (see `open_place`), `budget` bytes of it. Raises StateError naming what is wrong."""
    return DurableTier(open_place(place, key_env), budget, open_document)


class Durability:
    """`sessions` is None where the options name no durable tier. Must be closed."""

    def __init__(self, options: EngineOptions, emit: Callable[[Event], None]) -> None:
        """`emit` may be called by another thread from now on. Raises ModelError for a place that cannot be opened."""
        self._emit = emit
        self.sessions: DurableSessions | None = None
        self._writer: BackgroundWriter | None = None
        if options.durable is None:
            return
        try:
            tier = open_tier(options.durable, options.durable_bytes, options.durable_key_env)
        except StateError as error:
            raise ModelError(f"durable: {error}") from None
        self._writer = BackgroundWriter(PLACES, WAITING_BYTES)
        self.sessions = DurableSessions(tier, self._writer, TOKEN_SECONDS, self._told)

    def close(self) -> None:
        """Waits for what is still to be written."""
        if self._writer is not None and not self._writer.close(CLOSE_SECONDS):
            logger.error("the durable tier did not take all that waited for it within %.0f s", CLOSE_SECONDS)

    def _told(self, key: SessionKey, order: Order, outcome: Outcome, checkpoints: KindsAt) -> None:
        if isinstance(outcome, Published):
            self._emit(Stored(key, order, "published", outcome.payload, checkpoints))
        elif isinstance(outcome, Exception):
            logger.warning("session %s at %s was not made durable: %s", key, order, outcome)
            self._emit(Stored(key, order, "failed", reason=str(outcome)))
        else:
            self._emit(Stored(key, order, outcome))
