"""How do segments of a session travel between replicas? Cut into parts of bounded size, and put together again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from deployment.engine.commands import SegmentBytes
from state.errors import StateError

PARCEL_BYTES = 16 << 20
"""Large enough for the speed of shared memory, small enough to hold up nothing else."""


@dataclass(frozen=True)
class Piece:
    """`count` bytes, from `offset` on, of a segment of `size` bytes. `name`: see `SegmentBytes`."""

    name: bytes
    size: int
    offset: int
    count: int


@dataclass(frozen=True)
class Parcel:
    """`data`: uint8, the bytes of `pieces` one after the other."""

    pieces: tuple[Piece, ...]
    data: np.ndarray


def parcels(segments: Iterable[SegmentBytes], most: int = PARCEL_BYTES) -> Iterator[Parcel]:
    """Parts of at most `most` bytes. Small segments share one, large ones are spread."""
    pieces: list[Piece] = []
    parts: list[np.ndarray] = []
    room = most
    for segment in segments:
        data = np.frombuffer(segment.data, np.uint8)
        offset = 0
        while offset < len(data):
            count = min(room, len(data) - offset)
            pieces.append(Piece(segment.sha256, len(data), offset, count))
            parts.append(data[offset : offset + count])
            offset, room = offset + count, room - count
            if room == 0:
                yield _parcel(pieces, parts)
                pieces, parts, room = [], [], most
    if pieces:
        yield _parcel(pieces, parts)


def _parcel(pieces: list[Piece], parts: list[np.ndarray]) -> Parcel:
    return Parcel(tuple(pieces), parts[0] if len(parts) == 1 else np.concatenate(parts))


@dataclass
class _Partial:
    """Parts of a segment by their offsets."""

    size: int
    parts: dict[int, bytes] = field(default_factory=dict)


class Assembly:
    """Segments of which something has come, in whatever order; a part that comes twice counts once."""

    def __init__(self) -> None:
        self._partial: dict[bytes, _Partial] = {}

    def add(self, parcel: Parcel) -> tuple[SegmentBytes, ...]:
        """Copies what came; returns the segments that are whole with it. Raises StateError for a parcel that
        contradicts itself or an earlier one; then nothing of it counts."""
        self._check(parcel)
        whole: list[SegmentBytes] = []
        place = 0
        for piece in parcel.pieces:
            part = parcel.data[place : place + piece.count]
            place += piece.count
            if piece.count == piece.size:
                whole.append(SegmentBytes(piece.name, part.tobytes()))
                continue
            held = self._partial.setdefault(piece.name, _Partial(piece.size))
            held.parts[piece.offset] = part.tobytes()
            if sum(map(len, held.parts.values())) == piece.size:
                del self._partial[piece.name]
                whole.append(SegmentBytes(piece.name, b"".join(held.parts[at] for at in sorted(held.parts))))
        return tuple(whole)

    def _check(self, parcel: Parcel) -> None:
        told = sum(piece.count for piece in parcel.pieces)
        if told != len(parcel.data):
            raise StateError(f"a parcel has {len(parcel.data)} bytes, its pieces have {told}")
        for number, piece in enumerate(parcel.pieces):
            held = self._partial.get(piece.name)
            if held is not None and held.size != piece.size:
                raise StateError(f"pieces[{number}].size is {piece.size}, was {held.size} before")
            if piece.offset < 0 or not 0 < piece.count <= piece.size - piece.offset:
                place = f"{piece.count} bytes at {piece.offset}"
                raise StateError(f"pieces[{number}] has {place}, its segment has {piece.size}")
