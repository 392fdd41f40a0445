"""What does a session's turn log say? One record for each thing that nobody may forget.

Records with a number (`Numbered`) are the session's history: turns, rounds, moves of the head, its end. Their sequence
goes up by one from record to record and never falls, also when the head goes back. Notes (`Note`) say who may write and
what of the past still counts; a note's sequence is that of the numbered record before it in this copy. The bytes are
in `log_format.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deployment.engine.commands import TokenLogprob
from deployment.engine.events import FinishReason
from deployment.ownership.words import NOTHING, Member
from state.media import Placed
from state.names import Order


@dataclass(frozen=True)
class TurnBegan:
    """A turn before its first round. `request`: the canonical one; `request_sha256` of the whole (decision 21); `seed`:
    the effective one, 64 bits; `at`: seconds since 1970. `media`: of the prompt; without pixels those that the session
    has shown before, as its image or an earlier record says."""

    order: Order
    turn: str
    request: dict[str, Any]
    request_sha256: bytes
    seed: int
    idempotency_key: str | None
    prompt_ids: tuple[int, ...]
    stable_boundary: int
    at: float
    media: Placed = ()


@dataclass(frozen=True)
class Round:
    """What one round of one choice committed. `start`: the ledger position of the first id. The last `held_back` ids of
    the turn so far are not published yet, since they may belong to a stop string, or are hidden stop ids. `accepted`
    drafts; None for the token that prefill drew. `logprobs` of all these ids, None where nobody asked for them."""

    order: Order
    turn: str
    choice: int
    start: int
    token_ids: tuple[int, ...]
    held_back: int
    accepted: int | None
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True)
class TurnEnded:
    """One choice of a turn is over. `published`: ids that the client got, so that held-back ones that turned out to be
    text are known; the rest as in the engine's `Finished`. `at`: seconds since 1970."""

    order: Order
    turn: str
    choice: int
    finish_reason: FinishReason
    published: int
    stop_id: int | None
    stop_string: str | None
    text_cut: int
    at: float


@dataclass(frozen=True)
class HeadMoved:
    """The session goes on after the first `length` ids of `turn`'s ledger, which an image as of this record says. None:
    of those that it is being made with, as a fork; before that image is there, there is no such session."""

    order: Order
    turn: str | None
    length: int


OLDER = HeadMoved(NOTHING, "older", 0)
"""What the log of a session begins with that is to get what it was before; no turn has such an id. Before that image is
there, it cannot be continued."""


@dataclass(frozen=True)
class Deleted:
    """The session is no more: its tombstone, kept longer than any copy. `at`: seconds since 1970; 0 of one that nobody
    asked to delete, and that was never durable."""

    order: Order
    at: float


@dataclass(frozen=True)
class Sealed:
    """Nobody below `order.epoch` may write here any more. `anew`: what this copy held before counts for nothing."""

    order: Order
    anew: bool = False


@dataclass(frozen=True)
class SetNamed:
    """Under `order.epoch` these stores hold copies, and `owner` is the replica that writes them. A store that is not
    among them holds nothing that counts. `alone`: see `Named`."""

    order: Order
    members: tuple[Member, ...]
    owner: str
    alone: bool = False


Numbered = TurnBegan | Round | TurnEnded | HeadMoved | Deleted
Note = Sealed | SetNamed
Record = Numbered | Note
