"""Host replicas of one node: the newest document of each of its sessions, in CPU memory, behind a fence.

A pure state machine; `deployment/actors.py` puts it into a Ray actor that outlives every replica of the node. A put of
an older epoch than the highest one seen is refused: that is what keeps a replica that was given up for dead, and is
not, from writing over its successor's state.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from deployment.ownership import Epoch, SessionKey
from state.errors import StateError


@dataclass(frozen=True)
class Receipt:
    """The store's answer to a put. Not `accepted`: `reason` says why in a sentence; `fenced`: a newer owner exists;
    `too_large`: less of the session might fit."""

    accepted: bool
    reason: str = ""
    fenced: bool = False
    too_large: bool = False


@dataclass(frozen=True)
class Held:
    """What a store has of a session: one document (`state/FORMAT.md`). `order` numbers an owner's puts; `frontiers`
    are those of the document's checkpoints."""

    key: SessionKey
    owner: str
    epoch: Epoch
    order: int
    frontiers: tuple[int, ...]
    document: bytes


class HostStore:
    """Keeps at most `budget` bytes of documents. Over it, whole sessions go, the longest unused first.

    `verify` raises StateError for bytes that are no document; what it refuses is never stored. Who loads a document
    checks its payload.
    """

    def __init__(self, budget: int, verify: Callable[[bytes], object]) -> None:
        self._budget = budget
        self._verify = verify
        self._held: OrderedDict[SessionKey, Held] = OrderedDict()
        self._seals: dict[SessionKey, Epoch] = {}
        self._deleted: dict[SessionKey, Epoch] = {}

    @property
    def size(self) -> int:
        return sum(len(held.document) for held in self._held.values())

    def put(
        self, key: SessionKey, owner: str, epoch: Epoch, order: int, frontiers: tuple[int, ...], document: bytes
    ) -> Receipt:
        """Stores a session's document in the place of its older one. Idempotent by `order`."""
        deleted = self._deleted.get(key)
        if deleted is not None and epoch <= deleted:
            return Receipt(False, f"session {key} was deleted at epoch {deleted}", fenced=True)
        sealed = self._seals.get(key)
        if sealed is not None and epoch < sealed:
            return Receipt(False, f"epoch {epoch} is older than the session's epoch {sealed}", fenced=True)
        current = self._held.get(key)
        if current is not None and current.epoch == epoch and order <= current.order:
            return Receipt(True)
        if len(document) > self._budget:
            reason = f"document of {len(document)} bytes is larger than the host store's {self._budget} bytes"
            return Receipt(False, reason, too_large=True)
        try:
            self._verify(document)
        except StateError as error:
            return Receipt(False, f"document at order {order}: {error}")
        self._seals[key] = epoch
        self._held[key] = Held(key, owner, epoch, order, frontiers, document)
        self._held.move_to_end(key)
        while self.size > self._budget:
            self._held.popitem(last=False)
        return Receipt(True)

    def seal(self, key: SessionKey, epoch: Epoch) -> Held | None:
        """Shuts out every epoch below `epoch`, and gives what is held: nothing older can be added behind its back."""
        sealed = self._seals.get(key)
        if sealed is None or sealed < epoch:
            self._seals[key] = epoch
        return self.newest(key)

    def newest(self, key: SessionKey) -> Held | None:
        held = self._held.get(key)
        if held is not None:
            self._held.move_to_end(key)
        return held

    def delete(self, key: SessionKey, epoch: Epoch) -> None:
        """Drops a session and refuses later puts up to `epoch`. One that was made anew since then stays."""
        held = self._held.get(key)
        if held is not None and held.epoch <= epoch:
            del self._held[key]
        self._deleted[key] = max(epoch, self._deleted.get(key, epoch))

    def index(self) -> tuple[Held, ...]:
        """All that is held, without the bytes: for a directory that is being rebuilt."""
        return tuple(replace(held, document=b"") for held in self._held.values())
