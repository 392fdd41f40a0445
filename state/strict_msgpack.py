"""How is msgpack read from bytes that nobody vouches for? Scanned first, so that no claim is believed unread.

The library allocates a container as large as its header claims before it has seen the elements; nested claims
multiply. The scan walks the bytes without building anything, so what the library then builds is bounded by what is
really there.
"""

# msgpack ships no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
import struct
from collections import Counter
from typing import Any, cast

import msgpack

from state.errors import FormatError

MAX_DEPTH = 64
MAX_VALUES = 1 << 21

_FIXED_SIZES = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_SHORT = [
    0 if tag < 0x80 or tag >= 0xE0 or tag in (0xC0, 0xC2, 0xC3) else tag & 0x1F if 0xA0 <= tag < 0xC0 else None
    for tag in range(256)
]
"""Bytes behind a tag that says all of its value's length: small integers, nil, false, true, and short text."""
_BYTE_LENGTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}  # bin 8, 16, 32; str 8, 16, 32
_CONTAINER_LENGTHS = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}  # array 16, 32; map 16, 32
_EXT_TAGS = {0xC7, 0xC8, 0xC9, 0xD4, 0xD5, 0xD6, 0xD7, 0xD8}


def pack(value: dict[str, Any], place: str) -> bytes:
    """Encodes a map of None, bool, int, float, str, bytes, list and dict with str keys.

    Raises `FormatError` naming the element that is something else, or that `unpack` would refuse.
    """
    _check_plain(value, place, 1)
    try:
        data = cast(bytes, msgpack.packb(value, use_bin_type=True))
    except ValueError as error:
        raise FormatError(place, f"cannot be encoded: {error}") from error
    _scan(data, place)
    return data


def unpack(data: bytes, place: str) -> dict[str, Any]:
    """Decodes one map. Raises `FormatError`.

    Refused: ext types (timestamps too), duplicate keys, keys that are not text, floats that are not finite, text that
    is not UTF-8, more than `MAX_DEPTH` levels or `MAX_VALUES` values, and bytes after the map.
    """
    _scan(data, place)

    def build_map(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        built = dict(pairs)
        for key in built:
            if type(key) is not str:
                raise FormatError(place, f"a map has the key {key!r}, keys must be text")
        if len(built) < len(pairs):
            counted = Counter(key for key, _ in pairs)
            raise FormatError(place, f"a map has the key {counted.most_common(1)[0][0]!r} twice")
        return built

    try:
        value = cast(object, msgpack.unpackb(data, raw=False, strict_map_key=True, object_pairs_hook=build_map))
    except FormatError:
        raise
    except (ValueError, TypeError) as error:  # msgpack's own errors and UnicodeDecodeError are ValueErrors
        raise FormatError(place, f"is not msgpack: {error}") from error
    if not isinstance(value, dict):
        raise FormatError(place, f"is a {type(value).__name__}, must be a map")
    return cast(dict[str, Any], value)


def _scan(data: bytes, place: str) -> None:
    end = len(data)
    position = 0
    values = 0
    outer: list[int] = []
    left = 1  # values still to come at this level, and at those around it
    while left or outer:
        if not left:
            left = outer.pop()
            continue
        left -= 1
        values += 1
        if values > MAX_VALUES:
            raise FormatError(place, f"has more than {MAX_VALUES} values")
        if position >= end:
            raise FormatError(place, f"ends at byte {position}, in the middle of a value")
        tag = data[position]
        position += 1
        size, children = _SHORT[tag], 0
        if size is not None:
            pass
        elif tag < 0x90:
            size, children = 0, 2 * (tag & 0x0F)
        elif tag < 0xA0:
            size, children = 0, tag & 0x0F
        elif tag in _FIXED_SIZES:
            size = _FIXED_SIZES[tag]
            if tag in (0xCA, 0xCB) and position + size <= end:
                number: float = struct.unpack_from(">f" if tag == 0xCA else ">d", data, position)[0]
                if not math.isfinite(number):
                    raise FormatError(place, f"holds the number {number} at byte {position - 1}, must be finite")
        elif tag in _BYTE_LENGTHS or tag in _CONTAINER_LENGTHS:
            width = _BYTE_LENGTHS.get(tag) or _CONTAINER_LENGTHS[tag]
            claimed = int.from_bytes(data[position : position + width], "big")
            position += width
            size = claimed if tag in _BYTE_LENGTHS else 0
            children = 0 if tag in _BYTE_LENGTHS else claimed * (2 if tag >= 0xDE else 1)
        elif tag in _EXT_TAGS:
            raise FormatError(place, f"holds an ext type at byte {position - 1}, which is not allowed")
        else:
            raise FormatError(place, f"holds the byte 0x{tag:02x} at {position - 1}, which msgpack never uses")
        position += size
        if position + children > end:
            raise FormatError(place, f"claims to go on beyond its {end} bytes")
        if children:
            if len(outer) + 1 >= MAX_DEPTH:
                raise FormatError(place, f"is nested deeper than {MAX_DEPTH} levels")
            outer.append(left)
            left = children
    if position != end:
        raise FormatError(place, f"has {end - position} bytes after its end")


def _check_plain(value: object, place: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise FormatError(place, f"is nested deeper than {MAX_DEPTH} levels")
    kind = type(value)
    if kind is dict:
        for key, element in cast(dict[object, object], value).items():
            if type(key) is not str:
                raise FormatError(place, f"has the key {key!r}, keys must be text")
            _check_plain(element, f"{place}.{key}", depth + 1)
    elif kind is list:
        for index, element in enumerate(cast(list[object], value)):
            _check_plain(element, f"{place}[{index}]", depth + 1)
    elif kind is float:
        if not math.isfinite(cast(float, value)):
            raise FormatError(place, f"is {value}, must be finite")
    elif kind is int:
        if not -(1 << 63) <= cast(int, value) < 1 << 64:
            raise FormatError(place, f"is {value}, must fit 64 bits")
    elif kind is str:
        try:
            cast(str, value).encode()
        except UnicodeEncodeError as error:
            raise FormatError(place, f"is text that UTF-8 cannot hold: {error.reason}") from error
    elif value is not None and kind not in (bool, bytes):
        allowed = "None, bool, int, float, str, bytes, list or dict"
        raise FormatError(place, f"is a {kind.__name__}, must be {allowed}")
