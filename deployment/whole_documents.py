"""How does a replica put a session's document together, of what it has from the one before and what the engine adds?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from deployment.engine.commands import Export
from deployment.engine.events import Exported
from state.container import Blob, stated_bytes
from state.errors import StateError
from state.image_pieces import ImagePart

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
        self._fresh: dict[bytes, tuple[Blob, ...]] = {}
        self._chosen: tuple[int, ...] | None = None
        self._begun: ImagePart | None = None
        self._pieces: list[Blob] = []

    @property
    def known(self) -> frozenset[bytes]:
        return frozenset(self._before.places).union(self._fresh)

    def asking(self, command: Export) -> Export:
        """The command that asks for what comes next, of the moment at which the first slice was asked for."""
        return replace(command, without=self.known, begun=self._begun, chosen=self._chosen)

    def begin_anew(self) -> None:
        """The document is of another moment than before. What came is not asked for again."""
        self._chosen = None

    def take(self, brought: Exported) -> None:
        """Raises StateError for a piece that does not go on where the ones before it end."""
        self._chosen = brought.chosen
        self._fresh |= {segment.sha256: (segment.data,) for segment in brought.segments}
        piece = brought.piece
        if piece is None:
            return
        if piece.offset == 0:
            self._begun, self._pieces = None, []
        elif self._begun != ImagePart(piece.checkpoint, piece.offset):
            raise StateError(f"a piece of image {piece.checkpoint} from {piece.offset} on came after {self._begun}")
        self._begun = ImagePart(piece.checkpoint, piece.offset + len(piece.data))
        self._pieces.append(piece.data)
        if piece.sha256 is not None:
            self._fresh[piece.sha256] = tuple(self._pieces)

    def put_together(self, last: Exported) -> WholeDocument:
        """`last`: the slice that says what the document is made of. Copies all of it, and is for a thread. Raises
        StateError where what came is not what that one says."""
        parts = [np.frombuffer(last.document, np.uint8)]
        places: dict[bytes, slice] = {}
        at = len(last.document)
        for name, stated in zip(last.payload, last.sizes, strict=True):
            fresh = self._fresh.get(name)
            here = [self._before.of(name)] if fresh is None else [np.frombuffer(part, np.uint8) for part in fresh]
            size = sum(map(len, here))
            if size != stated:
                raise StateError(f"segment {name.hex()} came with {size} bytes, but has {stated}")
            places[name] = slice(at, at + size)
            at += size
            parts += here
        at += len(last.trailer)
        if at != stated_bytes(last.document):
            raise StateError(f"a document came with {at} bytes, but has {stated_bytes(last.document)}")
        return WholeDocument(np.concatenate([*parts, np.frombuffer(last.trailer, np.uint8)]), places)
