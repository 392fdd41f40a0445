"""How does a session outlive its cluster? Published to a store: segments first, its record last. See `docs/durable.md`.

The record names a publication by session and order and holds the caller's document, which this module never looks into.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from state.byte_store import Bytes, ByteStore
from state.durable_index import DurableIndex, Inventory
from state.errors import CapacityError, FormatError, StaleError, StateError, StoreError
from state.eviction import plan_eviction
from state.leases import Lease, Leases
from state.names import Epoch, Order, SessionKey, key_digest, publication_name, segment_name, tombstone_name
from state.publication_record import Publication, StoredCheckpoint, read_record, write_record
from state.strict_msgpack import pack
from state.sweep import Swept, delete_planned, sweep

DAY = 86400.0
SESSION_TTL = 30 * DAY


@dataclass(frozen=True)
class Published:
    """What a publication cost. Not `payload`: the budget had room for the document only."""

    order: Order
    payload: bool
    written: int


class Reading:
    """A publication while nobody may take what it needs. A segment that is None is a miss of its checkpoint."""

    def __init__(self, tier: DurableTier, lease: Lease, publication: Publication, document: bytes) -> None:
        self._tier = tier
        self._lease = lease
        self.publication = publication
        self.document = document

    def segment(self, sha256: bytes) -> bytes | None:
        """The segment's bytes, verified. Raises `StoreError` also when reading took longer than the lease lasts."""
        self._lease.keep()
        return self._tier.segment(sha256)


