"""What does a GIF say of itself? Its blocks are walked, no picture is decoded.

Frames may lie outside the screen that the header names; a decoder then enlarges the screen, and takes memory for it
before anybody is asked. And how long an animation takes is known here at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from model.errors import MediaError

DEFAULT_SECONDS = 0.1
"""What browsers show a frame for that says 0."""

_EXTENSION, _IMAGE, _END = 0x21, 0x2C, 0x3B
_GRAPHIC_CONTROL, _COMMENT = 0xF9, 0xFE


@dataclass(frozen=True)
class GifFacts:
    """`width`, `height`: of the screen and all frames together."""

    width: int
    height: int
    frames: int
    seconds: float


def walked(data: bytes) -> GifFacts:
    """Raises MediaError for blocks that are none, and for those that decoders read in other ways than this."""
    if len(data) < 13:
        raise MediaError("is cut off")
    width, height = _word(data, 6), _word(data, 8)
    place = 13 + _palette(data[10])
    frames, seconds, shown = 0, 0.0, 0.0
    while place < len(data) and (kind := data[place]) != _END:
        if kind not in (_EXTENSION, _IMAGE):
            _damaged(place)
        if place + 10 > len(data):
            raise MediaError("is cut off")
        if kind == _EXTENSION:
            _check_extension(data, place)
            if data[place + 1] == _GRAPHIC_CONTROL:
                shown = _word(data, place + 4) / 100
            place = _after_blocks(data, place + 2)
        else:
            left, top, wide, high = (_word(data, place + 1 + 2 * i) for i in range(4))
            width, height = max(width, left + wide), max(height, top + high)
            frames, seconds, shown = frames + 1, seconds + (shown or DEFAULT_SECONDS), 0.0
            place = _after_blocks(data, place + 10 + _palette(data[place + 9]) + 1)
    return GifFacts(width, height, frames, seconds)


def _check_extension(data: bytes, place: int) -> None:
    """One without content has some decoders take what follows for it, so that they would see other frames than this."""
    label, length = data[place + 1], data[place + 2]
    loop = data[place + 3 : place + 14] == b"NETSCAPE2.0" and data[place + 14 : place + 15] == b"\0"
    if (length == 0 and label != _COMMENT) or loop or (label == _GRAPHIC_CONTROL and length != 4):
        _damaged(place)


def _damaged(place: int) -> NoReturn:
    raise MediaError(f"is damaged: byte {place} begins no block of a GIF")


def _word(data: bytes, place: int) -> int:
    return int.from_bytes(data[place : place + 2], "little")


def _palette(flags: int) -> int:
    """Bytes of the colour table that these flags announce."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _after_blocks(data: bytes, place: int) -> int:
    """Sub-blocks have a length each, and end with one of 0."""
    while place < len(data) and data[place]:
        place += 1 + data[place]
    if place >= len(data):
        raise MediaError("is cut off")
    return place + 1
