"""The owner's part of a session, in one replica.

A step machine: each method takes what happened and the time, and returns what to send. Nothing that it sends needs to
arrive, or to arrive once: `tick`, to be called every second, sends again what was not answered.

    TAKING --> OPEN <--> OFFERED        TAKING again with every higher grant
    FENCED: a store knows a higher epoch. BARREN: no copy that counts is left, or all were lost while it was the owner.
    DELETED: the tombstone is in all copies.
    These three are the end of this machine; who wants the session after them claims it for a new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from deployment.ownership.history import History
from deployment.ownership.joining import Joining
from deployment.ownership.log import Deleted, Numbered
from deployment.ownership.log_format import encode
from deployment.ownership.messages import (
    Append,
    Committed,
    CopiesLost,
    Ends,
    Fenced,
    FromStore,
    Full,
    Grant,
    Held,
    Join,
    Kept,
    Known,
    Look,
    Moved,
    NoRoom,
    Offer,
    Opened,
    Receipt,
    Refused,
    Silent,
    Unavailable,
)
from deployment.ownership.publication import Publication
from deployment.ownership.sending import DIRECTORY, HERE, Links, Peer, Send
from deployment.ownership.standing import Standing
from deployment.ownership.takeover import Phase, Takeover
from deployment.ownership.words import NOTHING, Epoch, Member, Order, SessionKey
from state.errors import StateError

OFFER_SECONDS = 5.0
"""After so long without word from a destination, the source asks the log what became of the session."""


class State(Enum):
    TAKING = "taking over"
    OPEN = "open"
    OFFERED = "offered"
    FENCED = "fenced"
    BARREN = "without a copy"
    DELETED = "deleted"


ENDED = (State.FENCED, State.BARREN, State.DELETED)


@dataclass(frozen=True)
class _Offered:
    to: str
    since: float
    looked: frozenset[Member] = frozenset()


class Owner:
    """One session. `committed`: all copies hold the log up to there, so that what it says may be published. `logged`:
    bytes of all records that this machine has read and written.

    `tenure`: a name that no other machine has, in this replica or another; its claims say it, and its grants repeat it.
    `offered_by`: the replica that offered the session, which is told when it is open here. `first`: the record that
    it begins with, if it begins anew; its set is named only when all of it have that. `standing`: of the stores, as its
    replica has seen it; what a store answers counts only while that holds, and waits until then.
    """

    def __init__(
        self,
        key: SessionKey,
        replica: str,
        tenure: str,
        standing: Standing,
        offered_by: str | None = None,
        first: Numbered | None = None,
    ) -> None:
        self.key = key
        self.replica = replica
        self.tenure = tenure
        self._standing = standing
        self._doubted: dict[tuple[Member, type[FromStore]], FromStore] = {}
        self.state = State.TAKING
        self.grant: Grant | None = None
        self.history = History()
        self.logged = 0
        self._offered_by = offered_by
        self._first = first
        self._loaded = False
        self._opened_under: Epoch | None = None
        self._ends_deleted = False
        self._outbox: list[tuple[Numbered, bytes]] = []
        self._acked: dict[Member, Order] = {}
        self._links = Links()
        self._takeover: Takeover | None = None
        self._publication: Publication | None = None
        self._joining: Joining | None = None
        self._offered: _Offered | None = None

    @property
    def committed(self) -> Order:
        return self.history.end

    @property
    def published(self) -> bool:
        """Whether the image that was published last, if any was, is in all copies."""
        return self._publication is None or (self.state is State.OPEN and self._publication.done)

    @property
    def epoch(self) -> Epoch:
        """Raises `StateError` before the first grant."""
        if self.grant is None:
            raise StateError(f"session {self.key}: {self.replica} was not granted it")
        return self.grant.epoch

    def stands(self, now: float) -> bool:
        """Whether a store of its set is known to count, so that what its stores have may be told."""
        return self.grant is not None and self._standing.holds(self.grant.members, now)

    @property
    def settled(self) -> bool:
        """Whether everything that was appended is in all copies."""
        return self.state is State.OPEN and not self._outbox

    @property
    def held(self) -> Held | None:
        """What this replica writes."""
        if self.grant is None or self.state not in (State.OPEN, State.OFFERED, State.DELETED):
            return None
        grant, deleted = self.grant, self._deleted_as_of
        return Held(
            self.key, self.epoch, self.replica, self.tenure, grant.members, self.committed, deleted, grant.alone
        )

    @property
    def report(self) -> Held | Grant | None:
        """What the replica's renewals say of the session: a grant, until it has been acted upon."""
        return self.grant if self.state is State.TAKING else self.held

    @property
    def _deleted_as_of(self) -> Epoch | None:
        """A tombstone of an epoch before ours is that of a session which may be made anew here at any moment."""
        if self.state is State.DELETED:
            return self.epoch
        return self.committed.epoch if self._ends_deleted else None

    # -------------------------------------------------------------------------------------------- messages

    def granted(self, grant: Grant, now: float) -> list[Send]:
        """The directory's yes. A repeated one is answered by what came of it."""
        if grant.tenure != self.tenure or self.state in ENDED or (self.grant is not None and grant.epoch < self.epoch):
            return []
        if self.grant is not None and grant.epoch == self.epoch:
            return [Send(DIRECTORY, self.held)] if self.held is not None else []
        if self._opened_under is not None:
            grant = replace(grant, anew=False)  # what it has begun, it does not begin again
        self.grant = grant
        self.state = State.TAKING
        self._joining = self._offered = None
        self._takeover = Takeover(grant, self.replica, self._is_mine, self._first)
        return self._takeover.begin(now)

    def known(self, known: Known, now: float) -> list[Send]:
        """The directory has taken in what this machine said that it holds."""
        takeover = self._takeover
        if self.state is not State.TAKING or takeover is None or known.epoch != self.epoch:
            return []
        if not self.stands(now):
            return []  # it is told again
        takeover.known()
        return self._open(takeover, now) if takeover.phase is Phase.DONE else []

    def received(self, answer: FromStore, now: float) -> list[Send]:
        """A store's answer. One to what was asked under an earlier epoch says nothing any more."""
        if self.grant is None or answer.epoch != self.epoch or self.state in ENDED:
            return []
        if isinstance(answer, Refused) and answer.seal > self.epoch:
            return self._fence(answer.seal)
        if not self.stands(now):
            self._doubted[answer.member, type(answer)] = answer
            return []
        no_room = [Send(HERE, NoRoom(self.key, *_room(answer)))] if isinstance(answer, Full) else []
        return no_room + (self._taking(answer, now) if self.state is State.TAKING else self._answered(answer, now))

    def join(self, join: Join, now: float) -> list[Send]:
        """The directory would have another store hold a copy."""
        if self.state is not State.OPEN or self._joining is not None or join.epoch != self.epoch:
            return []
        self._joining = Joining(join, self._acked_most)
        return self._joining.begin(now)

    def moved(self, moved: Moved) -> list[Send]:
        """The destination of an offer goes on."""
        if self.grant is None or moved.epoch <= self.epoch or self.state in ENDED:
            return []
        return self._fence(moved.epoch)

    def copies_lost(self, lost: CopiesLost) -> list[Send]:
        """No store is left that could give a receipt. Whoever goes on with the session claims it anew."""
        if self.grant is None or lost.epoch < self.epoch or self.state in ENDED:
            return []
        self.state = State.BARREN
        members = ", ".join(map(str, self.grant.members))
        reason = f"no copy is left of epoch {self.epoch}, which {members} held"
        return [Send(HERE, Unavailable(self.key, reason, self._opened_under if self._loaded else None))]

    def tick(self, now: float) -> list[Send]:
        """To be called every second."""
        doubted, self._doubted = self._doubted, {}
        sends = [send for answer in doubted.values() for send in self.received(answer, now)]
        match self.state:
            case State.TAKING:
                sends += self._takeover.tick(now) if self._takeover is not None else []
            case State.OPEN:
                sends += self._tick_open(now)
            case State.OFFERED:
                sends += self._tick_offered(now)
            case _:
                pass
        return [send for send in sends if not self._has_answered(send.message)]

    def _has_answered(self, message: object) -> bool:
        """Whether a store is said to be silent whose answer waits here."""
        return isinstance(message, Silent) and any(member == message.member for member, _ in self._doubted)

    # -------------------------------------------------------------------------------------------- taking over

    def _taking(self, answer: FromStore, now: float) -> list[Send]:
        takeover = self._takeover
        assert takeover is not None
        if isinstance(answer, Refused):
            return []
        sends = takeover.received(answer, now)
        if takeover.phase is Phase.BARREN:
            self.state = State.BARREN
        if takeover.phase is Phase.DONE:
            sends += self._open(takeover, now)
        return sends

    def _is_mine(self, end: Order) -> bool:
        """Whether this replica wrote what the log ends with: its own state is then the session's."""
        mine = end == self.committed or any(record.order == end for record, _ in self._outbox)
        return self._loaded and mine

    def _open(self, takeover: Takeover, now: float) -> list[Send]:
        grant, source, continues = takeover.grant, takeover.source, takeover.continues
        # A tombstone is written again, so that its epoch is that of the set.
        end = source.history.end.sequence
        waiting = [r for r, _ in self._outbox if r.order.sequence > end or isinstance(r, Deleted)]
        self.state, self._opened_under = State.OPEN, grant.epoch
        self.history = source.history
        self._ends_deleted = source.deleted
        self._acked = dict.fromkeys(grant.members, self.committed)
        self._links, self._outbox, self._takeover = Links(), [], None
        self._loaded = self._loaded and continues
        if continues:
            self.logged -= sum(len(encode(record)) for record in waiting)  # they are appended again
        else:
            self.logged = sum(map(len, takeover.records))
        assert self.held is not None
        opened = Opened(
            self.key, grant.epoch, self.committed, continues, takeover.records, source.images, source.member
        )  # fmt: skip
        sends = [Send(DIRECTORY, self.held), Send(HERE, opened), Send(HERE, Committed(self.key, end))]
        if self._offered_by is not None:
            sends.append(Send(Peer(self._offered_by), Moved(self.key, grant.epoch)))
            self._offered_by = None
        if not continues:
            self._publication = None
            return sends
        if self._publication is not None:
            sends += self._publication.under(grant.epoch, grant.members, now)
        return sends + self.append(waiting, now)

    def loaded(self) -> None:
        """The replica has made its own state what the last `Opened` said, and may append to it."""
        self._loaded = True

    # -------------------------------------------------------------------------------------------- appending

    def append(self, records: Sequence[Numbered], now: float) -> list[Send]:
        """Writes records to all copies, in this order; their own `order` is made here. While the set changes they wait.

        Raises `StateError` where nothing may be written: before `loaded`, after an offer, when fenced.
        """
        if not self._loaded or self.state not in (State.OPEN, State.TAKING):
            raise StateError(f"session {self.key}: {self.replica} cannot append to it, its state is {self.state.value}")
        if self._outbox and isinstance(self._outbox[-1][0], Deleted):
            raise StateError(f"session {self.key}: nothing is appended to it after its tombstone")
        for record in records:
            ordered = replace(record, order=Order(self.epoch, self.last.sequence + 1))
            data = encode(ordered)
            self._outbox.append((ordered, data))
            self.logged += len(data)
        if self.state is State.TAKING or not records:
            return []
        return [self._links.ask(member, self._unacked(member), now) for member in self._acked]

    @property
    def last(self) -> Order:
        """Of the last record that was appended, with or without receipts."""
        return self._outbox[-1][0].order if self._outbox else self.committed

    @property
    def _acked_most(self) -> Member:
        return max(self._acked, key=lambda member: self._acked[member].sequence)

    def _unacked(self, member: Member) -> Append:
        acked = self._acked[member]
        records = tuple(data for record, data in self._outbox if record.order.sequence > acked.sequence)
        return Append(self.key, self.epoch, acked, records)

    def _answered(self, answer: FromStore, now: float) -> list[Send]:
        if self.state is State.OFFERED and isinstance(answer, Ends):
            return self._looked(answer)
        sends: list[Send] = []
        if isinstance(answer, Receipt) and answer.member in self._acked:
            sends += self._receipt(answer, now)
        elif isinstance(answer, Full):
            self._links.heard(answer.member, now)
        elif isinstance(answer, Kept) and self._publication is not None:
            sends += self._publication.kept(answer)
        if self._joining is not None:
            sends += self._joining.received(answer, now)
        return sends

    def _receipt(self, receipt: Receipt, now: float) -> list[Send]:
        if receipt.end.sequence <= self._acked[receipt.member].sequence:
            return []
        self._acked[receipt.member] = receipt.end
        if receipt.end == self.last:
            self._links.answered(receipt.member)
        else:
            self._links.heard(receipt.member, now)
        safe = min(order.sequence for order in self._acked.values())
        if safe == self.committed.sequence:
            return []
        while self._outbox and self._outbox[0][0].order.sequence <= safe:
            record, _ = self._outbox.pop(0)
            self.history = self.history.followed_by(record.order)
            self._ends_deleted = False
            if isinstance(record, Deleted):
                self.state = State.DELETED
        sends = [Send(HERE, Committed(self.key, self.committed.sequence))]
        return [*sends, Send(DIRECTORY, self.held)] if self.state is State.DELETED and self.held else sends

    def _tick_open(self, now: float) -> list[Send]:
        silent = [Silent(self.key, self.epoch, member) for member in self._links.silent(now)]
        sends = self._links.repeat(now) + [Send(DIRECTORY, message) for message in silent]
        if self._publication is not None:
            sends += self._publication.tick(now)
        if self._joining is not None:
            sends += self._joining.tick(now)
            if self._joining.failed:
                self._joining = None
        return sends

    # -------------------------------------------------------------------------------------------- images

    def publish(self, sequence: int, frontiers: tuple[int, ...], document: object, keep: int, now: float) -> list[Send]:
        """Gives an image as of the record `sequence` to all copies; when all hold it, the log before `keep` is trimmed.
        While the set changes it waits.

        `keep`: the first record that is still needed beside the image, such as that of a turn that runs. Raises
        `StateError` for an image of what may not be published yet.
        """
        order = self.history.at(sequence)
        changes = self.state is State.TAKING and self._loaded
        if order is None or not (changes or self.state is State.OPEN):
            raise StateError(
                f"image of session {self.key} as of record {sequence}: all copies hold records {self.history.first} to "
                f"{self.committed.sequence}, and the state is {self.state.value}"
            )
        log = self.history.at(max(self.history.first, min(sequence, keep - 1))) or NOTHING
        self._publication = Publication(self.key, order, log, frontiers, document)
        if changes:
            return []
        return self._publication.under(self.epoch, tuple(self._acked), now)

    # -------------------------------------------------------------------------------------------- moving

    def offer(self, destination: str, now: float) -> list[Send]:
        """The turn has stopped at a commit boundary: another replica may claim the session.

        Raises `StateError` while receipts are missing.
        """
        if not self.settled:
            waiting = f"{len(self._outbox)} records wait for receipts"
            raise StateError(f"session {self.key}: it cannot be offered, {waiting}, its state is {self.state.value}")
        self.state = State.OFFERED
        self._joining = None
        self._offered = _Offered(destination, now)
        return [Send(Peer(destination), Offer(self.key, self.epoch, self.replica))]

    def _tick_offered(self, now: float) -> list[Send]:
        offered = self._offered
        assert offered is not None
        if now - offered.since < OFFER_SECONDS:
            return [Send(Peer(offered.to), Offer(self.key, self.epoch, self.replica))]
        look = Look(self.key, self.epoch)
        silent = [Silent(self.key, self.epoch, member) for member in self._links.silent(now)]
        looks = [self._links.ask(member, look, now) for member in self._acked if member not in offered.looked]
        return looks + [Send(DIRECTORY, message) for message in silent]

    def _looked(self, ends: Ends) -> list[Send]:
        """What the log says of the outcome. Nobody has sealed it: the session is still here."""
        offered = self._offered
        assert offered is not None
        if ends.seal > self.epoch:
            return self._fence(ends.seal)
        self._links.answered(ends.member)
        self._offered = replace(offered, looked=offered.looked | {ends.member})
        if not self._offered.looked.issuperset(self._acked):
            return []
        self.state, self._offered, self._links = State.OPEN, None, Links()
        return [Send(HERE, Opened(self.key, self.epoch, self.committed, True, (), (), None))]

    def _fence(self, seal: Epoch) -> list[Send]:
        self.state = State.FENCED
        return [Send(HERE, Fenced(self.key, seal))]


def _room(full: Full) -> tuple[Member, int, int]:
    return full.member, full.wanted, full.free
