"""What does a host store's arena say of a document: of one that it keeps, and of one that is being written?"""

from __future__ import annotations

from dataclasses import dataclass

from state.names import Order, SessionKey


@dataclass(frozen=True)
class StoredDocument:
    """A document that is there, whole. `frontiers`: those of its checkpoints. `size` in bytes. `place`: the storage's
    own handle."""

    key: SessionKey
    order: Order
    frontiers: tuple[int, ...]
    size: int
    place: int


@dataclass(frozen=True)
class Reservation:
    """Room for a document that `writer` writes itself. `generation` is never given twice in an arena."""

    document: StoredDocument
    writer: str
    generation: int