class DurableTier:
    """Sessions in a store that other processes may use too, within `budget` bytes of records and segments.

    `verify` raises `StateError` for a document that is not whole; it is never stored, and passed over by readers.
    `session_ttl`: seconds without publication after which a session goes. `clock`: seconds since 1970. Thread safe.
    """

    def __init__(
        self,
        store: ByteStore,
        budget: int,
        verify: Callable[[bytes], object],
        *,
        session_ttl: float = SESSION_TTL,
        lease_seconds: float = 600.0,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if budget < 0:
            raise StateError(f"durable store: a budget of {budget} bytes, must not be negative")
        if not session_ttl > 0:
            raise StateError(f"durable store: session_ttl is {session_ttl} seconds, must be positive")
        self._store = store
        self.budget = budget
        self._verify = verify
        self._session_ttl = session_ttl
        self._clock = clock
        self._leases = Leases(store, clock, sleep, lease_seconds)
        self._index = DurableIndex(store)

    def publish(
        self,
        key: SessionKey,
        epoch: Epoch,
        sequence: int,
        document: bytes,
        checkpoints: Sequence[StoredCheckpoint],
        read: Callable[[bytes], Bytes],
    ) -> Published:
        """Makes a session durable as of (epoch, sequence). `read` gives a segment's bytes by its sha256, if not stored.

        Raises `StaleError` if the session was deleted at this epoch or published by this order or a higher one,
        `CapacityError` if not even the document fits without taking what is in use, `StoreError` if the store fails,
        `StateError` for a document or segment that is not what it should be. What was published before then stays.
        """
        publication = Publication(key, Order(epoch, sequence), self._clock(), tuple(checkpoints))
        record = write_record(publication, document)
        self._verify(document)
        digest = key_digest(key)
        name = publication_name(digest, publication.order)
        self._refuse_late(digest, publication)
        segments = publication.segments()
        with self._leases.use(digest, segments, self._index.guess(segments) + len(record)) as lease:
            missing, free = self._reserve(lease, segments, len(record))
            wanted = sum(missing.values()) + len(record)
            payload = free >= wanted or self._evict(lease, wanted, documents=not missing)
            if not payload and free < len(record) and not self._evict(lease, len(record), documents=True):
                raise CapacityError("durable store", len(record), max(0, free))
            written = self._write(lease, missing, read) if payload else 0
            lease.keep()
            self._refuse_late(digest, publication)
            self._store.create(name, record)
            self._prune(digest, publication.order)
        return Published(publication.order, payload, written + len(record))

    @contextmanager
    def reading(self, key: SessionKey) -> Generator[Reading | None, None, None]:
        """The newest whole publication; None: there is none. Nothing of it is evicted before the end of the block."""
        found = self._latest(key)
        if found is None:
            yield None
            return
        publication, document = found
        with self._leases.use(key_digest(key), publication.segments()) as lease:
            yield Reading(self, lease, publication, document)

    def latest(self, key: SessionKey) -> tuple[Order, bytes] | None:
        """Order and document of the newest whole publication."""
        found = self._latest(key)
        return (found[0].order, found[1]) if found else None

    def segment(self, sha256: bytes) -> bytes | None:
        """A segment's bytes, None if it is not there.

        One whose bytes are not what its name says is removed, so that a later publication writes it again, and raises
        `FormatError`.
        """
        name = segment_name(sha256)
        data = self._store.get(name)
        if data is not None and hashlib.sha256(data).digest() != sha256:
            self._store.delete([name])
            raise FormatError(f"segment {sha256.hex()}", f"{len(data)} bytes whose sha256 is another one")
        return data

    def sessions(self, tenant: str | None = None) -> list[Publication]:
        """The newest publication of every session that is not deleted, of one tenant or of all."""
        newest = self._index.newest(self._index.inventory()).values()
        return [item.publication for item in newest if tenant is None or item.publication.key.tenant == tenant]

    def delete(self, key: SessionKey, epoch: Epoch) -> None:
        """Forgets a session and refuses it up to `epoch` from now on. Its segments go with the next sweep."""
        digest = key_digest(key)
        now = self._clock()
        body = {
            "tenant": key.tenant,
            "session": key.session,
            "incarnation": epoch.incarnation,
            "counter": epoch.counter,
        }
        self._store.put(tombstone_name(digest, epoch, now), pack(body, "tombstone"))
        self._store.delete([name for name, order in self._index.publications(digest) if order.epoch <= epoch])

    def tombstone(self, key: SessionKey) -> Epoch | None:
        """The highest epoch that the session was deleted at. An import of a copy of that epoch or less is refused."""
        return self._index.tombstone(key_digest(key))

    def size(self) -> int:
        """Bytes that count against the budget: of records and segments, finished or not."""
        return self._index.inventory().total

    def sweep(self) -> Swept:
        """Removes what nothing needs any more; to be called now and then, by any process.

        Also what is older than `session_ttl`. A store that fails in between leaves the rest for the next time.
        """
        with self._leases.sweep() as lease:
            return sweep(self._store, self._index, self._leases, lease, self._clock(), self._session_ttl)

    def _latest(self, key: SessionKey) -> tuple[Publication, bytes] | None:
        digest = key_digest(key)

        def read_whole(name: str) -> tuple[Publication, bytes] | None:
            data = self._index.read(name)
            try:
                publication, document = read_record(data)
                self._verify(document)
            except StateError:
                return None
            return (publication, document) if publication_name(digest, publication.order) == name else None

        found = self._index.highest(digest, read_whole)
        return found if found and found[0].key == key else None

    def _refuse_late(self, digest: str, publication: Publication) -> None:
        key, order = publication.key, publication.order
        dead = self._index.tombstone(digest)
        if dead is not None and order.epoch <= dead:
            raise StaleError(f"session {key} was deleted at epoch {dead}, publication {order} is refused")
        found = self._index.publications(digest)
        if found and found[0][1] >= order:
            raise StaleError(f"session {key} is published as {found[0][1]}, publication {order} is refused")

    def _reserve(self, lease: Lease, segments: dict[bytes, int], record: int) -> tuple[dict[bytes, int], int]:
        """Sizes of the segments to be written, which others now count as reserved, and how many bytes are free."""
        while True:
            inventory, free = self._look(lease)
            missing = inventory.missing(segments)
            wanted = sum(missing.values()) + record
            if wanted <= lease.reserved:
                return missing, free
            lease.reserve(wanted)

    def _look(self, lease: Lease) -> tuple[Inventory, int]:
        # Reservations first: what is written in between then counts twice, not never.
        reserved = self._leases.reserved(but=lease)
        inventory = self._index.inventory()
        return inventory, self.budget - inventory.total - reserved

    def _evict(self, lease: Lease, wanted: int, *, documents: bool) -> bool:
        """Whether `wanted` bytes are free now. If not, nothing was evicted. `documents`: other sessions' may go."""
        lease.keep()
        with self._leases.sweep() as exclusive:
            in_use = self._leases.in_use()
            inventory, free = self._look(lease)
            if free >= wanted:
                return True
            held = self._index.newest(inventory).values()
            plan = plan_eviction(held, inventory.segments, in_use, wanted - free, documents=documents)
            if plan is not None:
                delete_planned(self._store, exclusive, plan)
        return plan is not None

    def _write(self, lease: Lease, missing: dict[bytes, int], read: Callable[[bytes], Bytes]) -> int:
        for digest, size in missing.items():
            lease.keep()
            data = memoryview(read(digest)).cast("B")
            if len(data) != size or hashlib.sha256(data).digest() != digest:
                raise StateError(f"segment {digest.hex()}: {len(data)} bytes to store are not the {size} that it names")
            self._store.put(segment_name(digest), data)
        return sum(missing.values())

    def _prune(self, digest: str, order: Order) -> None:
        with suppress(StoreError):  # the new one is published; a sweep removes what is left
            self._store.delete([name for name, found in self._index.publications(digest) if found < order])
