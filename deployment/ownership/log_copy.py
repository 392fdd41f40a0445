"""What do the records of one copy, read from the first to the last, amount to?

Later records win: a numbered record takes the place of those from its sequence on, and a seal that begins anew of all.
So a copy is put right by appending to it, and whatever a crash leaves is a state that it was in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from deployment.ownership.history import History, history_of
from deployment.ownership.log import Deleted, Sealed, SetNamed
from deployment.ownership.log_format import Head, decode, encode, read_head
from deployment.ownership.words import NEVER, NOTHING, Epoch, Named, Order


@dataclass(frozen=True)
class _Entry:
    head: Head
    data: bytes
    place: int


@dataclass
class LogCopy:
    """`seal`: nobody below it may write. `length`: records in the storage, superseded ones too; those before `begins`
    count for nothing."""

    seal: Epoch = NEVER
    named: Named | None = None
    length: int = 0
    begins: int = 0
    _entries: list[_Entry] = field(default_factory=list)
    _history: History | None = None

    @classmethod
    def of(cls, records: Iterable[bytes]) -> LogCopy:
        """Raises `FormatError` for a record that is none."""
        copy = cls()
        copy.take(records)
        return copy

    def take(self, records: Iterable[bytes]) -> None:
        """Reads records that the storage has just been given."""
        for data in records:
            self._take(data)
            self.length += 1
        self._history = None

    @property
    def history(self) -> History:
        if self._history is None:
            self._history = history_of(entry.head.order for entry in self._entries)
        return self._history

    @property
    def end(self) -> Order:
        return self._entries[-1].head.order if self._entries else NOTHING

    @property
    def deleted(self) -> bool:
        return bool(self._entries) and self._entries[-1].head.kind is Deleted

    @property
    def tail(self) -> bytes:
        """The last numbered record."""
        return self._entries[-1].data

    @property
    def tombstone(self) -> Deleted | None:
        record = decode(self.tail) if self.deleted else None
        return record if isinstance(record, Deleted) else None

    @property
    def rests_on_nothing(self) -> bool:
        """Whether the log alone says all there is: it goes back to the session's beginning."""
        return self.history.first == 1 or self._entries[0].head.kind is Deleted

    def after(self, order: Order | None) -> tuple[bytes, ...]:
        """Numbered records after the one at `order`; None: all."""
        lowest = -1 if order is None else order.sequence
        return tuple(entry.data for entry in self._entries if entry.head.order.sequence > lowest)

    def place(self, order: Order) -> int:
        """Where in the storage the numbered record at `order` lies."""
        return next(entry.place for entry in self._entries if entry.head.order == order)

    def cut_front(self, order: Order, records: int) -> None:
        """The storage has forgotten its first `records`, and the numbered ones before `order` with them."""
        kept = (entry for entry in self._entries if entry.head.order.sequence >= order.sequence)
        self._entries = [_Entry(entry.head, entry.data, entry.place - records) for entry in kept]
        self.length -= records
        self.begins = max(self.begins - records, 0)
        self._history = None

    def notes(self) -> list[bytes]:
        """What must be said again before records are forgotten: seal and set."""
        order = Order(self.seal, self.end.sequence)
        notes = [encode(Sealed(order))]
        if self.named is not None:
            named = self.named
            order_of_set = Order(named.epoch, self.end.sequence)
            notes.append(encode(SetNamed(order_of_set, named.members, named.owner, named.alone)))
        return notes

    def _take(self, data: bytes) -> None:
        head = read_head(data)
        if head.numbered:
            if head.order.sequence <= self.end.sequence:
                self._entries = [e for e in self._entries if e.head.order.sequence < head.order.sequence]
            self._entries.append(_Entry(head, data, self.length))
        self.seal = max(self.seal, head.order.epoch)
        if head.kind in (Sealed, SetNamed):
            self._take_decoded(data)

    def _take_decoded(self, data: bytes) -> None:
        record = decode(data)
        match record:
            case Sealed(anew=True):
                self._entries, self.named, self.begins = [], None, self.length
            case SetNamed():
                if self.named is None or self.named.epoch <= record.order.epoch:
                    self.named = Named(record.order.epoch, record.members, record.owner, record.alone)
            case _:
                pass
