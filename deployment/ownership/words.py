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
    """Which stores hold copies of a session under an epoch, and which replica writes them. `alone`: its client wants it
    in one store and nowhere else."""

    epoch: Epoch
    members: tuple[Member, ...]
    owner: str
    alone: bool = False


__all__ = [
    "NEVER",
    "NOTHING",
    "Epoch",
    "Member",
    "Named",
    "Order",
    "SessionKey",
]
