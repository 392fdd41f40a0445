"""What lies where in an arena? Extents, one behind the other from the header page to the end of the file.

    0   span word        bytes to the next extent / 64 (40 bits), check of place and span (24 bits)
    8   state word       free, writing or ready (32 bits), CRC-32 of what follows up to the payload (32 bits)
    16  generation       never given twice in an arena
    24  epoch            incarnation, counter: 8 bytes each
    40  payload bytes
    48  sequence
    56  kind, and the lengths of tenant, session, writer (2 bytes each)
    64  tenant, session and writer as UTF-8, the count of frontiers and each of them (8 bytes each)
        payload, from the next multiple of 64 on

Numbers are little-endian. All that a crash may leave is right, because every change becomes visible by one word:

- an extent is cut out of a free one by its span word, after its header and that of the rest were written where nobody
  looks: inside the free extent
- its header counts once its state word says *writing*, its payload once that says *ready*
- it is free once its state word says so; free neighbours become one by the span word of the first

So nothing beside the arena is needed to know it again, and what is in a payload can never be taken for a header.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from dataclasses import dataclass
from enum import IntEnum

from state.arena_file import GENERATION_WORD, HEADER_BYTES, Mapping
from state.errors import ArenaError, CapacityError, StateError
from state.free_spans import FreeSpans, Span
from state.names import LARGEST, Epoch, Order, SessionKey

UNIT = 64
"""Bytes; extents and payloads begin at multiples of it."""

_SPAN_WORD, _STATE_WORD, _LABEL = 0, 8, 16
_CHECK_BITS = 24
_FIXED = struct.Struct("<QQQQQHHHH")
_NUMBER = struct.Struct("<Q")
_TEXT_BYTES = 1024


class Kind(IntEnum):
    """`REMAINS`: of a log, what is left of a session that was deleted."""

    LOG = 1
    DOCUMENT = 2
    REMAINS = 3


class State(IntEnum):
    FREE = int.from_bytes(b"free", "little")
    WRITING = int.from_bytes(b"writ", "little")
    READY = int.from_bytes(b"redy", "little")


@dataclass(frozen=True)
class Label:
    """What an extent is for. `size`: bytes of its payload. `writer` writes it; "" is the store itself."""

    kind: Kind
    key: SessionKey
    order: Order
    frontiers: tuple[int, ...]
    size: int
    writer: str = ""


@dataclass(frozen=True)
class Extent:
    """`place` and `payload`: where header and payload begin in the file."""

    place: int
    span: int
    payload: int
    generation: int
    state: State
    label: Label


class Extents:
    """The extents of an arena, and what is free between them. `live`: those that are not free, by place; `taken`: how
    many bytes they take, by kind."""

    def __init__(self, mapping: Mapping) -> None:
        """Reads them. Raises `ArenaError` for a file that holds anything but extents."""
        self._mapping = mapping
        self._end = mapping.header.size
        self._free = FreeSpans()
        self.live: dict[int, Extent] = {}
        self.taken: Counter[Kind] = Counter()
        if mapping.word(HEADER_BYTES) == mapping.word(GENERATION_WORD) == 0:  # nothing was ever written here
            self._set_free(Span(HEADER_BYTES, self._end - HEADER_BYTES))
        self._walk()

    @property
    def free(self) -> int:
        """Bytes; an extent's header and label take some of them."""
        return self._free.total

    @property
    def used(self) -> int:
        return self._end - HEADER_BYTES - self._free.total

    @property
    def largest(self) -> int:
        """Bytes of the largest free span."""
        return self._free.largest

    def reserve(self, label: Label) -> Extent:
        """An extent that is being written: documents from the top, all else from the bottom. `CapacityError`."""
        encoded = _encoded(label)
        size = _rounded(_LABEL + len(encoded)) + _rounded(label.size)
        hole = self._free.take(size, from_top=label.kind is Kind.DOCUMENT)
        if hole is None:
            raise CapacityError("arena, bytes in one piece", size, self.largest)
        generation = self._next_generation()
        if label.kind is Kind.DOCUMENT and hole.size > size:
            place = hole.end - size
            self._set_span(Span(place, size))
            extent = self._write_header(place, size, generation, label, encoded)
            self._set_span(Span(hole.place, hole.size - size))  # and here it is
            self._free.give(Span(hole.place, hole.size - size))
        else:
            place = hole.place
            if hole.size > size:
                self._set_free(Span(place + size, hole.size - size))
                self._set_span(Span(place, size))
                self._free.give(Span(place + size, hole.size - size))
            extent = self._write_header(place, size, generation, label, encoded)
        self._is_live(extent)
        return extent

    def make_ready(self, extent: Extent) -> Extent:
        self._check_live(extent)
        self._set_state(extent.place, State.READY, self._mapping.word(extent.place + _STATE_WORD) >> 32)
        ready = Extent(extent.place, extent.span, extent.payload, extent.generation, State.READY, extent.label)
        self.live[extent.place] = ready
        return ready

    def release(self, extent: Extent) -> None:
        self._check_live(extent)
        del self.live[extent.place]
        self.taken[extent.label.kind] -= extent.span
        self._set_state(extent.place, State.FREE)
        self._set_span(self._free.give(Span(extent.place, extent.span)))

    def _is_live(self, extent: Extent) -> None:
        self.live[extent.place] = extent
        self.taken[extent.label.kind] += extent.span

    def _check_live(self, extent: Extent) -> None:
        found = self.live.get(extent.place)
        if found is None or found.generation != extent.generation:
            raise StateError(f"extent {extent.generation} at {extent.place} is not in use any more")

    # ------------------------------------------------------------------------------------------------ words

    def _walk(self) -> None:
        place = HEADER_BYTES
        merged: set[int] = set()
        while place < self._end:
            span = _span_at(self._mapping, place, self._end)
            extent = extent_at(self._mapping, place)
            if extent is None:
                joined = self._free.give(Span(place, span))
                if joined.place < place:
                    merged.add(joined.place)
            else:
                self._is_live(extent)
            place += span
        for span in self._free:
            if span.place in merged:
                self._set_span(span)

    def _write_header(self, place: int, span: int, generation: int, label: Label, encoded: bytes) -> Extent:
        """All of it but the span word; the state word comes last."""
        body = _NUMBER.pack(generation) + encoded[_NUMBER.size :]
        self._mapping.write(place + _LABEL, body)
        self._set_state(place, State.WRITING, _checksum(place, body))
        payload = place + _rounded(_LABEL + len(body))
        return Extent(place, span, payload, generation, State.WRITING, label)

    def _set_free(self, span: Span) -> None:
        self._set_state(span.place, State.FREE)
        self._set_span(span)

    def _set_span(self, span: Span) -> None:
        word = span.size // UNIT << _CHECK_BITS
        self._mapping.set_word(span.place + _SPAN_WORD, word | _span_check(span.place, word))

    def _set_state(self, place: int, state: State, checksum: int = 0) -> None:
        self._mapping.set_word(place + _STATE_WORD, checksum << 32 | state)

    def _next_generation(self) -> int:
        generation = self._mapping.word(GENERATION_WORD) + 1
        self._mapping.set_word(GENERATION_WORD, generation)
        return generation


