"""What lies in the durable tier? Listings, and what records say, read once each because they never change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from state.byte_store import ByteStore
from state.errors import StateError, StoreError
from state.eviction import Held
from state.names import (
    SEGMENTS,
    SESSIONS,
    TOMBSTONES,
    Epoch,
    Order,
    key_digest,
    parse_numbered,
    parse_segment,
    publication_name,
    publications_of,
    tombstones_of,
)
from state.publication_record import read_record

T = TypeVar("T")

_LOOKS = 100
"""Times that a reader looks again because what it was about to read was replaced."""


class _VanishedError(Exception):
    """A record is not there any more."""


@dataclass(frozen=True)
class Inventory:
    """Sizes of records by name and of segments by digest; `total` counts unfinished files too, all in bytes."""

    records: Mapping[str, int]
    segments: Mapping[bytes, int]
    total: int

    def missing(self, segments: Mapping[bytes, int]) -> dict[bytes, int]:
        """Those segments that are not there, or not with this size."""
        return {digest: size for digest, size in segments.items() if self.segments.get(digest) != size}


class DurableIndex:
    """Reads a store. Nothing is believed from memory but the content of records, whose names are never used twice."""

    def __init__(self, store: ByteStore) -> None:
        self._store = store
        self._records: dict[str, Held | None] = {}
        self._segments: Mapping[bytes, int] = {}

    def inventory(self) -> Inventory:
        total = 0
        records: dict[str, int] = {}
        for entry in self._store.list(SESSIONS):
            total += entry.size
            if parse_numbered(entry.name):
                records[entry.name] = entry.size
        segments: dict[bytes, int] = {}
        for entry in self._store.list(SEGMENTS):
            total += entry.size
            if digest := parse_segment(entry.name):
                segments[digest] = entry.size
        self._segments = segments
        return Inventory(records, segments, total)

    def guess(self, segments: Mapping[bytes, int]) -> int:
        """Bytes of those segments that were not there at the last look."""
        return sum(Inventory({}, self._segments, 0).missing(segments).values())

    def publications(self, digest: str) -> list[tuple[str, Order]]:
        """Names and orders of a session's publications, the highest order first."""
        for _ in range(2):  # one listing can miss a new record that it was too early for, and the old one after that
            listed = [(entry.name, parse_numbered(entry.name)) for entry in self._store.list(publications_of(digest))]
            if found := [(name, parsed[1]) for name, parsed in listed if parsed]:
                return sorted(found, key=lambda item: item[1], reverse=True)
        return []

    def tombstone(self, digest: str) -> Epoch | None:
        parsed = (parse_numbered(entry.name) for entry in self._store.list(tombstones_of(digest)))
        return max((found[1].epoch for found in parsed if found), default=None)

    def tombstones(self) -> dict[str, tuple[str, Order]]:
        """Digest, epoch and time (as the order's sequence) of every tombstone, by name."""
        found = {entry.name: parse_numbered(entry.name) for entry in self._store.list(TOMBSTONES)}
        return {name: parsed for name, parsed in found.items() if parsed}

    def newest(self, inventory: Inventory) -> dict[str, Held]:
        """The highest whole publication of every session that is not deleted, by key digest."""
        dead: dict[str, Epoch] = {}
        for digest, order in self.tombstones().values():
            dead[digest] = max(order.epoch, dead.get(digest, order.epoch))
        newest: dict[str, Held] = {}
        for digest, names in _by_session(inventory.records).items():
            living = [name for name, order in names if digest not in dead or order.epoch > dead[digest]]
            held = self.highest(digest, self._held, living)
            if held is not None:
                newest[digest] = held
        self._records = {name: held for name, held in self._records.items() if name in inventory.records}
        return newest

    def highest(self, digest: str, accept: Callable[[str], T | None], names: list[str] | None = None) -> T | None:
        """What `accept` makes of the highest record, of a session that is not deleted, for which it does not give None.

        `names`: the records as listed already, the highest first. `accept` reads with `read`.
        """
        for _ in range(_LOOKS):
            try:
                for name in self._living(digest) if names is None else names:
                    accepted = accept(name)
                    if accepted is not None:
                        return accepted
                return None
            except _VanishedError:
                names = None  # a newer one was published, and this one pruned, since they were listed
        raise StoreError("list", publications_of(digest), "gives names of records that are not there")

    def read(self, name: str) -> bytes:
        """A record's bytes, for `highest`."""
        data = self._store.get(name)
        if data is None:
            raise _VanishedError
        return data

    def _living(self, digest: str) -> list[str]:
        dead = self.tombstone(digest)
        return [name for name, order in self.publications(digest) if dead is None or order.epoch > dead]

    def _held(self, name: str) -> Held | None:
        if name not in self._records:
            self._records[name] = _read_held(name, self.read(name))
        return self._records[name]


def _by_session(names: Iterable[str]) -> dict[str, list[tuple[str, Order]]]:
    """Names and orders by key digest, the highest order first."""
    sessions: dict[str, list[tuple[str, Order]]] = {}
    for name in sorted(names, reverse=True):
        if parsed := parse_numbered(name):
            sessions.setdefault(parsed[0], []).append((name, parsed[1]))
    return sessions


def _read_held(name: str, data: bytes) -> Held | None:
    """None: the record is not whole, or lies under a name that is not its own."""
    try:
        publication, _ = read_record(data)
        digest = key_digest(publication.key)
        own_name = publication_name(digest, publication.order)
    except StateError:
        return None
    return Held(name, digest, len(data), publication) if own_name == name else None
