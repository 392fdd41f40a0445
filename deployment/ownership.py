"""The words of `spec/ownership.md`: whose session it is, under which epoch, and which copies of it exist."""

from __future__ import annotations

from dataclasses import dataclass

from state.names import Epoch, SessionKey


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