def extent_at(mapping: Mapping, place: int) -> Extent | None:
    """The extent whose header is at `place`; None if it is free. Raises `ArenaError` where no header can be."""
    span = _span_at(mapping, place, mapping.header.size)
    word = mapping.word(place + _STATE_WORD)
    try:
        state = State(word & 0xFFFFFFFF)
    except ValueError:
        raise ArenaError(mapping.path, f"extent at {place}: state word is {word:#x}, which is no state") from None
    if state is State.FREE:
        return None
    header = mapping.view(place + _LABEL, span - _LABEL)
    found = _decoded(header)
    if found is None or _checksum(place, header[: found[2]]) != word >> 32:
        raise ArenaError(mapping.path, f"extent at {place}: the CRC-32 of its header is not that of its bytes")
    generation, label, length = found
    payload = place + _rounded(_LABEL + length)
    if payload + label.size > place + span:
        raise ArenaError(mapping.path, f"extent at {place}: {label.size} bytes do not fit into its {span}")
    return Extent(place, span, payload, generation, state, label)


def _span_at(mapping: Mapping, place: int, end: int) -> int:
    aligned = HEADER_BYTES <= place < end and place % UNIT == 0
    word = mapping.word(place + _SPAN_WORD) if aligned else 0
    span = (word >> _CHECK_BITS) * UNIT
    check = word & ((1 << _CHECK_BITS) - 1)
    if not 0 < span <= end - place or check != _span_check(place, word - check):
        raise ArenaError(mapping.path, f"no extent begins at {place}: the span word there is {word:#x}")
    return span


