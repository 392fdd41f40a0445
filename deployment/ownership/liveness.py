"""Who is alive, as far as the directory can tell? It decides when others may take over, never who may write."""

from __future__ import annotations

from dataclasses import dataclass, field

from deployment.ownership.awake import AwakeClock
from deployment.ownership.words import Member

LEASE_SECONDS = 10.0
"""A replica renews its one lease every second. It is no fence: its owner goes on until a store refuses it."""

LEASE_SLACK = 1.0
"""Clocks that run at different speeds, and the way of a renewal."""

SILENT_SECONDS = 5.0
"""A store that has not answered for so long is given up."""


@dataclass
class Liveness:
    """`started`: when the directory did. A replica of which nothing was heard since is taken to have renewed then.
    Silence is counted in time in which the directory was awake."""

    started: float
    _renewed: dict[str, float] = field(default_factory=dict)
    _nodes: dict[str, str] = field(default_factory=dict)
    _exited: set[str] = field(default_factory=set)
    _dead_nodes: set[str] = field(default_factory=set)
    _stores: dict[Member, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._clock = AwakeClock(self.started)

    def renewed(self, replica: str, node: str, now: float) -> bool:
        """Whether it was not known that it may act, and on that node."""
        known = self._nodes.get(replica) == node and self.may_act(replica, now)
        self._renewed[replica] = self._clock.at(now)
        self._nodes[replica] = node
        return not known and self.may_act(replica, now)

    def exited(self, replica: str) -> None:
        """Its own node's live raylet says so."""
        self._exited.add(replica)

    def node_died(self, node: str) -> None:
        """The GCS says so, for ever: a node that comes back has another id."""
        self._dead_nodes.add(node)

    def is_dead(self, node: str) -> bool:
        return node in self._dead_nodes

    def node_of(self, replica: str) -> str | None:
        return self._nodes.get(replica)

    def knows(self, replica: str) -> bool:
        """Whether anything was heard of it since the start."""
        return replica in self._renewed or replica in self._exited

    def may_act(self, replica: str, now: float) -> bool:
        """Whether a replica has to be reckoned with: it neither exited, nor died with its node, nor fell silent."""
        if replica in self._exited or self._nodes.get(replica) in self._dead_nodes:
            return False
        return self._clock.at(now) - self._renewed.get(replica, self.started) <= LEASE_SECONDS + LEASE_SLACK

    def store_heard(self, member: Member, now: float) -> None:
        self._stores[member] = self._clock.at(now)

    def has_heard(self, member: Member) -> bool:
        return member in self._stores

    def forget_store(self, member: Member) -> None:
        self._stores.pop(member, None)

    def stores(self) -> tuple[Member, ...]:
        """Those that were heard of and not given up."""
        return tuple(self._stores)

    def silent_stores(self, now: float) -> tuple[Member, ...]:
        """To be asked every second."""
        awake = self._clock.at(now)
        return tuple(member for member, heard in self._stores.items() if awake - heard > SILENT_SECONDS)
