"""The turns of a replica: those that run, and those that are over, for readers who come back and requests that repeat.

What is kept is bounded by time and by size; what a session's records know beyond that is in `Session.turns`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from deployment.errors import RequestError
from deployment.held_turn import HeldTurn
from deployment.ownership import SessionKey
from deployment.turn_records import request_sha256
from deployment.wire import TurnRequest

KEPT_SECONDS = 24 * 3600.0
"""How long a turn that is over can be read, and its idempotency key is known (decision 21)."""

KEPT_WEIGHT = 1 << 22
"""Token ids, of prompts too, and log-probabilities of turns that are over: some hundred bytes each at most. Beyond it
the oldest ones go."""

REPEAT_SECONDS = 600.0
"""How long after a turn a request that says it is a retry, and has no key, is taken for the same one."""


class TurnTable:
    def __init__(self, clock: Callable[[], float] = time.monotonic, kept_weight: int = KEPT_WEIGHT) -> None:
        self._clock = clock
        self._kept_weight = kept_weight
        self._running: dict[str, HeldTurn] = {}
        self._over: dict[str, HeldTurn] = {}  # in the order in which they were told to their ends here
        self._by_key: dict[tuple[str, str], HeldTurn] = {}
        self._weight = 0

    def __len__(self) -> int:
        return len(self._running) + len(self._over)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def lanes_wanted(self) -> int:
        """By all that run or wait."""
        return sum(turn.request.n for turn in self._running.values())

    def add(self, turn: HeldTurn, over_for: float | None = None) -> None:
        """`over_for`: seconds since it ended elsewhere, so that it is only told here."""
        if over_for is not None:
            turn.ended_at = self._clock() - over_for
        self._running[turn.id] = turn
        if (key := _key(turn.request)) is not None:
            self._by_key[key] = turn

    def ended(self, turn: HeldTurn) -> None:
        """Keeps a turn whose stream is over, unless nobody could ask for it, or it never began: a request that is
        refused may be tried again under its key."""
        if self._running.get(turn.id) is not turn:
            return  # a turn that has come back has taken the place of what it was here before
        del self._running[turn.id]
        if turn.stream.opened and turn.request.outlives_its_reader and not turn.stream.moved:
            turn.ended_at = self._clock() if turn.ended_at is None else turn.ended_at
            self._over[turn.id] = turn
            self._weight += turn.stream.weight
        else:
            self._forget_key(turn)
        self._trim()

    def moved(self) -> None:
        """All that run go on elsewhere, from their logs: nothing more of them is logged or told here."""
        for turn in tuple(self._running.values()):
            turn.moved()

    def find(self, turn: str, session: SessionKey) -> HeldTurn | None:
        """A session's turn."""
        self._trim()
        held = self._running.get(turn) or self._over.get(turn)
        return held if held is not None and held.request.key == session else None

    def repeated(self, request: TurnRequest) -> HeldTurn | None:
        """The turn that a request asks for again (decision 21). RequestError (422) if its key is another request's."""
        self._trim()
        if (key := _key(request)) is not None:
            held = self._by_key.get(key)
            if held is not None:
                check_same(request, held.sha256, held.request.key, held.id)
            return held
        if not request.repeated or request.key is None:
            return None
        sha256, now = request_sha256(request), self._clock()
        for held in self._newest_first():
            recent = held.ended_at is None or now - held.ended_at <= REPEAT_SECONDS
            if recent and held.request.key == request.key and held.sha256 == sha256:
                return held
        return None

    def forget(self, session: SessionKey) -> None:
        """Forgets the turns of a session that was deleted; those that still run are forgotten at their end."""
        for held in [held for held in self._newest_first() if held.request.key == session]:
            self._forget_key(held)
            self._drop(held)
            self._running.pop(held.id, None)

    def _newest_first(self) -> Iterator[HeldTurn]:
        yield from reversed(self._running.values())
        yield from reversed(self._over.values())

    def _trim(self) -> None:
        now = self._clock()
        for held in list(self._over.values()):
            assert held.ended_at is not None
            if self._weight <= self._kept_weight and now - held.ended_at <= KEPT_SECONDS:
                return
            self._drop(held)
            self._forget_key(held)

    def _drop(self, held: HeldTurn) -> None:
        if self._over.pop(held.id, None) is not None:
            self._weight -= held.stream.weight

    def _forget_key(self, held: HeldTurn) -> None:
        key = _key(held.request)
        if key is not None and self._by_key.get(key) is held:
            del self._by_key[key]


def check_same(request: TurnRequest, sha256: bytes, session: SessionKey | None, turn: str) -> None:
    """Raises RequestError (422) unless a request with a turn's idempotency key asks for that turn."""
    if request_sha256(request) == sha256 and request.key == session:
        return
    what = "in another session" if request.key != session else "with another body"
    message = f"Idempotency-Key: {request.idempotency_key!r} was used {what}, by turn {turn}; choose a new key"
    raise RequestError(422, "idempotency_mismatch", message, "Idempotency-Key")


def _key(request: TurnRequest) -> tuple[str, str] | None:
    return None if request.idempotency_key is None else (request.tenant, request.idempotency_key)
