"""What does the durable tier keep of a session under one order? The caller's document, and what eviction must know.

A record is a msgpack map followed by the sha256 of the map, so that a torn or damaged one is known without looking
into the document.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from state.errors import FormatError, StateError
from state.names import LARGEST, Epoch, Order, SessionKey
from state.strict_msgpack import pack, unpack

DIGEST_BYTES = 32
_SEGMENT = struct.Struct(f">{DIGEST_BYTES}sQ")
_PLACE = "publication"
_T = TypeVar("_T")


@dataclass(frozen=True)
class StoredSegment:
    """Bytes that are named by their own sha256, 32 bytes; `size` in bytes."""

    sha256: bytes
    size: int


@dataclass(frozen=True)
class StoredCheckpoint:
    """What it takes to restore a checkpoint, and what that saves.

    `ancestor`: id of the checkpoint that this one's ledger continues, in this or another session; None: there is none.
    `seconds`: of prefill from the ledger's start to the frontier.
    """

    id: str
    ancestor: str | None
    seconds: float
    segments: tuple[StoredSegment, ...]


@dataclass(frozen=True)
class Publication:
    """A session as published under `order`, at `published` seconds since 1970."""

    key: SessionKey
    order: Order
    published: float
    checkpoints: tuple[StoredCheckpoint, ...]

    def segments(self) -> dict[bytes, int]:
        """Sizes of all segments by digest."""
        return {segment.sha256: segment.size for checkpoint in self.checkpoints for segment in checkpoint.segments}


def check_checkpoints(checkpoints: Sequence[StoredCheckpoint]) -> None:
    """Raises `StateError` naming the checkpoint whose facts cannot be true."""
    sizes: dict[bytes, int] = {}
    ids: set[str] = set()
    for checkpoint in checkpoints:
        where = f"checkpoint {checkpoint.id}"
        if checkpoint.id in ids:
            raise StateError(f"{where}: two checkpoints of one publication have this id")
        ids.add(checkpoint.id)
        if not (math.isfinite(checkpoint.seconds) and checkpoint.seconds >= 0):
            raise StateError(f"{where}: seconds is {checkpoint.seconds}, must be finite and not negative")
        for segment in checkpoint.segments:
            if len(segment.sha256) != DIGEST_BYTES:
                raise StateError(f"{where}: a sha256 has {len(segment.sha256)} bytes, must have {DIGEST_BYTES}")
            if not 0 <= segment.size <= LARGEST:
                raise StateError(f"{where}: segment {segment.sha256.hex()} has size {segment.size}, must be 0 to 2^53")
            if sizes.setdefault(segment.sha256, segment.size) != segment.size:
                raise StateError(f"{where}: segment {segment.sha256.hex()} has two sizes")


def write_record(publication: Publication, document: bytes) -> bytes:
    """The record's bytes. Raises `StateError` for facts that `read_record` would refuse."""
    check_checkpoints(publication.checkpoints)
    fields: dict[str, Any] = {
        "tenant": publication.key.tenant,
        "session": publication.key.session,
        "incarnation": publication.order.epoch.incarnation,
        "counter": publication.order.epoch.counter,
        "sequence": publication.order.sequence,
        "published": publication.published,
        "checkpoints": [
            {
                "id": checkpoint.id,
                "ancestor": checkpoint.ancestor,
                "seconds": float(checkpoint.seconds),
                "segments": b"".join(_SEGMENT.pack(segment.sha256, segment.size) for segment in checkpoint.segments),
            }
            for checkpoint in publication.checkpoints
        ],
        "document": document,
    }
    packed = pack(fields, _PLACE)
    return packed + hashlib.sha256(packed).digest()


def read_record(data: bytes) -> tuple[Publication, bytes]:
    """The publication and its document. Raises `FormatError` for bytes that are no whole record."""
    packed, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    if len(data) <= DIGEST_BYTES or hashlib.sha256(packed).digest() != digest:
        raise FormatError(_PLACE, f"{len(data)} bytes do not end in the sha256 of what comes before")
    fields = unpack(packed, _PLACE)
    publication = Publication(
        key=SessionKey(_field(fields, "tenant", str), _field(fields, "session", str)),
        order=Order(Epoch(_number(fields, "incarnation"), _number(fields, "counter")), _number(fields, "sequence")),
        published=_field(fields, "published", float),
        checkpoints=tuple(_read_checkpoint(item) for item in cast(list[object], _field(fields, "checkpoints", list))),
    )
    try:
        check_checkpoints(publication.checkpoints)
    except StateError as error:
        raise FormatError(_PLACE, str(error)) from error
    return publication, _field(fields, "document", bytes)


def _read_checkpoint(item: object) -> StoredCheckpoint:
    if not isinstance(item, dict):
        raise FormatError(_PLACE, "a checkpoint is not a map")
    fields = cast(dict[str, Any], item)
    packed = _field(fields, "segments", bytes)
    if len(packed) % _SEGMENT.size:
        raise FormatError(_PLACE, f"segments of {len(packed)} bytes are no multiple of {_SEGMENT.size}")
    ancestor = fields.get("ancestor")
    if ancestor is not None and not isinstance(ancestor, str):
        raise FormatError(_PLACE, f"ancestor is {ancestor!r}, must be text or absent")
    return StoredCheckpoint(
        id=_field(fields, "id", str),
        ancestor=ancestor,
        seconds=_field(fields, "seconds", float),
        segments=tuple(StoredSegment(sha256, size) for sha256, size in _SEGMENT.iter_unpack(packed)),
    )


def _number(fields: dict[str, Any], name: str) -> int:
    value = _field(fields, name, int)
    if not 0 <= value <= LARGEST:
        raise FormatError(_PLACE, f"{name} is {value}, must be from 0 to 2^53")
    return value


def _field(fields: dict[str, Any], name: str, kind: type[_T]) -> _T:
    value = fields.get(name)
    if type(value) is not kind:
        raise FormatError(_PLACE, f"{name} is {type(value).__name__}, must be {kind.__name__}")
    return value
