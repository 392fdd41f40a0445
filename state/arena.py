"""What does a host store keep? Session logs and documents in shared memory that outlives the store's process.

Nothing beside the arena is needed to open it again (`state/extents.py` says why any crash leaves it right). Large
documents need not come through the store: it reserves room, a writer on the node writes there itself
(`state/arena_view.py`), and the store says that it is ready. Which epoch may do what, and what has to go when room is
short, is not decided here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path

from state.arena_file import SHARED_MEMORY, Mapping, open_store
from state.arena_log import SessionLog
from state.errors import StateError
from state.extents import Extent, Extents, Kind, Label, State
from state.names import Order, SessionKey
from state.stored import Reservation, StoredDocument

_STORE = ""
"""Who writes what the store writes itself."""
_REMAINS_SHARE = 16
"""What is left of deleted sessions may take one part in so many before it is too much."""


def open_arena(application: str, node: str, size: int, directory: Path = SHARED_MEMORY) -> Arena:
    """The arena of an application on a node: the one that is there, whatever its size, else a fresh one of `size` bytes
    rounded down to 4096. Raises `ArenaError`."""
    mapping = open_store(directory, application, node, size)
    try:
        return Arena(mapping)
    except BaseException:
        mapping.close()
        raise


class Arena:
    """Records and documents of sessions, opaque here. Bytes in the file count: `used` and `free` with all headers.

    One process has it open at a time. Not thread safe. Methods raise `CapacityError` if there is no room in one piece,
    and then nothing has changed; `StateError` for what is not there or cannot be.
    """

    def __init__(self, mapping: Mapping) -> None:
        """Frees what the store itself had not finished. What others were writing stays until they have spoken up:
        see `awaited`. Raises `ArenaError` for a damaged file."""
        self._mapping = mapping
        self._extents = Extents(mapping)
        self._logs: dict[SessionKey, SessionLog] = {}
        self._documents: dict[SessionKey, dict[int, Extent]] = {}
        self._unready: dict[int, Extent] = {}
        self._inherited: dict[str, set[int]] = defaultdict(set)
        self._index()

    @property
    def incarnation(self) -> str:
        """32 hex digits; a fresh arena has a fresh one, and one that is opened again keeps its own."""
        return self._mapping.header.incarnation

    @property
    def size(self) -> int:
        return self._mapping.header.size

    @property
    def free(self) -> int:
        return self._extents.free

    @property
    def used(self) -> int:
        return self._extents.used

    @property
    def largest(self) -> int:
        """Bytes of the largest free piece: nothing larger fits, header included."""
        return self._extents.largest

    def used_by(self, tenant: str) -> int:
        """Bytes of a tenant's records and documents, and of what is being written for it: of what it could delete, so
        not of what is left of deleted sessions."""
        labels = ((extent.label, extent.span) for extent in self._extents.live.values())
        return sum(span for label, span in labels if label.key.tenant == tenant and label.kind is not Kind.REMAINS)

    @property
    def crowded(self) -> bool:
        """Whether what is left of deleted sessions takes too much."""
        return self._extents.taken[Kind.REMAINS] > self.size // _REMAINS_SHARE

    def close(self) -> None:
        self._mapping.close()

    # ------------------------------------------------------------------------------------------------ sessions

    def keys(self) -> tuple[SessionKey, ...]:
        """Sessions with a record or a document that is ready."""
        return tuple(sorted(self._logs.keys() | self._documents.keys()))

    def records(self, key: SessionKey) -> tuple[bytes, ...]:
        """Whole records in order; () for an unknown key."""
        return self._logs[key].records() if key in self._logs else ()

    def append(self, key: SessionKey, records: Sequence[bytes], *, remains: bool = False) -> None:
        """All of them or, after an error or a crash, none. `remains`: they are all that is to be left of a session that
        was deleted, and take no more room than they need."""
        if records:
            log = self._logs.get(key) or SessionLog(self._mapping, self._extents, key)
            log.append(records, remains=remains)
            self._logs[key] = log

    def trim(self, key: SessionKey, first: int) -> None:
        """Forgets the first `first` records; a crash may leave the last of them."""
        if key in self._logs:
            self._logs[key].trim(first)
            self._drop_if_empty(key)

    def remove(self, key: SessionKey) -> None:
        """Documents first and the log's last record last, so that a crash never leaves older news than there were.

        What a writer is still writing for the session stays its own, until `ready` or `abandon`.
        """
        for stored in self.documents(key):
            self.discard(stored)
        if key in self._logs:
            self.trim(key, len(self._logs[key]))

    # ------------------------------------------------------------------------------------------------ documents

    def documents(self, key: SessionKey) -> tuple[StoredDocument, ...]:
        """Those that are ready, in the order of (epoch, sequence), and of their coming where that is the same."""
        extents = self._documents.get(key, {}).values()
        return tuple(map(_stored, sorted(extents, key=lambda extent: (extent.label.order, extent.generation))))

    def put(
        self, key: SessionKey, order: Order, frontiers: tuple[int, ...], document: bytes | memoryview
    ) -> StoredDocument:
        """Copies a document into the arena. Others of the session stay."""
        view = memoryview(document).cast("B")
        extent = self._extents.reserve(Label(Kind.DOCUMENT, key, order, frontiers, len(view), _STORE))
        self._mapping.write(extent.payload, view)
        return self._publish(extent)

    def document(self, stored: StoredDocument) -> memoryview:
        """Its bytes, read-only and not copied: they may change once the document is discarded."""
        extent = self._document_extent(stored)
        return self._mapping.view(extent.payload, extent.label.size).toreadonly()

    def discard(self, stored: StoredDocument) -> None:
        extent = self._document_extent(stored)
        self._extents.release(extent)
        documents = self._documents[stored.key]
        del documents[extent.place]
        if not documents:
            del self._documents[stored.key]

    # ------------------------------------------------------------------------------------------------ writers

    def reserve(self, writer: str, key: SessionKey, order: Order, frontiers: tuple[int, ...], size: int) -> Reservation:
        """Room for a document of `size` bytes that `writer` writes itself. A writer is one process: its name is never
        used again for another."""
        if not writer:
            raise StateError("arena: a reservation needs a writer's name")
        extent = self._extents.reserve(Label(Kind.DOCUMENT, key, order, frontiers, size, writer))
        self._unready[extent.generation] = extent
        return _reservation(extent)

    def ready(self, reservation: Reservation) -> StoredDocument:
        """Its writer has written all of it: from now on it is a document."""
        return self._publish(self._take_unready(reservation))

    def abandon(self, reservation: Reservation) -> None:
        """Its writer has stopped writing it and will not go on."""
        self._extents.release(self._take_unready(reservation))

    def writing(self) -> tuple[Reservation, ...]:
        """Reservations that are not ready, in the order in which they were made."""
        return tuple(_reservation(self._unready[generation]) for generation in sorted(self._unready))

    @property
    def awaited(self) -> frozenset[str]:
        """Writers that may be writing to extents they were given before this process opened the arena, and have
        neither registered nor been forgotten since."""
        return frozenset(self._inherited)

    def register(self, writer: str, generations: Collection[int]) -> tuple[Reservation, ...]:
        """The writer is alive and says what it is writing. The rest of what it was given before this process opened
        the arena is freed. Gives those it named that are there: what it writes elsewhere is lost."""
        for generation in self._inherited.pop(writer, set()) - set(generations):
            self._extents.release(self._unready.pop(generation))
        named = [self._unready[generation] for generation in generations if generation in self._unready]
        return tuple(_reservation(extent) for extent in named if extent.label.writer == writer)

    def forget(self, writer: str) -> None:
        """The writer's process is gone: all that it was writing is freed."""
        self._inherited.pop(writer, None)
        for generation, extent in list(self._unready.items()):
            if extent.label.writer == writer:
                self._extents.release(self._unready.pop(generation))

    # ------------------------------------------------------------------------------------------------ internals

    def _index(self) -> None:
        chunks: dict[SessionKey, list[Extent]] = defaultdict(list)
        for extent in list(self._extents.live.values()):
            label = extent.label
            if extent.state is State.WRITING and label.writer == _STORE:
                self._extents.release(extent)
            elif extent.state is State.WRITING:
                self._unready[extent.generation] = extent
                self._inherited[label.writer].add(extent.generation)
            elif label.kind is not Kind.DOCUMENT:
                chunks[label.key].append(extent)
            else:
                self._documents.setdefault(label.key, {})[extent.place] = extent
        for key, found in chunks.items():
            self._logs[key] = SessionLog(self._mapping, self._extents, key, found)
            self._drop_if_empty(key)

    def _drop_if_empty(self, key: SessionKey) -> None:
        if not len(self._logs[key]):
            del self._logs[key]

    def _publish(self, extent: Extent) -> StoredDocument:
        ready = self._extents.make_ready(extent)
        self._documents.setdefault(ready.label.key, {})[ready.place] = ready
        return _stored(ready)

    def _take_unready(self, reservation: Reservation) -> Extent:
        extent = self._unready.get(reservation.generation)
        if extent is None or _reservation(extent) != reservation:
            facts = f"{reservation.generation} of writer {reservation.writer} for session {reservation.document.key}"
            raise StateError(f"arena: reservation {facts} is not being written")
        del self._unready[reservation.generation]
        inherited = self._inherited.get(reservation.writer, set())
        inherited.discard(reservation.generation)
        if not inherited:
            self._inherited.pop(reservation.writer, None)
        return extent

    def _document_extent(self, stored: StoredDocument) -> Extent:
        extent = self._documents.get(stored.key, {}).get(stored.place)
        if extent is None or _stored(extent) != stored:
            raise StateError(f"arena: session {stored.key} has no document of order {stored.order} at {stored.place}")
        return extent


def _stored(extent: Extent) -> StoredDocument:
    label = extent.label
    return StoredDocument(label.key, label.order, label.frontiers, label.size, extent.place)


def _reservation(extent: Extent) -> Reservation:
    return Reservation(_stored(extent), extent.label.writer, extent.generation)
