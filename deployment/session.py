"""A session as the replica that owns it sees it. The engine holds its tensors; this holds everything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deployment.engine.messages import Finished, Foreign, Hit
from deployment.fork_points import left_behind, of_turn
from deployment.keyed_turns import is_keyed
from deployment.ownership import Epoch, SessionKey
from deployment.turn_records import followed
from deployment.turns import Prompt
from deployment.whole_documents import NOTHING, WholeDocument
from state.media import Media, Placed
from state.session_record import ForkPoint, Message, SessionRecord, TurnRecord

if TYPE_CHECKING:
    from deployment.held_turn import HeldTurn


@dataclass
class Session:
    """`ledger`: every committed token, hidden stop ids included; `media`: what its placeholders stand for.
    `transcript`: what the client saw.

    `opener` is where the last generation prompt begins in the ledger, so that an open think block can be told from one
    that a user wrote. `order`: the log's last record that this says; `since`: the one where its newest turn began, from
    which on the log is kept beside the image, so that who takes over can tell that turn; 0: none did.
    `foreign`: another model or tokenizer made the ledger, so that only a full history goes on from it (decision 23).
    `created`: its client made it, so that it stays without a turn. `checkpoints`: kind and frontier of those that its
    newest copy has; `newest`: that one. `alone`: its client wants it in one store, and nowhere else.
    `buried`: all copies have its tombstone. `fork_points`: see `SessionRecord`. `came`: where its state was when this
    replica became the owner; `arrived`: when that was, on a monotonic clock, unless it is a new one.
    """

    key: SessionKey
    epoch: Epoch
    ledger: tuple[int, ...] = ()
    opener: int = 0
    frontier: int = 0
    media: Placed = ()
    transcript: list[Message] = field(default_factory=list)
    turns: list[TurnRecord] = field(default_factory=list)
    fork_points: list[ForkPoint] = field(default_factory=list)
    order: int = 0
    since: int = 0
    foreign: Foreign | None = None
    running: HeldTurn | None = None
    created: bool = False
    checkpoints: tuple[tuple[str, int], ...] = ()
    newest: WholeDocument = NOTHING
    alone: bool = False
    moving: bool = False
    buried: bool = False
    came: Hit = "device"
    arrived: float = float("-inf")

    @property
    def free(self) -> bool:
        """Whether a turn could begin."""
        return self.running is None and not self.moving

    @property
    def rests_since(self) -> float:
        """When its last turn ended, in seconds since 1970; 0: it had none."""
        return self.turns[-1].ended_at if self.turns else 0.0

    async def idle(self) -> bool:
        """Whether a turn could begin. A running turn that nobody reads has been cancelled: its end is waited for."""
        turn = self.running
        if turn is not None and turn.abandoned:
            await turn.ended()
        return self.free

    def book(self, prompt: Prompt, finished: Finished, messages: Sequence[Message], turn: TurnRecord) -> None:
        """A turn is over. `messages`: those it brought, and the answer as its client saw it."""
        past = self.record()
        self.ledger = (*prompt.ids, *finished.token_ids, *finished.hidden_ids)
        self.media = prompt.media
        self.opener = prompt.stable_boundary
        self.frontier = finished.frontier
        before = self.transcript if turn.mode == "append" else []
        self.transcript = [*before, *messages]
        self.foreign = None
        self.turns = [*self.turns[:-1], *map(followed, self.turns[-1:]), turn]
        self.fork_points = [*left_behind(past, self.record()), of_turn(self.record(), turn.id)]

    @property
    def shown(self) -> dict[str, Media]:
        """Its images and videos by the sha256 of the files that they came as. The transcript names them in the order in
        which they stand in the ledger; one that does not name all of them names none."""
        parts = [
            part["sha256"]
            for message in self.transcript
            if isinstance(message.get("content"), list)
            for part in message["content"]
            if isinstance(part.get("sha256"), str)
        ]
        if len(parts) != len(self.media):
            return {}
        return {sha256: one.media for sha256, one in zip(parts, self.media, strict=True)}

    @property
    def engine_id(self) -> str:
        return engine_id_of(self.key)

    @property
    def keyed(self) -> bool:
        """Whether it is one turn's log, which nothing continues, instead of a client's session."""
        return is_keyed(self.key)

    def record(self) -> SessionRecord:
        """What travels in the session's document."""
        return SessionRecord(
            id=self.key.session,
            ledger=self.ledger,
            epoch=(self.epoch.incarnation, self.epoch.counter),
            order=self.order,
            opener=self.opener,
            frontier=self.frontier,
            transcript=tuple(self.transcript),
            turns=tuple(self.turns),
            fork_points=tuple(self.fork_points),
            media=self.media,
        )

    @classmethod
    def of_record(cls, key: SessionKey, epoch: Epoch, record: SessionRecord) -> Session:
        """The session under a new epoch, and under the name that the key has. Its captures are numbered anew."""
        return cls(
            key=key,
            epoch=epoch,
            ledger=record.ledger,
            opener=record.opener,
            frontier=record.frontier,
            transcript=list(record.transcript),
            turns=list(record.turns),
            fork_points=list(record.fork_points),
            media=record.media,
        )


def engine_id_of(key: SessionKey) -> str:
    """What the engine calls a session."""
    return f"{key.tenant}/{key.session}"
