"""What a host store lies on: logs of opaque records, and documents, which outlive the store's process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from state.names import Order, SessionKey
from state.stored import StoredDocument


class Storage(Protocol):
    """What a host store keeps, below its rules. Records and documents are opaque bytes here.

    Every call is done when it returns: what it wrote is there after a restart of the process, whenever that comes.
    """

    @property
    def incarnation(self) -> str:
        """32 hex digits. Fresh storage has a fresh one, one that was found again keeps its own."""
        ...

    @property
    def crowded(self) -> bool:
        """Whether what is left of deleted sessions takes too much of the room."""
        ...

    def keys(self) -> tuple[SessionKey, ...]:
        """Sessions of which there are records or documents."""
        ...

    def records(self, key: SessionKey) -> tuple[bytes, ...]:
        """Whole records in the order in which they were appended; a torn last one is not among them."""
        ...

    def append(self, key: SessionKey, records: Sequence[bytes], *, remains: bool = False) -> None:
        """All of them or, if the process dies in between, none. Raises `CapacityError`; then nothing was written.
        `remains`: they are all that is to be left of a session that was deleted, and take no more room than they need.
        """
        ...

    def trim(self, key: SessionKey, first: int) -> None:
        """Forgets the first `first` records. Never raises for want of room."""
        ...

    def documents(self, key: SessionKey) -> tuple[StoredDocument, ...]:
        """Oldest first."""
        ...

    def put(
        self, key: SessionKey, order: Order, frontiers: tuple[int, ...], document: bytes | memoryview
    ) -> StoredDocument:
        """Raises `CapacityError`; then nothing was written."""
        ...

    def document(self, stored: StoredDocument) -> memoryview:
        """Read-only, and good until the document is discarded."""
        ...

    def discard(self, stored: StoredDocument) -> None: ...

    def remove(self, key: SessionKey) -> None:
        """Records and documents."""
        ...
