"""What are a log record's bytes?

    version u8 | kind u8 | incarnation u64 | counter u64 | sequence u64 | msgpack map | crc32 u32      (big-endian)

The head lies in the open, so that a store orders records without reading what they say. The CRC covers all before it.
Token ids are unsigned 32-bit numbers, little-endian.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any, get_args

import numpy as np

from deployment.engine.commands import TokenLogprob
from deployment.engine.events import FinishReason
from deployment.ownership.log import (
    Deleted,
    HeadMoved,
    Numbered,
    Record,
    Round,
    Sealed,
    SetNamed,
    TurnBegan,
    TurnEnded,
)
from deployment.ownership.words import Member
from state.errors import FormatError
from state.fields import Fields
from state.media import PlacedMedia
from state.media_manifest import PLACED_FIELDS, parse_placed, placed_fields
from state.names import LARGEST, Epoch, Order
from state.strict_msgpack import pack, unpack

VERSION = 1

_HEAD = struct.Struct(">BBQQQ")
_CRC = struct.Struct(">I")
_PLACE = "log record"
_MOST_IDS = 1 << 24
_LONGEST_TEXT = 1 << 16
_KINDS: tuple[type[Record], ...] = (Sealed, SetNamed, TurnBegan, Round, TurnEnded, HeadMoved, Deleted)
"""A kind's number is its place here. New ones come last."""
_CODE_OF = {kind: code for code, kind in enumerate(_KINDS)}


@dataclass(frozen=True)
class Head:
    """What a store looks at."""

    kind: type[Record]
    order: Order

    @property
    def numbered(self) -> bool:
        return self.kind in get_args(Numbered)


def encode(record: Record) -> bytes:
    """Raises `FormatError` for what cannot be encoded, naming it."""
    order = record.order
    numbers = (order.epoch.incarnation, order.epoch.counter, order.sequence)
    if not all(0 <= number <= LARGEST for number in numbers):
        raise FormatError(_PLACE, f"order is {order}, its numbers must be from 0 to 2^53")
    head = _HEAD.pack(VERSION, _CODE_OF[type(record)], *numbers)
    data = head + pack(_body(record), f"{_PLACE} {type(record).__name__}")
    return data + _CRC.pack(zlib.crc32(data))


def read_head(data: bytes) -> Head:
    """Kind and order of a record whose CRC somebody has checked. Raises `FormatError`."""
    if len(data) < _HEAD.size + _CRC.size:
        raise FormatError(_PLACE, f"has {len(data)} bytes, the shortest has {_HEAD.size + _CRC.size}")
    version, code, incarnation, counter, sequence = _HEAD.unpack_from(data)
    if version != VERSION:
        raise FormatError(_PLACE, f"version is {version}, must be {VERSION}")
    if code >= len(_KINDS):
        raise FormatError(_PLACE, f"kind is {code}, must be below {len(_KINDS)}")
    return Head(_KINDS[code], Order(Epoch(incarnation, counter), sequence))


def check(data: bytes) -> Head:
    """The same of bytes that nobody vouches for."""
    head = read_head(data)
    if zlib.crc32(data[: -_CRC.size]) != _CRC.unpack_from(data, len(data) - _CRC.size)[0]:
        raise FormatError(_PLACE, f"at order {head.order}: the CRC does not fit its {len(data)} bytes")
    return head


def decode(data: bytes) -> Record:
    """Raises `FormatError` naming the field."""
    head = check(data)
    place = f"{_PLACE} {head.kind.__name__}"
    fields = Fields(unpack(data[_HEAD.size : -_CRC.size], place), place)
    record = _READERS[head.kind](head.order, fields)
    fields.allow_only(_body(record))
    return record


def _body(record: Record) -> dict[str, Any]:
    """The record's fields as plain data, without its order."""
    body: dict[str, Any] = {name: value for name, value in vars(record).items() if name != "order"}
    for name in ("prompt_ids", "token_ids"):
        if name in body:
            body[name] = _ids(body[name])
    if isinstance(record, TurnBegan):
        body["media"] = [placed_fields(one) | {"pixels": one.media.pixels or None} for one in record.media]
        if not record.media:
            del body["media"]  # as in records that were written before there were any
    if isinstance(record, SetNamed):
        body["members"] = [{"node": member.node, "incarnation": member.incarnation} for member in record.members]
        if not record.alone:
            del body["alone"]  # as in records that were written before there was any
    if isinstance(record, Round) and record.logprobs is not None:
        body["logprobs"] = [
            {"token": entry.token, "logprob": entry.logprob, "top": [list(pair) for pair in entry.top]}
            for entry in record.logprobs
        ]
    return body


