"""What lies in the durable tier? Listings, and what records say, read once each because they never change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from state.byte_store import ByteStore
from state.errors import StateError
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
            held = self._highest(digest, names, dead.get(digest))
            if held is not None:
                newest[digest] = held
        self._records = {name: held for name, held in self._records.items() if name in inventory.records}
        return newest

    def _highest(self, digest: str, names: list[tuple[str, Order]], dead: Epoch | None) -> Held | None:
        while names:
            vanished = False
            for name, order in names:
                if dead is not None and order.epoch <= dead:
                    return None
                if name not in self._records:
                    data = self._store.get(name)
                    if data is None:
                        vanished = True
                        continue
                    self._records[name] = _held(name, digest, data)
                if held := self._records[name]:
                    return held
            if not vanished:
                return None
            names = self.publications(digest)  # a newer one was published, and these pruned, since they were listed
        return None


def _by_session(names: Iterable[str]) -> dict[str, list[tuple[str, Order]]]:
    """Names and orders by key digest, the highest order first."""
    sessions: dict[str, list[tuple[str, Order]]] = {}
    for name in sorted(names, reverse=True):
        if parsed := parse_numbered(name):
            sessions.setdefault(parsed[0], []).append((name, parsed[1]))
    return sessions


def _held(name: str, digest: str, data: bytes) -> Held | None:
    """None: the record is not whole, or lies under a name that is not its own."""
    try:
        publication, _ = read_record(data)
        if publication_name(key_digest(publication.key), publication.order) != name:
            return None
    except StateError:
        return None
    return Held(name, digest, len(data), publication)
