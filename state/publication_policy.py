"""When does a session's state follow its ledger into the durable tier? Rules over times and token counts alone.

    record and ledger    at the end of every turn
    state                when the session has been idle for a while, or has grown by so many tokens since its state
                         was written last

An image is 187 MiB at 27B and an agent makes a tool call every few seconds: written each time, images would be most of
what is written. What a restart costs without the newest image is a prefill of the tokens since the last one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from state.image_policy import LONG_TURN_TOKENS
from state.names import SessionKey

IDLE_SECONDS = 10.0


@dataclass
class _Known:
    written: int | None = None
    state: int = 0
    frontier: int = 0
    idle_since: float = 0.0


@dataclass
class PublicationPolicy:
    """What is known of the sessions of one owner. Seconds are those of any clock that does not go back.

    `idle_seconds`, `tokens`: how long a session rests, and how far it grows, before its state is written.
    """

    idle_seconds: float = IDLE_SECONDS
    tokens: int = LONG_TURN_TOKENS
    _sessions: dict[SessionKey, _Known] = field(default_factory=dict[SessionKey, _Known])

    def turn_ended(self, key: SessionKey, frontier: int, now: float) -> bool:
        """Whether the state goes with the record of a turn that ended at `frontier`."""
        known = self._sessions.setdefault(key, _Known())
        known.frontier, known.idle_since = frontier, now
        return frontier - known.state >= self.tokens

    def turn_began(self, key: SessionKey) -> None:
        """The session is not idle now."""
        if key in self._sessions:
            self._sessions[key].idle_since = float("inf")

    def written(self, key: SessionKey, frontier: int, state: int) -> None:
        """All state that there was of the session, as it stood at `frontier`, is durable: up to `state`, which is less
        where the device had let go of what came after it."""
        if key in self._sessions:
            known = self._sessions[key]
            known.written, known.state = frontier, state

    def due(self, now: float) -> list[SessionKey]:
        """Sessions that have rested for long enough and may have state that is not written, longest idle first."""
        waiting = [
            (known.idle_since, key)
            for key, known in self._sessions.items()
            if known.written != known.frontier and now - known.idle_since >= self.idle_seconds
        ]
        return [key for _, key in sorted(waiting, key=lambda entry: entry[0])]

    def forget(self, key: SessionKey) -> None:
        """The session has another owner, or is deleted. Unknown sessions are ignored."""
        self._sessions.pop(key, None)
