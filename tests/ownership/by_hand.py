"""The three machines side by side, without a network: a test says what arrives, and when."""

from __future__ import annotations

from deployment.ownership.directory import Directory
from deployment.ownership.log import Numbered, Round, TurnBegan, TurnEnded
from deployment.ownership.messages import (
    Bring,
    Claim,
    Committed,
    CopiesLost,
    FromStore,
    Grant,
    Join,
    Known,
    Lost,
    Moved,
    Offer,
    Opened,
    Put,
    Taken,
    ToReplica,
    ToStore,
    Wait,
)
from deployment.ownership.owner import Owner
from deployment.ownership.registry import Registry
from deployment.ownership.sending import Peer, Send
from deployment.ownership.standing import Standing
from deployment.ownership.store import Store
from deployment.ownership.words import NOTHING, Member, SessionKey
from tests.ownership.fake_storage import FakeStorage, FakeValues

KEY = SessionKey("t" * 64, "one")
UNIX = 1_790_000_000.0


class Hand:
    """A directory, a store on each node, and owners. What goes to a node in `away` is lost."""

    def __init__(self, *nodes: str) -> None:
        self.now = 100.0
        self.values = FakeValues()
        self.registry = Registry(self.values, "app")
        self.away: set[str] = set()
        self.stores: dict[str, Store] = {}
        self.storages: dict[str, FakeStorage] = {}
        self.owners: list[Owner] = []
        self.standings: dict[str, Standing] = {}
        self.told: list[ToReplica | Offer] = []
        self._arenas = self._tenures = 0
        for node in nodes:
            self.fresh_store(node)
        self.start_directory()

    # -------------------------------------------------------------------------------------------- actors

    def fresh_store(self, node: str) -> None:
        self._arenas += 1
        self.storages[node] = FakeStorage(f"{self._arenas:032x}")
        self.registry.register(Member(node, self.storages[node].incarnation))
        self.restart_store(node)

    def restart_store(self, node: str) -> None:
        self.stores[node] = Store(node, self.storages[node])

    def start_directory(self) -> None:
        """All that can be reached tell it what they know."""
        self.directory = Directory(self.registry, UNIX, self.now)
        self.directory.durable_ids(())
        for node in self.stores:
            self.tell(node)
        for owner in self.owners:
            self.renew(owner)

    def lose_arenas(self, *nodes: str) -> None:
        """Their stores begin again with nothing."""
        for node in nodes:
            self.fresh_store(node)
            assert self.tell(node)

    def tell(self, node: str) -> bool:
        """A store tells the directory what it holds. False: it is void."""
        store = self.stores[node]
        return node in self.away or self.directory.store_here(store.member, store.index(), self.now)

    def renew(self, owner: Owner, node: str = "a") -> None:
        report = owner.report
        self.directory.renew(owner.replica, node, [report] if report else [], self.now)

    def member(self, node: str) -> Member:
        return self.stores[node].member

    # -------------------------------------------------------------------------------------------- owners

    def owner(
        self, replica: str, offered_by: str | None = None, first: Numbered | None = None, key: SessionKey = KEY
    ) -> Owner:
        self._tenures += 1
        standing = self.standings.setdefault(replica, Standing())
        self.owners.append(Owner(key, replica, f"tenure-{self._tenures}", standing, offered_by, first))
        self.see(self.owners[-1])
        return self.owners[-1]

    def see(self, owner: Owner) -> None:
        """Its replica sees which stores count, if it reaches the head."""
        if "head" not in self.away:
            self.standings[owner.replica].seen(self.registry.stores(), self.now)

    def claim(self, owner: Owner, node: str, **more: object) -> Grant | Taken | Wait | Lost:
        self.see(owner)
        claim = Claim(owner.key, owner.replica, owner.tenure, node, **more)  # pyright: ignore[reportArgumentType]
        return self.directory.claim(claim, self.now)

    def take(self, owner: Owner, node: str, **more: object) -> Opened:
        """Claims and opens, loads what the log says."""
        grant = self.claim(owner, node, **more)
        assert isinstance(grant, Grant), grant
        self.told.clear()
        self.carry(owner, owner.granted(grant, self.now))
        opened = next(message for message in self.told if isinstance(message, Opened))
        owner.loaded()
        return opened

    def append(self, owner: Owner, *records: Numbered) -> int:
        """What is committed then: the sequence up to which records may be published."""
        self.carry(owner, owner.append(records, self.now))
        return owner.committed.sequence

    def pass_by(self, seconds: float) -> None:
        """Owners are silent meanwhile."""
        self.wait(seconds)
        for node in self.stores:
            if node not in self.away:
                self.directory.store_alive(self.member(node), self.now)

    def wait(self, seconds: float) -> None:
        """The directory hears nothing meanwhile, though it could."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            self.directory.may_act("", self.now)  # whatever it is asked, it looks at the time

    def tick(self, owner: Owner, seconds: float = 1.0) -> None:
        end = self.now + seconds
        while self.now < end:
            self.pass_by(min(1.0, end - self.now))
            self.see(owner)
            sends = owner.tick(self.now)
            self.carry(owner, sends if "head" in self.away else sends + self._reconcile(owner))

    def carry(self, owner: Owner, sends: list[Send]) -> None:
        """Everything arrives at once and in order, where anybody is."""
        self.see(owner)
        waiting = list(sends)
        while waiting:
            send = waiting.pop(0)
            if isinstance(send.to, Member):
                answer = self.ask(send.to, send.message)  # pyright: ignore[reportArgumentType]
                waiting += owner.received(answer, self.now) if answer is not None else []
            elif isinstance(send.to, Peer) or send.to == "here":
                self.told.append(send.message)  # pyright: ignore[reportArgumentType]
            elif "head" not in self.away:
                answer = self.directory.told(send.message, self.now)  # pyright: ignore[reportArgumentType]
                waiting += owner.known(answer, self.now) if isinstance(answer, Known) else []
                waiting += owner.moved(answer) if isinstance(answer, Moved) else []
                waiting += self._reconcile(owner)

    def ask(self, member: Member, message: ToStore) -> FromStore | None:
        if member.node in self.away or self.member(member.node) != member:
            return None
        if isinstance(message, Bring):
            if message.source.node in self.away:
                return None
            frontiers, document = self.stores[message.source.node].document(message.key, message.order)
            message = Put(message.key, message.epoch, message.order, frontiers, bytes(document))
        return self.stores[member.node].answer(message)

    def _reconcile(self, owner: Owner) -> list[Send]:
        sends: list[Send] = []
        for replica, message in self.directory.reconcile(self.now):
            if replica == owner.replica and isinstance(message, Grant):
                sends += owner.granted(message, self.now)
            elif replica == owner.replica and isinstance(message, Join):
                sends += owner.join(message, self.now)
            elif replica == owner.replica and isinstance(message, CopiesLost):
                sends += owner.copies_lost(message)
            elif replica == owner.replica and isinstance(message, Moved):
                sends += owner.moved(message)
        return sends

    def committed(self) -> int:
        """The highest sequence that an owner said may be published since `told` was cleared."""
        return max((message.sequence for message in self.told if isinstance(message, Committed)), default=0)


def began(turn: str = "t1") -> TurnBegan:
    return TurnBegan(NOTHING, turn, {"rounds": 3}, bytes(32), 7, None, (1, 2, 3), 0, UNIX)


def a_round(start: int, *tokens: int, turn: str = "t1") -> Round:
    return Round(NOTHING, turn, 0, start, tokens, 0, None)


def ended(turn: str = "t1", at: float = UNIX) -> TurnEnded:
    return TurnEnded(NOTHING, turn, 0, "length", 3, None, None, 0, at)
