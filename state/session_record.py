"""What belongs to a session beside tensors: who it is, its tokens, what its client saw, and what its turns were."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from state.media import Placed

Message = dict[str, Any]
"""`role`, `content`, and whatever else the client gave: plain data."""


@dataclass(frozen=True)
class TurnRecord:
    """One turn that is over.

    `request`: what was asked for beside the messages, by its names in `TurnRequest`; `request_sha256` is that of the
    whole request. `seed`: the effective one, 64 bits unsigned. `start`: the ledger position of the first token that was
    generated, which is the prompt's length. `published`: tokens that the client got. `frontier`, `hit`, `reused`,
    `prefilled`: as the engine told them. `ended_at`: seconds since 1970; 0 where that was not written down.
    """

    id: str
    mode: str
    replica: str
    request: dict[str, Any]
    request_sha256: bytes
    seed: int
    idempotency_key: str | None
    start: int
    published: int
    finish_reason: str
    frontier: int
    hit: str
    reused: int
    prefilled: int
    acceptance_length: float
    ended_at: float = 0.0


@dataclass(frozen=True)
class ForkPoint:
    """Where a session stood between two turns: a fork can begin there.

    `turn`: the one that ended there; None: the session came with a past. `name`: of an explicit checkpoint; None: it is
    that turn's end and no more. `tokens` of the ledger and `messages` of the transcript were there then, with that
    `frontier` and `opener`. `image`: the frontier of the state that an explicit checkpoint keeps; 0: none is known.
    `ledger`, `transcript`: its own, where the session's have left it since. Else both are empty: the session's begin
    with what it had.
    """

    turn: str | None
    tokens: int
    messages: int
    frontier: int
    opener: int
    name: str | None = None
    image: int = 0
    ledger: tuple[int, ...] = ()
    transcript: tuple[Message, ...] = ()


@dataclass(frozen=True)
class SessionRecord:
    """A session without its checkpoints. It names no tenant: whoever holds or imports it says whose it is.

    `id`: the name inside its tenant, 1 to 128 visible ASCII characters. `epoch`: (incarnation, counter) under which it
    was written; `order` numbers what was written under it. `ledger`: every committed token, hidden ones included; it
    may go on beyond the last checkpoint. `opener`: where the last generation prompt begins in the ledger. `frontier`:
    tokens whose target state was committed. `fork_points`: in the order in which the session was there. `media`: what
    the ledger's placeholders stand for.
    """

    id: str
    ledger: tuple[int, ...]
    branch: str = "main"
    epoch: tuple[int, int] = (0, 0)
    order: int = 0
    opener: int = 0
    frontier: int = 0
    transcript: tuple[Message, ...] = ()
    turns: tuple[TurnRecord, ...] = ()
    fork_points: tuple[ForkPoint, ...] = ()
    media: Placed = ()
