"""A host store: keeps copies of sessions' logs and images, and refuses whoever is not the owner any more.

A machine of requests and answers over a `Storage`. All it knows it reads from there, so that a store that was started
again is the one that it was: a seal is a record like any other.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from deployment.ownership.log import Sealed, SetNamed
from deployment.ownership.log_copy import KnownKey, LogCopy
from deployment.ownership.log_format import check, encode
from deployment.ownership.messages import (
    Append,
    Ends,
    FromStore,
    Full,
    Gap,
    Image,
    Install,
    Kept,
    Look,
    NameSet,
    Part,
    Put,
    Read,
    Receipt,
    Refused,
    Seal,
    ToStore,
    Trim,
)
from deployment.ownership.storage import Storage, StoredDocument
from deployment.ownership.tombstones import Tombstones
from deployment.ownership.words import NOTHING, Epoch, Member, Named, Order, SessionKey
from state.errors import CapacityError, StateError


@dataclass(frozen=True)
class KnownTurn:
    """Where the turn of an idempotency key is."""

    key: SessionKey
    turn: KnownKey


class Store:
    """The copies of one node. Raises `FormatError` for storage whose records are none of ours."""

    def __init__(self, node: str, storage: Storage) -> None:
        self._storage = storage
        self.member = Member(node, storage.incarnation)
        self._tombstones = Tombstones()
        self._copies = {key: LogCopy.of(storage.records(key)) for key in sorted(storage.keys())}
        for key in self._copies:
            self._tidy(key)

    # -------------------------------------------------------------------------------------------- questions

    def index(self) -> tuple[Ends, ...]:
        """How every copy stands: for a directory that is being rebuilt."""
        return tuple(self._ends(key, copy.seal) for key, copy in self._copies.items())

    def find_turn(self, tenant: str, idempotency_key: str, at: float) -> KnownTurn | None:
        """The turn that was asked for under this key, if it runs or ended less than 24 hours before `at`."""
        for key, copy in self._copies.items():
            known = copy.keys.get(idempotency_key) if key.tenant == tenant else None
            if known is not None and (known.until is None or known.until > at):
                return KnownTurn(key, known)
        return None

    def document(self, key: SessionKey, order: Order) -> tuple[tuple[int, ...], memoryview]:
        """Frontiers and bytes of an image. Raises `StateError` if it is not held (any more)."""
        for stored in self._storage.documents(key):
            if stored.order == order:
                return stored.frontiers, self._storage.document(stored)
        raise StateError(f"image of session {key} as of {order}: store {self.member} does not hold it")

    def answer(self, message: ToStore) -> FromStore:
        """Does what is asked, if its epoch may. What is done is in the storage before this returns.

        `Bring` is for the shell, which can reach other stores; it ends in a `Put`.
        """
        key, epoch = message.key, message.epoch
        copy = self._copies.get(key) or LogCopy()
        if isinstance(message, Look):
            return self._ends(key, epoch)
        if isinstance(message, Read):
            return Part(self.member, key, epoch, message.after, copy.after(message.after), self._images(key))
        may_raise = isinstance(message, Seal | Install)
        if epoch < copy.seal or (epoch > copy.seal and not may_raise):
            return Refused(self.member, key, epoch, copy.seal)
        try:
            match message:
                case Seal():
                    return self._seal(message)
                case Append():
                    return self._append(message)
                case Install():
                    return self._install(message)
                case NameSet():
                    return self._name(message)
                case Put():
                    return self._put(message)
                case Trim():
                    return self._trim(message)
                case _:
                    raise StateError(f"message {type(message).__name__}: a store does not answer it")
        except CapacityError as error:
            return Full(self.member, key, epoch, error.wanted, error.free)

    # -------------------------------------------------------------------------------------------- changes

    def _seal(self, message: Seal) -> Ends:
        key, copy = message.key, self._copy(message.key)
        if message.epoch > copy.seal:
            self._write(key, encode(Sealed(Order(message.epoch, copy.end.sequence), message.anew)))
            self._tidy(key)
        return self._ends(key, message.epoch)

    def _append(self, message: Append) -> Receipt | Gap:
        key, copy = message.key, self._copy(message.key)
        orders = [check(data).order for data in message.records]
        held = [place for place, order in enumerate(orders) if order in copy.history]
        # What comes again may begin before a record that was trimmed away since.
        new, last = (held[-1] + 1, orders[held[-1]]) if held else (0, message.after)
        follows = all(order.sequence == last.sequence + n for n, order in enumerate(orders[new:], 1))
        if last not in copy.history or not follows:
            return Gap(self.member, key, message.epoch, copy.end)
        if message.records[new:]:
            self._write(key, *message.records[new:])
            self._tidy(key)
        return self._receipt(key, message.epoch)

    def _install(self, message: Install) -> Receipt:
        key, copy = message.key, self._copy(message.key)
        orders = [check(data).order for data in message.records]
        # A late repetition must not take back what came since, of which an image may be all that is left.
        since = bool(orders) and copy.end.epoch == message.epoch and copy.end >= orders[-1]
        if message.epoch > copy.seal or not (since or all(order in copy.history for order in orders)):
            self._write(key, encode(Sealed(Order(message.epoch, 0), anew=True)), *message.records)
            self._tidy(key)
        return self._receipt(key, message.epoch)

    def _name(self, message: NameSet) -> Receipt | Gap:
        key, epoch, copy = message.key, message.epoch, self._copy(message.key)
        if copy.named == Named(epoch, message.members, message.owner, message.alone):
            return self._receipt(key, epoch)
        note = encode(SetNamed(Order(epoch, copy.end.sequence), message.members, message.owner, message.alone))
        if self.member not in message.members:
            self._write(key, encode(Sealed(Order(epoch, copy.end.sequence), anew=True)), note)
            self._tidy(key)
        elif copy.end == message.end:
            self._write(key, note)
        else:
            return Gap(self.member, key, epoch, copy.end)
        return self._receipt(key, epoch)

    def _put(self, message: Put) -> Kept | Gap:
        key, copy = message.key, self._copy(message.key)
        # An image of what the log does not say may hold tokens that were never published.
        if message.order not in copy.history:
            return Gap(self.member, key, message.epoch, copy.end)
        if all(stored.order != message.order for stored in self._storage.documents(key)):
            self._storage.put(key, message.order, message.frontiers, message.document)
        return Kept(self.member, key, message.epoch, message.order)

    def _trim(self, message: Trim) -> Receipt | Gap:
        key, copy = message.key, self._copy(message.key)
        held = [stored for stored in self._usable(key) if stored.order.sequence >= message.log.sequence]
        if message.log not in copy.history or not held:
            return Gap(self.member, key, message.epoch, copy.end)
        if message.log.sequence > copy.history.first:
            notes = copy.notes(message.log, message.at)
            self._write(key, *notes)
            self._cut_front(key, message.log)
        for stored in self._storage.documents(key):
            if stored.order.sequence < min(message.image.sequence, held[-1].order.sequence):
                self._storage.discard(stored)
        return self._receipt(key, message.epoch)

    def forget_tombstones(self, at: float) -> None:
        """Lets go of what is left of deleted sessions, once nobody needs it. `at`: seconds since 1970."""
        for key in self._tombstones.over(self._copies, lambda: self._storage.crowded, at):
            del self._copies[key]
            self._storage.remove(key)

    # -------------------------------------------------------------------------------------------- the storage

    def _copy(self, key: SessionKey) -> LogCopy:
        return self._copies.setdefault(key, LogCopy())

    def _write(self, key: SessionKey, *records: bytes, remains: bool = False) -> None:
        self._storage.append(key, records, remains=remains)
        self._copies[key].take(records)

    def _cut_front(self, key: SessionKey, order: Order) -> None:
        place = self._copies[key].place(order)
        self._storage.trim(key, place)
        self._copies[key].cut_front(order, place)

    def _tidy(self, key: SessionKey) -> None:
        """Lets go of what counts for nothing: what lies before a seal that begins anew, or a tombstone, and images that
        do not agree with the log. Whatever a death of the process leaves of this, the next start does."""
        copy = self._copies[key]
        for stored in self._storage.documents(key):
            # One as of nothing is in every history that goes back to the beginning.
            if copy.begins or copy.deleted or stored.order not in copy.history:
                self._storage.discard(stored)
        if copy.begins:
            self._storage.trim(key, copy.begins)
            copy.cut_front(NOTHING, copy.begins)
        if copy.deleted:
            self._bury(key, copy)

    def _bury(self, key: SessionKey, copy: LogCopy) -> None:
        """Tombstone, seal and set are written again, apart from what lies before them, so that all of that goes."""
        self._tombstones.buried(key)
        notes = copy.notes(copy.end, at=float("inf"))
        if copy.place(copy.end) == 0 and copy.length == 1 + len(notes):
            return
        with suppress(CapacityError):  # it takes more room than it needs, until the next start
            try:
                self._write(key, copy.tail, *notes, remains=True)
            except CapacityError:
                self._write(key, *notes)  # where there was room left for more records
                self._cut_front(key, copy.end)
                self._write(key, copy.tail, *notes, remains=True)
            self._cut_front(key, copy.end)

    # -------------------------------------------------------------------------------------------- answers

    def _usable(self, key: SessionKey) -> list[StoredDocument]:
        history = self._copies[key].history if key in self._copies else LogCopy().history
        return [stored for stored in self._storage.documents(key) if stored.order in history]

    def _images(self, key: SessionKey) -> tuple[Image, ...]:
        return tuple(Image(stored.order, stored.frontiers) for stored in self._usable(key))

    def _ends(self, key: SessionKey, epoch: Epoch) -> Ends:
        copy = self._copies.get(key) or LogCopy()
        images = self._images(key)
        whole = copy.rests_on_nothing or bool(images)
        return Ends(
            self.member, key, epoch, copy.seal, copy.named, copy.history, images, whole, copy.deleted
        )  # fmt: skip

    def _receipt(self, key: SessionKey, epoch: Epoch) -> Receipt:
        copy = self._copies[key]
        named = copy.named
        return Receipt(self.member, key, epoch, copy.end, named.epoch if named else Epoch(0, 0))
