"""To whom do an owner's messages go, and which of them must be sent again?"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from deployment.ownership.awake import AwakeClock
from deployment.ownership.liveness import SILENT_SECONDS
from deployment.ownership.messages import Bring, FromOwner, Moved, Offer, ToReplica, ToStore
from deployment.ownership.words import Member

DIRECTORY: Final = "directory"
HERE: Final = "here"
"""The replica whose owner machine it is."""

REPEAT_SECONDS = 1.0
BRING_REPEAT_SECONDS = 5.0
BRING_SECONDS = 60.0
"""How long a store may take to fetch an image from another one."""


@dataclass(frozen=True)
class Peer:
    """Another replica."""

    replica: str


@dataclass(frozen=True)
class Send:
    to: Member | Peer | Literal["directory", "here"]
    message: ToStore | FromOwner | Offer | Moved | ToReplica


@dataclass
class _Waiting:
    """`since`: on the clock of who waits, which stands still when he does."""

    message: ToStore
    since: float
    sent: float


@dataclass
class Links:
    """What each store was asked and has not answered; the latest question to a store includes those before it. Its
    silence is counted in time in which the replica was awake."""

    _waiting: dict[Member, _Waiting] = field(default_factory=dict)
    _clock: AwakeClock | None = None

    def ask(self, member: Member, message: ToStore, now: float) -> Send:
        before, awake = self._waiting.get(member), self._awake(now)
        self._waiting[member] = _Waiting(message, before.since if before else awake, now)
        return Send(member, message)

    def answered(self, member: Member) -> None:
        self._waiting.pop(member, None)

    def heard(self, member: Member, now: float) -> None:
        """It lives, though it has not done all that it was asked."""
        if member in self._waiting:
            self._waiting[member].since = self._awake(now)

    def repeat(self, now: float) -> list[Send]:
        sends: list[Send] = []
        for member, waiting in self._waiting.items():
            if now - waiting.sent >= (BRING_REPEAT_SECONDS if isinstance(waiting.message, Bring) else REPEAT_SECONDS):
                waiting.sent = now
                sends.append(Send(member, waiting.message))
        return sends

    def silent(self, now: float) -> list[Member]:
        """To be asked every second."""
        awake = self._awake(now)
        return [
            member
            for member, waiting in self._waiting.items()
            if awake - waiting.since > (BRING_SECONDS if isinstance(waiting.message, Bring) else SILENT_SECONDS)
        ]

    def _awake(self, now: float) -> float:
        self._clock = self._clock or AwakeClock(now)
        return self._clock.at(now)
