"""Host replicas of one node: the newest checkpoints of its sessions, in CPU memory, behind a fence.

A pure state machine; `deployment/actors.py` puts it into a Ray actor that outlives every replica of the node. A put of
an older epoch than the highest one seen is refused: that is what keeps a replica that was given up for dead, and is
not, from writing over its successor's state.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from deployment.ownership import Epoch, SessionKey
from state.errors import StateError


@dataclass(frozen=True)
class Image:
    """One encoded checkpoint (`state/FORMAT.md`). `kind`: turn_start, turn_end or explicit; `frontier` in tokens."""

    kind: str
    frontier: int
    blob: bytes


@dataclass(frozen=True)
class Receipt:
    """The store's answer to a put. Not `accepted`: `reason` says why in a sentence; `fenced`: a newer owner exists."""

    accepted: bool
    reason: str = ""
    fenced: bool = False


@dataclass(frozen=True)
class Held:
    """What a store has of a session: images of the newest put of each kind, oldest put first."""

    key: SessionKey
    owner: str
    epoch: Epoch
    order: int
    images: tuple[Image, ...]

    @property
    def frontier(self) -> int:
        return max(image.frontier for image in self.images)


@dataclass
class _Entry:
    owner: str
    epoch: Epoch
    order: int
    images: dict[str, Image] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(len(image.blob) for image in self.images.values())


class HostStore:
    """Keeps at most `budget` bytes of checkpoints. Over it, whole sessions go, the longest unused first.

    `verify` raises StateError for bytes that are not a whole checkpoint; what it refuses is never stored.
    """

    def __init__(self, budget: int, verify: Callable[[bytes], object]) -> None:
        self._budget = budget
        self._verify = verify
        self._entries: OrderedDict[SessionKey, _Entry] = OrderedDict()
        self._seals: dict[SessionKey, Epoch] = {}
        self._deleted: dict[SessionKey, Epoch] = {}

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self._entries.values())

    def put(self, key: SessionKey, owner: str, epoch: Epoch, order: int, images: tuple[Image, ...]) -> Receipt:
        """Stores images of one capture; each replaces the session's older image of its kind. Idempotent by `order`."""
        deleted = self._deleted.get(key)
        if deleted is not None and epoch <= deleted:
            return Receipt(False, f"session {key} was deleted at epoch {deleted}", fenced=True)
        sealed = self._seals.get(key)
        if sealed is not None and epoch < sealed:
            return Receipt(False, f"epoch {epoch} is older than the session's epoch {sealed}", fenced=True)
        entry = self._entries.get(key)
        if entry is not None and entry.epoch == epoch and order <= entry.order:
            return Receipt(True)
        for image in images:
            try:
                self._verify(image.blob)
            except StateError as error:
                return Receipt(False, f"{image.kind} checkpoint at {image.frontier}: {error}")
        size = sum(len(image.blob) for image in images)
        if size > self._budget:
            return Receipt(False, f"checkpoint of {size} bytes is larger than the host store's {self._budget} bytes")
        self._seals[key] = epoch
        entry = entry or _Entry(owner, epoch, order)
        entry.owner, entry.epoch, entry.order = owner, epoch, order
        for image in images:
            entry.images.pop(image.kind, None)
            entry.images[image.kind] = image
        self._entries[key] = entry
        self._entries.move_to_end(key)
        self._evict(keep=key)
        return Receipt(True)

    def seal(self, key: SessionKey, epoch: Epoch) -> Held | None:
        """Shuts out every epoch below `epoch`, and gives what is held: nothing older can be added behind its back."""
        sealed = self._seals.get(key)
        if sealed is None or sealed < epoch:
            self._seals[key] = epoch
        return self.newest(key)

    def newest(self, key: SessionKey) -> Held | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return Held(key, entry.owner, entry.epoch, entry.order, tuple(entry.images.values()))

    def delete(self, key: SessionKey, epoch: Epoch) -> None:
        """Drops a session and refuses later puts up to `epoch`."""
        self._entries.pop(key, None)
        self._deleted[key] = max(epoch, self._deleted.get(key, epoch))

    def index(self) -> tuple[Held, ...]:
        """All that is held, without the bytes: for a directory that is being rebuilt."""
        return tuple(
            Held(key, entry.owner, entry.epoch, entry.order, tuple(
                Image(image.kind, image.frontier, b"") for image in entry.images.values()
            ))
            for key, entry in self._entries.items()
        )  # fmt: skip

    def _evict(self, keep: SessionKey) -> None:
        """The session just written stays, but for its older images when it alone is over the budget."""
        while self.size > self._budget and len(self._entries) > 1:
            oldest = next(key for key in self._entries if key != keep)
            del self._entries[oldest]
        entry = self._entries[keep]
        while self.size > self._budget and len(entry.images) > 1:
            del entry.images[next(iter(entry.images))]
