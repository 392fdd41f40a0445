"""The words of `spec/ownership.md`: whose session it is, under which epoch, and which copies of it exist."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class SessionKey:
    """A session's name inside its tenant. `tenant` is 64 hex digits, `session` 1-128 visible characters."""

    tenant: str
    session: str

    def __str__(self) -> str:
        return f"{self.tenant[:16]}/{self.session}"


@dataclass(frozen=True, order=True)
class Epoch:
    """A fence: of two owners the one with the higher epoch may commit. Incarnations are those of the directory."""

    incarnation: int
    counter: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.counter}"


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