def _span_check(place: int, word: int) -> int:
    return zlib.crc32(_NUMBER.pack(place) + _NUMBER.pack(word)) & ((1 << _CHECK_BITS) - 1)


def _checksum(place: int, body: bytes | memoryview) -> int:
    return zlib.crc32(body, zlib.crc32(_NUMBER.pack(place)))


def _encoded(label: Label) -> bytes:
    """From the generation on, which is 0 here. Raises `StateError` for what a header cannot hold."""
    epoch, numbers = label.order.epoch, [len(label.frontiers), *label.frontiers]
    texts: list[bytes] = []
    for field, text in (("tenant", label.key.tenant), ("session", label.key.session), ("writer", label.writer)):
        try:
            data = text.encode()
        except UnicodeEncodeError:
            raise StateError(f"arena: {field} {text!r} must be valid Unicode") from None
        if len(data) > _TEXT_BYTES:
            raise StateError(f"arena: {field} has {len(data)} bytes, may have {_TEXT_BYTES}")
        texts.append(data)
    for field, value in (
        ("incarnation", epoch.incarnation),
        ("counter", epoch.counter),
        ("sequence", label.order.sequence),
        ("size", label.size),
        ("largest frontier", max(label.frontiers, default=0)),
        ("smallest frontier", min(label.frontiers, default=0)),
    ):
        if not 0 <= value <= LARGEST:
            raise StateError(f"arena: {field} is {value}, must be 0 to 2^53")
    if len(numbers) > _TEXT_BYTES:
        raise StateError(f"arena: a document has {len(label.frontiers)} frontiers, may have {_TEXT_BYTES - 1}")
    fixed = _FIXED.pack(
        0, epoch.incarnation, epoch.counter, label.size, label.order.sequence, label.kind, *map(len, texts)
    )
    return fixed + b"".join(texts) + struct.pack(f"<{len(numbers)}Q", *numbers)


def _decoded(header: memoryview) -> tuple[int, Label, int] | None:
    """Generation, label, and how many bytes they take; None for bytes that `_encoded` did not make."""
    try:
        generation, incarnation, counter, size, sequence, kind, *lengths = _FIXED.unpack_from(header)
        at = _FIXED.size
        texts: list[str] = []
        for length in lengths:
            texts.append(str(header[at : at + length], "utf-8"))
            at += length
        (count,) = _NUMBER.unpack_from(header, at)
        at += _NUMBER.size
        frontiers = struct.unpack_from(f"<{min(count, _TEXT_BYTES)}Q", header, at)
        at += _NUMBER.size * len(frontiers)
        order = Order(Epoch(incarnation, counter), sequence)
        label = Label(Kind(kind), SessionKey(texts[0], texts[1]), order, frontiers, size, texts[2])
    except (struct.error, ValueError):
        return None
    return generation, label, at


def _rounded(size: int) -> int:
    return -(-size // UNIT) * UNIT
