"""A host store's storage in memory, which outlives the store's process and can let it die before any write."""

from __future__ import annotations

from collections.abc import Sequence

from deployment.ownership.words import Order, SessionKey
from state.errors import CapacityError
from state.stored import StoredDocument


class ProcessDied(Exception):
    """The store's process is gone; its storage is as it was left."""


class FakeStorage:
    """`writes_left`: the process dies instead of the write after that many. `room`: bytes of documents and records.
    `crowded`: whether deleted sessions take too much of it."""

    def __init__(self, incarnation: str, room: int = 1 << 40) -> None:
        self.incarnation = incarnation
        self.room = room
        self.crowded = False
        self.writes_left: int | None = None
        self._records: dict[SessionKey, list[bytes]] = {}
        self._documents: dict[SessionKey, list[StoredDocument]] = {}
        self._payloads: dict[int, bytes] = {}
        self._places = 0

    def keys(self) -> tuple[SessionKey, ...]:
        return tuple(self._records.keys() | self._documents.keys())

    def records(self, key: SessionKey) -> tuple[bytes, ...]:
        return tuple(self._records.get(key, ()))

    def append(self, key: SessionKey, records: Sequence[bytes], *, remains: bool = False) -> None:
        self._write(sum(map(len, records)))
        self._records.setdefault(key, []).extend(records)

    def trim(self, key: SessionKey, first: int) -> None:
        self._write(0)
        if key in self._records:
            self.room += sum(map(len, self._records[key][:first]))
            del self._records[key][:first]

    def documents(self, key: SessionKey) -> tuple[StoredDocument, ...]:
        return tuple(self._documents.get(key, ()))

    def put(
        self, key: SessionKey, order: Order, frontiers: tuple[int, ...], document: bytes | memoryview
    ) -> StoredDocument:
        self._write(len(document))
        self._places += 1
        stored = StoredDocument(key, order, frontiers, len(document), self._places)
        self._documents.setdefault(key, []).append(stored)
        self._payloads[stored.place] = bytes(document)
        return stored

    def document(self, stored: StoredDocument) -> memoryview:
        return memoryview(self._payloads[stored.place])

    def discard(self, stored: StoredDocument) -> None:
        self._write(0)
        self._documents[stored.key].remove(stored)
        self.room += len(self._payloads.pop(stored.place))

    def remove(self, key: SessionKey) -> None:
        for stored in self.documents(key):
            self.discard(stored)
        self.trim(key, len(self.records(key)))
        self._records.pop(key, None)
        self._documents.pop(key, None)

    def _write(self, size: int) -> None:
        if self.writes_left is not None:
            if self.writes_left == 0:
                raise ProcessDied
            self.writes_left -= 1
        if size > self.room:
            raise CapacityError("storage", size, self.room)
        self.room -= size


class FakeValues:
    """Ray's GCS KV."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def add(self, name: str, value: bytes) -> bool:
        added = name not in self._values
        self._values.setdefault(name, value)
        return added

    def names(self, prefix: str) -> list[str]:
        return [name for name in self._values if name.startswith(prefix)]

    def value(self, name: str) -> bytes | None:
        return self._values.get(name)

    def remove(self, name: str) -> None:
        self._values.pop(name, None)
