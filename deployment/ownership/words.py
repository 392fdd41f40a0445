"""The words of ownership: whose session it is, under which epoch, and which copies of it exist."""

from __future__ import annotations

from dataclasses import dataclass

from state.names import Epoch, Order, SessionKey

NEVER = Epoch(0, 0)
"""Below every epoch that a directory grants."""

NOTHING = Order(NEVER, 0)
"""Where a log stands in which nothing was written yet."""


@dataclass(frozen=True, order=True)
class Member:
    """A host store as a keeper of copies: its node, and the incarnation of its arena (32 hex digits).

    A fresh arena has a fresh incarnation, so that what a store held before it was lost is never taken for what it holds
    now.
    """

    node: str
    incarnation: str

    def __str__(self) -> str:
        return f"{self.node[:12]}:{self.incarnation[:8]}"


@dataclass(frozen=True)
class Named:
    """Which stores hold copies of a session under an epoch, and which replica writes them."""

    epoch: Epoch
    members: tuple[Member, ...]
    owner: str


@dataclass(frozen=True)
class Copy:
    """A session's Host replicas on one node. `order` numbers a session's captures; `frontier` is the deepest one."""

    node: str
    epoch: Epoch
    order: int
    frontier: int


@dataclass(frozen=True)
class Placement:
    """Where a session lives. `owner` is the replica that may commit to it."""

    key: SessionKey
    epoch: Epoch
    owner: str | None
    copies: tuple[Copy, ...]
    created: float
    updated: float


@dataclass(frozen=True)
class Grant:
    """The directory's yes: once the host stores are sealed, `epoch` may commit. `previous`: as it was before."""

    epoch: Epoch
    previous: Placement | None


@dataclass(frozen=True)
class Conflict:
    """The directory's no: the session is not where the claimant believed it to be. `current` is None if it is gone."""

    current: Placement | None


__all__ = [
    "NEVER",
    "NOTHING",
    "Conflict",
    "Copy",
    "Epoch",
    "Grant",
    "Member",
    "Named",
    "Order",
    "Placement",
    "SessionKey",
]
