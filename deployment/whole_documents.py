"""How does a replica put a session's document together, of what it has from the one before and what the engine adds?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from deployment.engine.events import Exported

SLICE_BYTES = 32 << 20
"""Bytes that an engine hashes or reads at once while its lanes wait: 22 ms of sha256 on one core of an H200's host."""


@dataclass(frozen=True)
class WholeDocument:
    """`document`: uint8. `places`: where its segments lie, by their sha256."""

    document: np.ndarray
    places: Mapping[bytes, slice] = field(default_factory=dict)

    def of(self, sha256: bytes) -> np.ndarray:
        return self.document[self.places[sha256]]


NOTHING = WholeDocument(np.empty(0, np.uint8))


class Slices:
    """What the slices of one document have brought, and the document `before`."""

    def __init__(self, before: WholeDocument) -> None:
        self._before = before
        self._fresh: dict[bytes, tuple[bytes, ...]] = {}
        self._pieces: list[bytes] = []

    @property
    def known(self) -> frozenset[bytes]:
        return frozenset(self._before.places).union(self._fresh)

    def take(self, brought: Exported) -> None:
        self._fresh |= {segment.sha256: (segment.data,) for segment in brought.segments}
        piece = brought.piece
        if piece is not None:
            self._pieces = [*(self._pieces if piece.offset else ()), piece.data]
            if piece.sha256 is not None:
                self._fresh[piece.sha256] = tuple(self._pieces)

    def put_together(self, last: Exported) -> WholeDocument:
        """`last`: the slice that says what the document is made of. Copies all of it, and is for a thread."""
        parts = [np.frombuffer(last.document, np.uint8)]
        places: dict[bytes, slice] = {}
        at = len(last.document)
        for name in last.payload:
            fresh = self._fresh.get(name)
            here = [self._before.of(name)] if fresh is None else [np.frombuffer(part, np.uint8) for part in fresh]
            size = sum(map(len, here))
            places[name] = slice(at, at + size)
            at += size
            parts += here
        return WholeDocument(np.concatenate([*parts, np.frombuffer(last.trailer, np.uint8)]), places)
