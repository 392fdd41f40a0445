"""A session as the replica that owns it sees it. The engine holds its tensors; this holds everything else."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deployment.ownership import Epoch, SessionKey

if TYPE_CHECKING:
    from deployment.running import RunningTurn

Message = dict[str, Any]


@dataclass
class Session:
    """`ledger`: every committed token, hidden stop ids included. `transcript`: what the client saw.

    `opener` is where the last generation prompt begins in the ledger, so that an open think block can be told from one
    that a user wrote. `order` numbers captures. `lost`: there was state, and no copy of it was found.
    """

    key: SessionKey
    epoch: Epoch
    ledger: tuple[int, ...] = ()
    opener: int = 0
    frontier: int = 0
    transcript: list[Message] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)
    order: int = 0
    lost: bool = False
    running: RunningTurn | None = None
    moving_until: float = 0.0

    @property
    def free(self) -> bool:
        """Whether a turn could begin."""
        return self.running is None and time.monotonic() >= self.moving_until

    @property
    def engine_id(self) -> str:
        return f"{self.key.tenant}/{self.key.session}"

    def record(self) -> dict[str, Any]:
        """What travels in the checkpoint's manifest: plain data only."""
        return {
            "tenant": self.key.tenant,
            "session": self.key.session,
            "epoch": [self.epoch.incarnation, self.epoch.counter],
            "order": self.order,
            "ledger": list(self.ledger),
            "opener": self.opener,
            "frontier": self.frontier,
            "transcript": self.transcript,
            "turns": self.turns,
        }

    @classmethod
    def from_record(cls, key: SessionKey, epoch: Epoch, record: dict[str, Any]) -> Session:
        """The session under a new epoch. Raises ValueError if the record is that of another session."""
        if (record["tenant"], record["session"]) != (key.tenant, key.session):
            raise ValueError(f"the checkpoint belongs to session {record['session']!r}, not to {key.session!r}")
        return cls(
            key=key,
            epoch=epoch,
            ledger=tuple(record["ledger"]),
            opener=record["opener"],
            frontier=record["frontier"],
            transcript=list(record["transcript"]),
            turns=list(record["turns"]),
            order=record["order"],
        )
