"""What a scrape asks of the parts of the application."""

from __future__ import annotations

from dataclasses import dataclass

from deployment.engine.counts import Counts, Distribution, Flow
from deployment.wire import ReplicaInfo


@dataclass(frozen=True)
class TransferCounts:
    """`copied` went to host stores, `fetched` came from there, on this node or another. `moved`: sessions that went to
    another replica, and `stayed`, those that were to; `seconds` of both."""

    copied: Flow
    fetched: Flow
    moved: int
    stayed: int
    bytes_ahead: int
    bytes_in_pause: int
    seconds: float
    pauses: Distribution


@dataclass(frozen=True)
class Measured:
    """One replica: what it holds now, and what it has done since it began."""

    info: ReplicaInfo
    counts: Counts
    transfers: TransferCounts


@dataclass(frozen=True)
class Room:
    """A host store's bytes: in all, and those that are taken."""

    size: int
    used: int
