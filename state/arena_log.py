"""How does a session's log lie in an arena? As records in a chain of chunks, each chunk an extent.

    chunk     where its records begin and end (8 bytes each), then the records, one behind the other
    record    length, CRC-32 of length and bytes (4 bytes each), the bytes, zeros up to a multiple of 8

Chunks follow each other by generation. All records of one append lie in one chunk, and count once that chunk's end says
so, or, where it was made for them, once it is ready: so an append is there whole or not at all. What is trimmed goes
chunk by chunk from the beginning: a crash in between leaves some more of it than was asked, never a gap. What is left
of a deleted session lies in a chunk of its own, which is no larger than that.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from state.arena_file import Mapping
from state.errors import ArenaError, CapacityError, StateError
from state.extents import Extent, Extents, Kind, Label
from state.names import Epoch, Order, SessionKey

_START, _END, _RECORDS = 0, 8, 16
"""Offsets in a chunk."""
_FRAME = struct.Struct("<II")
_LENGTH = struct.Struct("<I")
_FIRST_BYTES = 2048
_LARGEST_BYTES = 1 << 16
"""A chunk is twice as large as the one before it, from the first to the largest; one for a larger append is as large
as that needs."""
_ANY_ORDER = Order(Epoch(0, 0), 0)
"""A chunk's records have orders of their own."""


@dataclass
class _Chunk:
    """`start`, `end`: where its records lie in the file. `count`: how many they are."""

    extent: Extent
    start: int
    end: int
    count: int


class SessionLog:
    """A session's records. Not thread safe."""

    def __init__(self, mapping: Mapping, extents: Extents, key: SessionKey, chunks: Iterable[Extent] = ()) -> None:
        """`chunks`: the log's extents, all ready. From the first record on that is not whole nothing is kept: it was
        never acknowledged, or it was damaged, and nothing may stand behind a gap."""
        self._mapping = mapping
        self._extents = extents
        self._key = key
        self._chunks: list[_Chunk] = []
        whole = True
        for extent in sorted(chunks, key=lambda extent: extent.generation):
            if not whole:
                extents.release(extent)
                continue
            chunk, whole = self._read_chunk(extent)
            if chunk.count:
                self._chunks.append(chunk)
            else:
                extents.release(extent)

    def __len__(self) -> int:
        return sum(chunk.count for chunk in self._chunks)

    def records(self) -> tuple[bytes, ...]:
        found: list[bytes] = []
        for chunk in self._chunks:
            at = chunk.start
            for _ in range(chunk.count):
                (length,) = _LENGTH.unpack(self._mapping.read(at, _LENGTH.size))
                found.append(self._mapping.read(at + _FRAME.size, length))
                at += _framed_bytes(length)
        return tuple(found)

    def append(self, records: Sequence[bytes], *, remains: bool = False) -> None:
        """All or nothing. Raises `CapacityError`. `remains`: see `Arena.append`."""
        if not records:
            return
        data = b"".join(map(_framed, records))
        last = self._chunks[-1] if self._chunks else None
        if remains or last is None or last.end + len(data) > last.extent.payload + last.extent.label.size:
            self._chunks.append(self._new_chunk(data, len(records), last, remains))
            return
        self._mapping.write(last.end, data)
        last.end += len(data)
        last.count += len(records)
        self._mapping.set_word(last.extent.payload + _END, last.end - last.extent.payload)

    def trim(self, first: int) -> None:
        """Forgets the first `first` records."""
        if first < 0:
            raise StateError(f"session log: first is {first}, must be 0 or more")
        surplus = first
        while surplus > 0 and self._chunks and self._chunks[0].count <= surplus:
            chunk = self._chunks.pop(0)
            self._extents.release(chunk.extent)
            surplus -= chunk.count
        if surplus > 0 and self._chunks:
            chunk = self._chunks[0]
            chunk.start = self._place_of(chunk, surplus)
            chunk.count -= surplus
            self._mapping.set_word(chunk.extent.payload + _START, chunk.start - chunk.extent.payload)

    # ------------------------------------------------------------------------------------------------ chunks

    def _new_chunk(self, data: bytes, count: int, last: _Chunk | None, remains: bool) -> _Chunk:
        needed = _RECORDS + len(data)
        usual = max(_FIRST_BYTES, min(2 * last.extent.label.size, _LARGEST_BYTES)) if last else _FIRST_BYTES
        kind = Kind.REMAINS if remains else Kind.LOG
        try:
            extent = self._reserve(kind, needed if remains else max(needed, usual))
        except CapacityError:
            extent = self._reserve(kind, needed)
        start = extent.payload + _RECORDS
        self._mapping.write(start, data)
        self._mapping.set_word(extent.payload + _START, _RECORDS)
        self._mapping.set_word(extent.payload + _END, needed)
        return _Chunk(self._extents.make_ready(extent), start, start + len(data), count)

    def _reserve(self, kind: Kind, size: int) -> Extent:
        return self._extents.reserve(Label(kind, self._key, _ANY_ORDER, (), size))

    def _read_chunk(self, extent: Extent) -> tuple[_Chunk, bool]:
        """A chunk up to its first record that is not whole, and whether all of them are."""
        start, end = (self._mapping.word(extent.payload + word) for word in (_START, _END))
        if not _RECORDS <= start <= end <= extent.label.size:
            problem = f"log chunk at {extent.place}: records from {start} to {end} in {extent.label.size} bytes"
            raise ArenaError(self._mapping.path, problem)
        chunk = _Chunk(extent, extent.payload + start, extent.payload + start, 0)
        stated = extent.payload + end
        while chunk.end < stated:
            size = self._whole_record(chunk.end, stated)
            if size is None:
                self._mapping.set_word(extent.payload + _END, chunk.end - extent.payload)
                return chunk, False
            chunk.end += size
            chunk.count += 1
        return chunk, True

    def _whole_record(self, at: int, end: int) -> int | None:
        """Its bytes with frame; None if it is not whole."""
        if at + _FRAME.size > end:
            return None
        length, checksum = _FRAME.unpack(self._mapping.read(at, _FRAME.size))
        if at + _framed_bytes(length) > end:
            return None
        same = checksum == _checksum(length, self._mapping.view(at + _FRAME.size, length))
        return _framed_bytes(length) if same else None

    def _place_of(self, chunk: _Chunk, number: int) -> int:
        """Where the chunk's record of this number begins."""
        at = chunk.start
        for _ in range(number):
            (length,) = _LENGTH.unpack(self._mapping.read(at, _LENGTH.size))
            at += _framed_bytes(length)
        return at


def _framed(record: bytes) -> bytes:
    frame = _FRAME.pack(len(record), _checksum(len(record), record))
    return (frame + record).ljust(_framed_bytes(len(record)), b"\0")


def _framed_bytes(length: int) -> int:
    return -(-(_FRAME.size + length) // 8) * 8


def _checksum(length: int, data: bytes | memoryview) -> int:
    return zlib.crc32(data, zlib.crc32(_LENGTH.pack(length)))
