"""A whole cluster in one process: directory, three nodes with a store and a replica each, clients, and their fate.

`run(seed)` plays one schedule: half a minute of turns, forks, deletes and moves while everything breaks, then calm, in
which every session must come back, or be refused by name if no copy of it is left. The same seed plays the same
schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deployment.ownership.directory import Directory
from deployment.ownership.messages import Image, Moved, Offer, ToStore
from deployment.ownership.owner import Owner
from deployment.ownership.registry import Registry
from deployment.ownership.standing import Standing
from deployment.ownership.store import Store
from deployment.ownership.words import NEVER, Epoch, Member, SessionKey
from state.errors import StateError
from tests.ownership.actors import DirectoryProcess, StoreProcess
from tests.ownership.fake_storage import FakeValues
from tests.ownership.network import HEAD, Network
from tests.ownership.replica import Replica
from tests.ownership.truth import Broken, Truth

TENANT = "t" * 64
EPOCH_BEGINS = 1_790_000_000.0
BREAKING_SECONDS = 30.0
CALM_SECONDS = 45.0
VERDICT_SECONDS = 4.0
"""After so long the GCS declares a node dead of which it hears nothing."""


@dataclass
class Bugs:
    """The machines that are played. Tests put wrong ones in. `slow_images`: one that a session is made of takes
    some seconds, and is given while the set changes, if it does in these."""

    directory: type[Directory] = Directory
    store: type[Store] = Store
    owner: type[Owner] = Owner
    standing: type[Standing] = Standing
    registry: type[Registry] = Registry
    hasty_images: bool = False
    slow_images: bool = False


@dataclass
class Counts:
    """What a schedule had in it."""

    steps: int = 0
    tokens: int = 0
    takeovers: int = 0
    forks: int = 0
    lost: int = 0
    found_again: int = 0
    faults: dict[str, int] = field(default_factory=dict)


Fault = Callable[["Cluster"], None]


class Cluster:
    def __init__(
        self, seed: int, bugs: Bugs | None = None, faults: Sequence[Fault] | None = None, sessions: int = 3
    ) -> None:
        """`faults`: what may befall it; all that there is by default."""
        self._faults = faults
        self.net = Network(seed)
        self.bugs = bugs or Bugs()
        self.truth = Truth()
        self.counts = Counts()
        self.registry = self.bugs.registry(FakeValues(), "app")
        self.dead_nodes: list[str] = []
        self.exited: list[str] = []
        self.given_up: set[SessionKey] = set()
        self.refused: set[SessionKey] = set()
        self.probes: set[SessionKey] = set()
        self.unfounded: set[SessionKey] = set()
        self.clients_begin_anew = self.net.random.random() < 0.5
        self._numbers = 0
        self.stores: dict[str, StoreProcess] = {}
        self.replicas: dict[str, Replica] = {}
        self.directory = DirectoryProcess(self)
        self.keys = [SessionKey(TENANT, f"s{index}") for index in range(sessions)]
        for _ in range(3):
            self.add_node()

    @property
    def unix(self) -> float:
        return EPOCH_BEGINS + self.net.now

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    # -------------------------------------------------------------------------------------------- the cluster

    def add_node(self) -> None:
        node = f"node-{self.next_number()}"
        self.stores[node] = StoreProcess(self, node)
        self.add_replica(node)

    def add_replica(self, node: str) -> None:
        if node in self.stores:
            name = f"replica-{self.next_number()}"
            self.replicas[name] = Replica(self, node, name)

    def new_key(self) -> SessionKey:
        return SessionKey(TENANT, f"f{self.next_number()}")

    def nodes(self) -> list[str]:
        return list(self.stores)

    # -------------------------------------------------------------------------------------------- messages

    def to_directory(self, node: str, method: str, *args: Any) -> None:
        self.net.send(node, HEAD, self._at_directory, method, args)

    def _at_directory(self, method: str, args: tuple[Any, ...]) -> None:
        self.directory.hear(getattr(self.directory, method), *args)

    def to_store_process(self, member: Member, word: str) -> None:
        self.net.send(HEAD, member.node, self._at_store, member, "directory_says", (member, word))

    def to_store(self, replica: Replica, member: Member, message: ToStore) -> None:
        def reply(answer: object) -> None:
            self.net.send(member.node, replica.node, self._at_replica, replica.name, "store_says", answer)

        self.net.send(replica.node, member.node, self._at_store, member, "asked", (member, message, reply))

    def _at_store(self, member: Member, method: str, args: tuple[Any, ...]) -> None:
        process = self.stores.get(member.node)
        if process is not None:
            process.hear(getattr(process, method), *args)

    def to_replica(self, node: str, name: str, message: Any) -> None:
        replica = self.replicas.get(name)
        if replica is None:
            return
        method = "directory_says"
        if isinstance(message, Offer):
            method = "offered"
        elif isinstance(message, Moved):
            method = "destination_says"
        elif isinstance(message, tuple):
            method = "request"
        self.net.send(node, replica.node, self._at_replica, name, method, message)

    def _at_replica(self, name: str, method: str, message: Any) -> None:
        replica = self.replicas.get(name)
        if replica is not None:
            args = message if isinstance(message, tuple) else (message,)
            replica.hear(getattr(replica, method), *args)

    def document(self, node: str, source: Member | None, key: SessionKey, image: Image) -> bytes | None:
        """What a replica reads of a store; None while it is out of reach."""
        store = self.stores.get(source.node) if source else None
        if store is None or not store.up or store.machine.member != source:
            return None
        if not self.net.reachable(node, store.node):
            return None
        try:
            return bytes(store.machine.document(key, image.order)[1])
        except StateError:
            return None

    # -------------------------------------------------------------------------------------------- clients

    def client(self, key: SessionKey, what: str) -> None:
        """A request comes to whoever the directory believes to be the owner, or to anybody."""
        names = sorted(self.replicas)
        if not names:
            return
        name = self.net.random.choice(names)
        if self.directory.answers:
            placed = self.directory.machine.locate(key, self.net.now)
            unknown = placed is None and self.truth.published.get(key) and key not in self.truth.deleting
            if unknown and not self.is_forgotten(key):
                raise Broken(f"{key}: said not to exist, with {len(self.truth.published[key])} published tokens")
            owner = getattr(placed, "owner", None)
            name = owner if owner in self.replicas else name
        self.to_replica(HEAD, name, (key, what))

    def client_later(self, key: SessionKey, what: str) -> None:
        self.net.after(self.net.random.uniform(0.2, 2.0), self.client, key, what)

    def give_up(self, key: SessionKey, epoch: Epoch) -> None:
        """Somebody may begin it anew: only where no copy of the last set is left that counts."""
        if epoch > self.truth.begun_sets.get(key, (NEVER, ()))[0]:
            self._check_lost(key)
            self.given_up.add(key)

    def is_forgotten(self, key: SessionKey) -> bool:
        """Whether the directory cannot know of it: it was started since it had a set, whose stores it never heard of,
        and all of them are void."""
        _, members = self.truth.open_sets.get(key, (NEVER, ()))
        left = self.truth.copies_left(key, self.registry.void())
        return bool(members) and not left and self.directory.heard.isdisjoint(members)

    def begins_unknown(self, key: SessionKey, epoch: Epoch) -> None:
        """A directory that knows nothing of it begins it."""
        if self.truth.published.get(key) and self.is_forgotten(key):
            self.given_up.add(key)

    def found_again(self, key: SessionKey, epoch: Epoch) -> None:
        """All copies are lost, and its owner, which has all of it, may give it new ones."""
        if epoch > self.truth.begun_sets.get(key, (NEVER, ()))[0]:
            self._check_lost(key)
            self.unfounded.add(key)

    def begins_unfounded(self, key: SessionKey, epoch: Epoch) -> bool:
        """The owner of such a session was gone before the new copies had it. Whether its client has the history."""
        if key not in self.unfounded:
            raise Broken(f"{key}: its copies have no image of it under {epoch}, and nothing says why")
        if self.clients_begin_anew:
            self.given_up.add(key)
        else:
            self.refused.add(key)
        return self.clients_begin_anew

    def made(self, key: SessionKey, ledger: list[int]) -> None:
        """All copies hold a session that an image brought: its client hears of it."""
        if key in self.unfounded:
            self.unfounded.discard(key)
            self.counts.found_again += 1
        else:
            self.counts.forks += 1
            self.truth.publish(key, 0, ledger)
            self.keys.append(key)
            self.client_later(key, self.net.random.choice(["turn", "turn", "fork", "delete"]))

    def begins_anew(self, key: SessionKey, epoch: Epoch) -> None:
        self.given_up.discard(key)
        self.unfounded.discard(key)
        self.counts.lost += 1
        self.truth.ended(key, epoch)

    def _check_lost(self, key: SessionKey) -> None:
        if key in self.unfounded:
            return
        left = self.truth.copies_left(key, self.registry.void())
        if left:
            raise Broken(f"{key}: given up although {', '.join(map(str, left))} still holds a copy")

    # -------------------------------------------------------------------------------------------- a schedule

    def play(self) -> Counts:
        from tests.ownership import faults

        random = self.net.random
        for _ in range(random.randint(8, 16)):
            key = random.choice(self.keys)
            what = random.choice(["delete", "fork", *["turn"] * 8])
            self.net.after(random.uniform(0.5, BREAKING_SECONDS), self.client, key, what)
        for _ in range(random.randint(0, 4)):
            self.net.after(random.uniform(2.0, BREAKING_SECONDS), self._move_one)
        for _ in range(random.randint(1, 6)):
            fault = random.choice(self._faults or faults.FAULTS)
            self.net.after(random.uniform(2.0, BREAKING_SECONDS), self._befall, fault)
        self._run_until(BREAKING_SECONDS)
        self.net.calm = True
        self.refused.clear()
        for key in self.keys:
            if self.truth.published.get(key):
                self.probes.add(key)
        self.net.after(8.0, self._probe)
        self._run_until(BREAKING_SECONDS + CALM_SECONDS, lambda: not self.probes)
        for key in sorted(self.probes):
            self._check_lost(key)
            if key not in self.refused:
                raise Broken(f"{key}: no copy of it is left, but its client was never told so")
        self.counts.tokens, self.counts.takeovers = self.truth.tokens, self.truth.takeovers
        return self.counts

    def _run_until(self, end: float, over: Any = lambda: False) -> None:
        while not over() and self.net.step(end):
            self.counts.steps += 1

    def _probe(self) -> None:
        for key in sorted(self.probes):
            self.client(key, "turn")
        self.net.after(3.0, self._probe)

    def _move_one(self) -> None:
        random = self.net.random
        owners = [(name, key) for name, replica in sorted(self.replicas.items()) for key in sorted(replica.hosted)]
        if owners:
            name, key = random.choice(owners)
            destination = random.choice(sorted(self.replicas))
            if destination != name:
                self.replicas[name].hear(self.replicas[name].move, key, destination)

    def _befall(self, fault: Fault) -> None:
        name = fault.__name__
        self.counts.faults[name] = self.counts.faults.get(name, 0) + 1
        fault(self)


def run(seed: int, bugs: Bugs | None = None, faults: Sequence[Fault] | None = None) -> Counts:
    """Plays a schedule. Raises `Broken`, with the seed that plays it again."""
    cluster = Cluster(seed, bugs, faults)
    try:
        return cluster.play()
    except Broken as broken:
        raise Broken(f"seed {seed}, at {cluster.net.now:.3f} s: {broken}") from broken