def _ids(token_ids: tuple[int, ...]) -> bytes:
    try:
        return np.array(token_ids, dtype="<u4").tobytes()
    except OverflowError:
        raise FormatError(_PLACE, f"token ids {token_ids!r} must be from 0 to 2^32 - 1") from None


def _read_ids(fields: Fields, name: str) -> tuple[int, ...]:
    return tuple(fields.words(name, _MOST_IDS).tolist())


def _read_flag(fields: Fields, name: str) -> bool:
    value = fields.raw(name)
    if type(value) is not bool:
        raise fields.refuse(name, "true or false")
    return value


def _read_began(order: Order, fields: Fields) -> TurnBegan:
    return TurnBegan(
        order,
        turn=fields.text("turn", 128),
        request=fields.plain("request"),
        request_sha256=fields.octets("request_sha256", 32),
        seed=fields.whole("seed", 0, 1 << 64),
        idempotency_key=fields.optional_text("idempotency_key", _LONGEST_TEXT),
        prompt_ids=_read_ids(fields, "prompt_ids"),
        stable_boundary=fields.whole("stable_boundary"),
        at=fields.number("at", "seconds since 1970"),
        media=tuple(map(_read_media, fields.children("media"))) if "media" in fields.values else (),
    )


def _read_media(fields: Fields) -> PlacedMedia:
    fields.allow_only((*PLACED_FIELDS, "pixels"))
    placed = parse_placed(fields)
    if fields.raw("pixels") is None:
        return placed
    pixels = fields.octets("pixels", prod(placed.media.shape))
    return replace(placed, media=replace(placed.media, pixels=pixels))


def _read_round(order: Order, fields: Fields) -> Round:
    return Round(
        order,
        turn=fields.text("turn", 128),
        choice=fields.whole("choice"),
        start=fields.whole("start"),
        token_ids=_read_ids(fields, "token_ids"),
        held_back=fields.whole("held_back"),
        accepted=fields.optional_whole("accepted"),
        logprobs=None if fields.raw("logprobs") is None else tuple(map(_read_logprob, fields.children("logprobs"))),
    )


def _read_logprob(fields: Fields) -> TokenLogprob:
    top = fields.raw("top")
    if not isinstance(top, list):
        raise fields.refuse("top", "a list of [token, log-probability]")
    pairs: list[tuple[int, float]] = []
    for pair in top:
        if not (isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int and type(pair[1]) is float):
            raise fields.refuse("top", "a list of [token, log-probability]")
        pairs.append((pair[0], pair[1]))
    logprob = fields.raw("logprob")
    if type(logprob) is not float:
        raise fields.refuse("logprob", "a log-probability")
    return TokenLogprob(fields.whole("token"), logprob, tuple(pairs))


def _read_ended(order: Order, fields: Fields) -> TurnEnded:
    reason = fields.one_of("finish_reason", get_args(FinishReason))
    return TurnEnded(
        order,
        turn=fields.text("turn", 128),
        choice=fields.whole("choice"),
        finish_reason=reason,  # pyright: ignore[reportArgumentType]  # one_of has just checked it
        published=fields.whole("published"),
        stop_id=fields.optional_whole("stop_id"),
        stop_string=fields.optional_text("stop_string", _LONGEST_TEXT),
        text_cut=fields.whole("text_cut"),
        at=fields.number("at", "seconds since 1970"),
    )


def _read_set(order: Order, fields: Fields) -> SetNamed:
    members = tuple(
        Member(child.text("node", 256), child.hex_id("incarnation")) for child in fields.children("members", 16)
    )
    alone = _read_flag(fields, "alone") if "alone" in fields.values else False
    return SetNamed(order, members, fields.text("owner", 256), alone)


_READERS: dict[type[Record], Callable[[Order, Fields], Record]] = {
    Sealed: lambda order, fields: Sealed(order, _read_flag(fields, "anew")),
    SetNamed: _read_set,
    TurnBegan: _read_began,
    Round: _read_round,
    TurnEnded: _read_ended,
    HeadMoved: lambda order, fields: HeadMoved(order, fields.optional_text("turn", 128), fields.whole("length")),
    Deleted: lambda order, fields: Deleted(order, fields.number("at", "seconds since 1970")),
}
