"""A replica with an engine that draws a new token each time: no two owners ever draw alike.

It publishes what the owner machine says is committed, resumes turns that it finds unfinished in a log, moves and forks
sessions, makes images, gives a session new copies that has lost all of them, and tells the directory what it owns.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deployment.ownership.log import Deleted, HeadMoved, Numbered, Record, Round, TurnBegan, TurnEnded
from deployment.ownership.log_format import decode
from deployment.ownership.messages import (
    Claim,
    Committed,
    CopiesLost,
    Fenced,
    FromDirectory,
    FromStore,
    Grant,
    Join,
    Known,
    Lost,
    Moved,
    Offer,
    Opened,
    Taken,
    ToReplica,
    Unavailable,
    Wait,
)
from deployment.ownership.owner import ENDED, Owner, State
from deployment.ownership.sending import DIRECTORY, HERE, Peer, Send
from deployment.ownership.words import NOTHING, Epoch, Member, SessionKey
from state.errors import StateError
from tests.ownership.actors import Process
from tests.ownership.truth import Broken

if TYPE_CHECKING:
    from tests.ownership.cluster import Cluster

SLOW_SECONDS = 5.0
"""How long a slow image waits for its moment."""


@dataclass
class _Turn:
    name: str
    began: int
    rounds: int
    done: int = 0


@dataclass
class Making:
    """A session that an image is to bring into its copies, before anybody hears of it: a fork, or (`holds`) one that
    this replica still has, while its copies of that epoch are lost. `begun`: its image is being made; `imaged`: it was
    given."""

    ledger: list[int]
    holds: Epoch | None = None
    begun: bool = False
    imaged: bool = False

    @property
    def moved(self) -> HeadMoved:
        return HeadMoved(NOTHING, None if self.holds is None else "turn", len(self.ledger))


@dataclass
class Hosted:
    """A session in a replica. `uncommitted`: what may not be published yet, by the record that says it."""

    owner: Owner
    given: Offer | None = None
    ledger: list[int] = field(default_factory=list)
    turn: _Turn | None = None
    requests: deque[str] = field(default_factory=deque)
    uncommitted: deque[tuple[int, int, tuple[int, ...], bool]] = field(default_factory=deque)
    anew: bool = False
    claimed: float = float("-inf")
    opened: bool = False
    fetching: Opened | None = None
    making: Making | None = None

    @property
    def rests(self) -> bool:
        return self.opened and not (self.turn or self.uncommitted or self.fetching or self.making)


class Replica(Process):
    def __init__(self, cluster: Cluster, node: str, name: str) -> None:
        super().__init__(cluster, node)
        self.name = name
        self.hosted: dict[SessionKey, Hosted] = {}
        self.standing = cluster.bugs.standing()
        self.see()
        self.every_second(self._tick)

    # -------------------------------------------------------------------------------------------- requests

    def request(self, key: SessionKey, what: str) -> None:
        """`turn`, `fork`, `delete`, or `open`, which only brings the session here."""
        hosted = self._hosting(key)
        if what != "open" and len(hosted.requests) < 2:
            hosted.requests.append(what)
        self._go_on(key, hosted)

    def _hosting(self, key: SessionKey) -> Hosted:
        hosted = self.hosted.get(key)
        if hosted is None or hosted.owner.state in ENDED:
            hosted = self.hosted[key] = Hosted(self._owner(key))
        return hosted

    def _owner(self, key: SessionKey, offered_by: str | None = None, first: Numbered | None = None) -> Owner:
        tenure = f"tenure-{self.cluster.next_number()}"
        return self.cluster.bugs.owner(key, self.name, tenure, self.standing, offered_by, first)

    def offered(self, offer: Offer) -> None:
        hosted = self.hosted.get(offer.key)
        if hosted is None or hosted.owner.state in ENDED:
            owner = self._owner(offer.key, offered_by=offer.source)
            self.hosted[offer.key] = Hosted(owner, given=offer)
        self._go_on(offer.key, self.hosted[offer.key])

    def move(self, key: SessionKey, destination: str) -> None:
        """Between two rounds, if the receipts are all there."""
        hosted = self.hosted.get(key)
        ready = hosted is not None and hosted.opened and not (hosted.fetching or hosted.making)
        if hosted is not None and ready and hosted.owner.settled:
            self._send(hosted.owner.offer(destination, self.cluster.net.now))

    def _go_on(self, key: SessionKey, hosted: Hosted) -> None:
        now = self.cluster.net.now
        if hosted.owner.grant is None and now - hosted.claimed > 2.0:
            hosted.claimed = now
            given = hosted.given.epoch if hosted.given else None
            holds = hosted.making.holds if hosted.making else None
            claim = Claim(key, self.name, hosted.owner.tenure, self.node, given, hosted.anew, holds)
            self.say(self.cluster.to_directory, self.node, "claim", claim)
        if not (hosted.opened and hosted.owner.settled) or hosted.turn or hosted.fetching or hosted.making:
            return
        if hosted.requests:
            self._begin(key, hosted, hosted.requests.popleft())

    def _begin(self, key: SessionKey, hosted: Hosted, what: str) -> None:
        if what == "delete":
            self.cluster.truth.deleting.add(key)
            self._append(hosted, Deleted(NOTHING, at=self.cluster.unix), start=0, tokens=(), deletes=True)
            hosted.ledger.clear()
            return
        if what == "fork":
            child = self.cluster.new_key()
            self.hosted[child] = Hosted(self._owner(child), making=Making(list(hosted.ledger)))
            self._go_on(child, self.hosted[child])
            self._go_on(key, hosted)
            return
        rounds = self.cluster.net.random.randint(1, 5)
        prompt = (self.cluster.next_number(),)
        name = f"turn-{prompt[0]}"
        idempotency = f"key-{name}" if prompt[0] % 2 else None
        began = TurnBegan(
            NOTHING, name, {"rounds": rounds}, bytes(32), 1, idempotency, prompt, 0, self.cluster.unix
        )  # fmt: skip
        hosted.turn = _Turn(name, hosted.owner.last.sequence + 1, rounds)
        start = len(hosted.ledger)
        hosted.ledger += prompt
        self._append(hosted, began, start, prompt)
        self.cluster.net.after(0.1, self.hear, self._round, key, hosted)

    def _round(self, key: SessionKey, hosted: Hosted) -> None:
        """What the engine does by itself: draws, and wants to publish."""
        turn, owner = hosted.turn, hosted.owner
        if self.hosted.get(key) is not hosted or turn is None or hosted.fetching:
            return
        if owner.state in (State.OPEN, State.TAKING) and hosted.opened and len(hosted.uncommitted) < 4:
            start = len(hosted.ledger)
            if turn.done == turn.rounds:
                hosted.turn = None
                ended = TurnEnded(NOTHING, turn.name, 0, "length", turn.rounds, None, None, 0, self.cluster.unix)
                self._append(hosted, ended, start, ())
                return
            tokens = tuple(self.cluster.next_number() for _ in range(self.cluster.net.random.randint(1, 3)))
            turn.done += 1
            hosted.ledger += tokens
            self._append(hosted, Round(NOTHING, turn.name, 0, start, tokens, 0, None), start, tokens)
            if self.cluster.bugs.hasty_images:
                self._make_image(hosted, owner.last.sequence, len(hosted.ledger))
        self.cluster.net.after(self.cluster.net.random.uniform(0.02, 0.4), self.hear, self._round, key, hosted)

    def _append(
        self, hosted: Hosted, record: Numbered, start: int, tokens: tuple[int, ...], deletes: bool = False
    ) -> None:
        sends = hosted.owner.append([record], self.cluster.net.now)
        hosted.uncommitted.append((hosted.owner.last.sequence, start, tokens, deletes))
        self._send(sends)

    # -------------------------------------------------------------------------------------------- messages

    def directory_says(self, message: FromDirectory) -> None:
        key = message.key
        match message:
            case Grant():
                hosted = self.hosted.get(key)
                begins = message.anew and not (hosted is not None and hosted.opened)
                if begins and hosted is not None and hosted.making is not None:
                    self.cluster.found_again(key, message.epoch)
                elif begins:
                    self.cluster.give_up(key, message.epoch)
                if hosted is not None:
                    self._send(hosted.owner.granted(message, self.cluster.net.now))
            case Join():
                if key in self.hosted:
                    self._send(self.hosted[key].owner.join(message, self.cluster.net.now))
            case CopiesLost():
                if key in self.hosted:
                    self._send(self.hosted[key].owner.copies_lost(message))
            case Known():
                if key in self.hosted:
                    self._send(self.hosted[key].owner.known(message, self.cluster.net.now))
            case Wait() | Taken() | Lost():
                self._refused(key, message)

    def _refused(self, key: SessionKey, message: Wait | Taken | Lost) -> None:
        hosted = self.hosted.get(key)
        if hosted is None or hosted.owner.grant is not None:
            return
        if isinstance(message, Lost) and self.cluster.clients_begin_anew and hosted.making is None:
            hosted.anew, hosted.claimed = True, float("-inf")
        elif not isinstance(message, Wait):
            del self.hosted[key]
            if isinstance(message, Lost):
                self.cluster.refused.add(key)
            if isinstance(message, Taken):
                for what in hosted.requests:
                    self.say(self.cluster.to_replica, self.node, message.owner, (key, what))

    def store_says(self, answer: FromStore) -> None:
        hosted = self.hosted.get(answer.key)
        if hosted is not None:
            self._send(hosted.owner.received(answer, self.cluster.net.now))

    def destination_says(self, moved: Moved) -> None:
        if moved.key in self.hosted:
            self._send(self.hosted[moved.key].owner.moved(moved))

    def _send(self, sends: list[Send]) -> None:
        for send in sends:
            if send.to == HERE:
                self._owner_says(send.message)  # pyright: ignore[reportArgumentType]
            elif send.to == DIRECTORY:
                self.say(self.cluster.to_directory, self.node, "told", send.message)
            elif isinstance(send.to, Peer):
                self.say(self.cluster.to_replica, self.node, send.to.replica, send.message)
            elif isinstance(send.to, Member):
                self.say(self.cluster.to_store, self, send.to, send.message)

    def _owner_says(self, message: ToReplica) -> None:
        hosted = self.hosted.get(message.key)
        if hosted is None:
            return
        match message:
            case Opened():
                self._opened(message.key, hosted, message)
            case Committed():
                self._committed(message.key, hosted, message.sequence)
            case Unavailable(key=key, holds=Epoch() as holds) if hosted.rests:
                making = Making(hosted.ledger, holds)
                again = Hosted(self._owner(key, first=making.moved), making=making, requests=hosted.requests)
                self.hosted[key] = again
                self._go_on(key, again)
            case Fenced() | Unavailable():
                del self.hosted[message.key]
                if isinstance(message, Unavailable):
                    self.cluster.refused.add(message.key)
                if hosted.turn or hosted.requests:
                    self.cluster.client_later(message.key, "open")

    # -------------------------------------------------------------------------------------------- opening

    def _opened(self, key: SessionKey, hosted: Hosted, opened: Opened) -> None:
        assert hosted.owner.grant is not None
        self.cluster.truth.has_set(key, opened.epoch, hosted.owner.grant.members)
        if opened.continues:
            committed = hosted.ledger[: hosted.uncommitted[0][1]] if hosted.uncommitted else hosted.ledger
            if not any(deletes for *_, deletes in hosted.uncommitted):
                self.cluster.truth.opened(key, opened.epoch, committed)
            self._go_on(key, hosted)
        else:
            hosted.fetching = opened
            self._fetch(key, hosted)

    def _fetch(self, key: SessionKey, hosted: Hosted) -> None:
        """Image and log make the session. The image's store may be away for a while."""
        opened = hosted.fetching
        if opened is None or self.hosted.get(key) is not hosted:
            return
        if hosted.owner.state is not State.OPEN or not hosted.owner.stands(self.cluster.net.now):
            self.cluster.net.after(0.5, self.hear, self._fetch, key, hosted)  # its set is changed, or it has slept
            return
        ledger: list[int] = []
        after = 0
        if opened.images:
            document = self.cluster.document(self.node, opened.source, key, opened.images[-1])
            if document is None:
                self.cluster.net.after(0.5, self.hear, self._fetch, key, hosted)
                return
            ledger, after = list(struct.unpack(f"<{len(document) // 4}I", document)), opened.images[-1].order.sequence
        records = [decode(data) for data in opened.records]
        if opened.images:
            self.cluster.unfounded.discard(key)
        elif _lacks_image(records) and not self.cluster.begins_unfounded(key, opened.epoch):
            del self.hosted[key]
            return
        hosted.fetching, hosted.opened, hosted.turn = None, True, None
        hosted.owner.loaded()
        hosted.uncommitted.clear()
        for record in records:
            tokens: tuple[int, ...] = ()
            match record:
                case TurnBegan():
                    hosted.turn = _Turn(record.turn, record.order.sequence, record.request["rounds"])
                    tokens = record.prompt_ids
                case Round():
                    tokens = record.token_ids
                    if hosted.turn is not None:
                        hosted.turn.done += 1
                    if record.order.sequence > after and record.start != len(ledger):
                        raise Broken(f"{key}: a round begins at {record.start} where {len(ledger)} tokens are known")
                case TurnEnded() | Deleted():
                    hosted.turn = None
            if record.order.sequence > after:
                ledger = [] if isinstance(record, Deleted) else ledger + list(tokens)
        if hosted.making is not None and not records and not opened.images:
            ledger = hosted.making.ledger
        else:
            hosted.making = None
        hosted.ledger = ledger
        if not ledger and key in self.cluster.given_up:
            self.cluster.begins_anew(key, opened.epoch)
        self.cluster.truth.opened(key, opened.epoch, ledger)
        if hosted.making is not None:
            hosted.making.begun = hosted.making.imaged = False
            self._append(hosted, hosted.making.moved, len(ledger), ())
        else:
            self.cluster.truth.publish(key, 0, ledger)
        if hosted.turn is not None:
            self._round(key, hosted)
        self._go_on(key, hosted)

    def _committed(self, key: SessionKey, hosted: Hosted, sequence: int) -> None:
        while hosted.opened and hosted.uncommitted and hosted.uncommitted[0][0] <= sequence:
            _, start, tokens, deletes = hosted.uncommitted.popleft()
            if deletes:
                self.cluster.truth.ended(key, hosted.owner.epoch)
            else:
                self.cluster.truth.publish(key, start, tokens)
                if hosted.making is None:
                    self.cluster.probes.discard(key)
        if hosted.making is not None:
            self._made(key, hosted, hosted.making)
        elif hosted.opened and not hosted.uncommitted and hosted.owner.settled:
            if self.cluster.net.random.random() < 0.4:
                self._make_image(hosted, hosted.owner.committed.sequence, len(hosted.ledger))
            self._go_on(key, hosted)

    def _made(self, key: SessionKey, hosted: Hosted, making: Making) -> None:
        """One step towards a session that all copies hold."""
        if hosted.uncommitted or not hosted.owner.settled or (making.begun and not making.imaged):
            return
        if not making.begun and self.cluster.bugs.slow_images:
            making.begun = True
            self._give(key, hosted, self.cluster.net.now + SLOW_SECONDS)
        elif not making.imaged:
            making.imaged = self._make_image(hosted, hosted.owner.committed.sequence, len(hosted.ledger))
        elif hosted.owner.published and hosted.owner.stands(self.cluster.net.now):
            hosted.making = None
            self.cluster.made(key, hosted.ledger)

    def _give(self, key: SessionKey, hosted: Hosted, until: float) -> None:
        """In the midst of a change of the set, if there is one before `until`; and once, as a real replica does."""
        making = hosted.making
        if self.hosted.get(key) is not hosted or making is None or not making.begun:
            return
        if hosted.owner.state is not State.TAKING and self.cluster.net.now < until:
            self.cluster.net.after(0.05, self.hear, self._give, key, hosted, until)
            return
        self._make_image(hosted, hosted.owner.committed.sequence, len(hosted.ledger))
        making.imaged = True
        self._made(key, hosted, making)

    def _make_image(self, hosted: Hosted, sequence: int, tokens: int) -> bool:
        keep = hosted.turn.began if hosted.turn is not None else sequence + 1
        document = struct.pack(f"<{tokens}I", *hosted.ledger[:tokens])
        try:
            sends = hosted.owner.publish(
                sequence, (tokens,), document, keep, self.cluster.net.now
            )  # fmt: skip
        except StateError:
            return False  # the set is about to change
        self._send(sends)
        return True

    def see(self) -> None:
        """Which stores count, as the cluster's key-value store says."""
        asked, registry = self.cluster.net.now, self.cluster.registry
        self.cluster.net.read(self.node, registry.stores, lambda stores: self.hear(self.standing.seen, stores, asked))

    def _tick(self) -> None:
        self.see()
        reports: list[object] = []
        for key, hosted in list(self.hosted.items()):
            self._send(hosted.owner.tick(self.cluster.net.now))
            if hosted.owner.report is not None:
                reports.append(hosted.owner.report)
            if hosted.opened and hosted.making is not None:
                self._made(key, hosted, hosted.making)
            if key in self.hosted:
                self._go_on(key, self.hosted[key])
        self.say(self.cluster.to_directory, self.node, "renew", self.name, self.node, tuple(reports))


def _lacks_image(records: list[Record]) -> bool:
    """A session was to be given new copies, and its owner was gone before the first of them had it."""
    moves = [one for one in records if isinstance(one, HeadMoved)]
    return len(moves) == len(records) and any(one.turn is not None for one in moves)
