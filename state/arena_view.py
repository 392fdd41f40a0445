"""How do other processes of the node write documents into the arena and read them there, without a copy on the way?

A writer is given a reservation and writes where it says; a reader is given a stored document. Both look at the extent's
header first, and a reader once more at the end: the store may have given the room to something else meanwhile.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from state.arena_file import SHARED_MEMORY, open_user
from state.errors import ArenaError
from state.extents import Extent, Kind, State, extent_at
from state.stored import Reservation, StoredDocument


class ArenaView:
    """The arena of an application on a node, mapped beside its store; `incarnation` says which one is meant.

    `writable`: else the mapping is read-only. Raises `ArenaError` if there is no such arena, or it is not ours.
    """

    def __init__(
        self, application: str, node: str, incarnation: str, *, writable: bool = False, directory: Path = SHARED_MEMORY
    ) -> None:
        self._mapping = open_user(directory, application, node, incarnation, writable=writable)
        self._writable = writable

    def write(self, reservation: Reservation) -> memoryview:
        """Where the document belongs, to be filled before the store is told that it is ready. Raises `ArenaError` if
        the mapping is read-only, or the store has given the room to something else."""
        if not self._writable:
            raise ArenaError(self._mapping.path, "is mapped read-only, and a reservation is to be written")
        extent = extent_at(self._mapping, reservation.document.place)
        if extent is None or extent.state is not State.WRITING or extent.generation != reservation.generation:
            raise ArenaError(self._mapping.path, f"holds no reservation {reservation.generation}: its room was freed")
        return self._mapping.view(extent.payload, extent.label.size)

    @contextmanager
    def read(self, stored: StoredDocument) -> Generator[memoryview, None, None]:
        """The document's bytes, read-only. Raises `ArenaError` if it is not there, or, at the end, not any more: then
        what was read of it counts for nothing."""
        extent = self._found(stored)
        if extent is None:
            raise ArenaError(self._mapping.path, f"holds no document of order {stored.order} at {stored.place}")
        yield self._mapping.view(extent.payload, extent.label.size).toreadonly()
        if self._found(stored) != extent:
            problem = f"document of order {stored.order} at {stored.place} was discarded while it was read"
            raise ArenaError(self._mapping.path, problem)

    @property
    def memory(self) -> memoryview:
        """All of it, for `state/pinned_memory.py`."""
        return self._mapping.view(0, self._mapping.header.size)

    def close(self) -> None:
        """Views that were given stay mapped until they are gone."""
        self._mapping.close()

    def _found(self, stored: StoredDocument) -> Extent | None:
        """None unless exactly this document lies there, whole."""
        try:
            extent = extent_at(self._mapping, stored.place)
        except ArenaError:  # other bytes lie there now
            return None
        if extent is None or extent.state is not State.READY or extent.label.kind is not Kind.DOCUMENT:
            return None
        label = extent.label
        same = (label.key, label.order, label.frontiers, label.size) == (
            stored.key, stored.order, stored.frontiers, stored.size,
        )  # fmt: skip
        return extent if same else None
