"""Shells around directory and host stores, as thin as Ray's: they die, stall, and start again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deployment.ownership.directory import Directory
from deployment.ownership.messages import (
    Bring,
    Claim,
    Ends,
    FromDirectory,
    FromOwner,
    FromStore,
    Grant,
    Held,
    Moved,
    Put,
    ToStore,
)
from deployment.ownership.store import Store
from deployment.ownership.words import Member, Order
from state.errors import StateError
from tests.ownership.fake_storage import FakeStorage
from tests.ownership.network import HEAD

if TYPE_CHECKING:
    from tests.ownership.cluster import Cluster


@dataclass
class Moment:
    """The first process that comes to such a word, of those that are given this, stalls over it: it has not done yet
    what it was told (`before`), or has, and nobody hears of that until it wakes."""

    word: type
    before: bool
    seconds: float
    until: float

    def strikes(self, args: tuple[Any, ...], now: float) -> bool:
        """Once."""
        struck = now < self.until and any(isinstance(arg, self.word) for arg in args)
        self.until = now if struck else self.until
        return struck


class Process:
    """What it is told while it stalls it hears when it wakes; what it is told while it is down is lost."""

    def __init__(self, cluster: Cluster, node: str) -> None:
        self.cluster = cluster
        self.node = node
        self.up = True
        self.life = 0
        self.asleep_until = 0.0
        self.moment: Moment | None = None

    @property
    def answers(self) -> bool:
        return self.up and self.cluster.net.now >= self.asleep_until

    def stall(self, seconds: float) -> None:
        self.asleep_until = self.cluster.net.now + seconds

    def hear(self, action: Callable[..., None], *args: Any) -> None:
        if self.up:
            self._when_awake(self.life, action, args)

    def say(self, action: Callable[..., None], *args: Any) -> None:
        """What it has done is heard of when it wakes, if it stalled over that."""
        self._when_awake(self.life, action, args)

    def kill(self) -> None:
        self.up = False
        self.life += 1

    def every_second(self, action: Callable[[], None]) -> None:
        self._repeat(self.life, action)

    def _when_awake(self, life: int, action: Callable[..., None], args: tuple[Any, ...]) -> None:
        net = self.cluster.net
        if self.life != life:
            return
        if net.now < self.asleep_until:
            net.after(self.asleep_until - net.now, self._when_awake, life, action, args)
        elif self.moment is not None and self.moment.strikes(args, net.now):
            self.stall(self.moment.seconds)
            if self.moment.before:
                self._when_awake(life, action, args)
            else:
                action(*args)
        else:
            action(*args)

    def _repeat(self, life: int, action: Callable[[], None]) -> None:
        if self.life == life:
            self._when_awake(life, action, ())
            self.cluster.net.after(1.0, self._repeat, life, action)


class DirectoryProcess(Process):
    """On the head node. What the GCS and the raylets know it is told again when it starts."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster, HEAD)
        self.machine: Directory
        self.heard: set[Member] = set()
        self.start()

    def start(self) -> None:
        self.up, self.asleep_until = True, 0.0
        cluster, now = self.cluster, self.cluster.net.now
        self.machine = cluster.bugs.directory(cluster.registry, cluster.unix, now)
        self.heard.clear()
        known = [key for key, seen in cluster.truth.published.items() if seen]
        self.machine.durable_ids((key, Order(cluster.truth.opened_under(key), 0)) for key in known)
        for node in cluster.dead_nodes:
            self.machine.node_died(node, now)
        for replica in cluster.exited:
            self.machine.replica_exited(replica)
        self.every_second(self.reconcile)

    def reconcile(self) -> None:
        for replica, message in self.machine.reconcile(self.cluster.net.now):
            self._tell(replica, message)

    def store_here(self, member: Member, index: tuple[Ends, ...]) -> None:
        welcome = self.machine.store_here(member, index, self.cluster.net.now)
        if welcome:
            self.heard.add(member)
        self.say(self.cluster.to_store_process, member, "welcome" if welcome else "void")
        self.reconcile()

    def store_alive(self, member: Member) -> None:
        if not self.machine.store_alive(member, self.cluster.net.now):
            self.say(self.cluster.to_store_process, member, "tell")

    def renew(self, replica: str, node: str, reports: tuple[Held | Grant, ...]) -> None:
        self.machine.renew(replica, node, reports, self.cluster.net.now)
        self.reconcile()

    def claim(self, claim: Claim) -> None:
        answer = self.machine.claim(claim, self.cluster.net.now)
        if isinstance(answer, Grant) and not (answer.anew or answer.named or answer.previous):
            self.cluster.begins_unknown(claim.key, answer.epoch)
        self._tell(claim.replica, answer)

    def told(self, message: FromOwner) -> None:
        now = self.cluster.net.now
        answer = self.machine.told(message, now)
        if isinstance(message, Held) and answer is not None:
            self._tell(message.replica, answer)
        self.reconcile()

    def replica_exited(self, replica: str) -> None:
        self.machine.replica_exited(replica)
        self.reconcile()

    def node_died(self, node: str) -> None:
        self.machine.node_died(node, self.cluster.net.now)
        self.reconcile()

    def _tell(self, replica: str, message: FromDirectory | Moved) -> None:
        self.say(self.cluster.to_replica, HEAD, replica, message)


class StoreProcess(Process):
    """A node's host store. It registers a fresh arena before it keeps anything in it."""

    def __init__(self, cluster: Cluster, node: str) -> None:
        super().__init__(cluster, node)
        self.storage: FakeStorage
        self.machine: Store
        self.format()
        self.start()

    def format(self) -> None:
        self.storage = FakeStorage(f"{self.cluster.next_number():032x}")
        self.cluster.registry.register(Member(self.node, self.storage.incarnation))

    def start(self) -> None:
        self.up = True
        self.machine = self.cluster.bugs.store(self.node, self.storage)
        self.tell()
        self.every_second(self._alive)

    def tell(self) -> None:
        self.cluster.to_directory(self.node, "store_here", self.machine.member, self.machine.index())

    def directory_says(self, member: Member, word: str) -> None:
        if member != self.machine.member:
            return
        if word == "tell":
            self.tell()
        elif word == "void":
            self.format()
            self.machine = self.cluster.bugs.store(self.node, self.storage)
            self.tell()

    def asked(self, member: Member, message: ToStore, reply: Callable[[FromStore], None]) -> None:
        if member != self.machine.member:
            return
        if isinstance(message, Bring):
            brought = self._brought(message)
            if brought is None:
                return
            message = brought
        answer = self.machine.answer(message)
        self.cluster.truth.answered(message, answer)
        self.say(reply, answer)

    def _brought(self, bring: Bring) -> Put | None:
        """The image from another store, or a `Put` that will be refused because that one has let go of it."""
        source = self.cluster.stores.get(bring.source.node)
        if source is None or not source.up or source.machine.member != bring.source:
            return None
        if not self.cluster.net.reachable(self.node, source.node):
            return None
        try:
            frontiers, document = source.machine.document(bring.key, bring.order)
        except StateError:
            return None
        return Put(bring.key, bring.epoch, bring.order, frontiers, bytes(document))

    def _alive(self) -> None:
        self.cluster.to_directory(self.node, "store_alive", self.machine.member)
