"""How does a session document say which media stand in its tokens? The manifest's part about them; the pixels are
segments, since they are large and the same in every turn. See `state/FORMAT.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, cast, get_args

import numpy as np

from state.errors import FormatError
from state.fields import LARGEST, Fields, Tokens
from state.media import Media, MediaKind, Placed, PlacedMedia, begun, frames, without_pixels

PLACED_FIELDS = ("kind", "digest", "shape", "grid", "times", "starts")
_TENSOR = "pixels"
MEDIA_LIMIT = 1 << 16
"""Media of one row of tokens."""


@dataclass(frozen=True)
class MediaEntry:
    """A `PlacedMedia` whose pixels are in the segment of that index."""

    placed: PlacedMedia
    segment: int

    @property
    def layout(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {_TENSOR: ("U8", self.placed.media.shape)}

    @property
    def data_bytes(self) -> int:
        return prod(self.placed.media.shape)


def bare(entries: Sequence[MediaEntry]) -> Placed:
    """Where and what they are, without pixels."""
    return tuple(entry.placed for entry in entries)


def media_entries(placed: Placed, index: Callable[[Media], int]) -> tuple[MediaEntry, ...]:
    """`index`: the place of an item's pixels in the segment table."""
    return tuple(MediaEntry(without_pixels(one), index(one.media)) for one in placed)


def media_fields(entries: Sequence[MediaEntry]) -> list[dict[str, Any]]:
    return [placed_fields(entry.placed) | {"segment": entry.segment} for entry in entries]


def placed_fields(placed: PlacedMedia) -> dict[str, Any]:
    """Everything but the pixels, as plain data."""
    media = placed.media
    return {
        "kind": media.kind,
        "digest": bytes.fromhex(media.digest),
        "shape": list(media.shape),
        "grid": [media.rows, media.columns],
        "times": list(media.times),
        "starts": np.asarray(placed.starts, dtype="<u4").tobytes(),
    }


def parse_media(root: Fields, name: str) -> tuple[MediaEntry, ...]:
    """Raises `FormatError` for an entry that no image or video could have."""
    return tuple(map(_parse_entry, root.children(name, MEDIA_LIMIT)))


def parse_placed(entry: Fields) -> PlacedMedia:
    """The way back from `placed_fields`; without pixels. Raises `FormatError`."""
    kind = next(known for known in get_args(MediaKind) if known == entry.one_of("kind", get_args(MediaKind)))
    shape = entry.wholes("shape", 4)
    rows, columns = entry.wholes("grid", 2)
    count, channels, height, width = shape
    if channels != 3 or prod(shape) == 0 or prod(shape) >= LARGEST:
        raise entry.refuse("shape", "[frames, 3, height, width], none of them 0")
    side = height // rows if rows else 0
    if not side or (height, width) != (side * rows, side * columns):
        raise entry.refuse("grid", f"[rows, columns] of equal squares in {height} x {width} pixels")
    times = entry.numbers("times")
    if (kind == "image" and (times or count != 1)) or (kind == "video" and not 1 <= len(times) <= count):
        raise entry.refuse("times", "none for an image, which has one frame; for a video one to as many as its frames")
    starts = tuple(cast(list[int], entry.words("starts", max(1, len(times))).tolist()))
    if not starts or any(one >= other for one, other in pairwise(starts)):
        raise entry.refuse("starts", "ascending ordinals, at least one")
    digest = entry.octets("digest", 32).hex()
    return PlacedMedia(Media(kind, digest, (count, channels, height, width), rows, columns, times, b""), starts)


def check_places(place: str, media: Placed, tokens: Tokens) -> None:
    """Raises `FormatError` unless each frame stands among `tokens`, behind the one before it, on equal ids."""
    free = 0
    for frame in frames(media):
        if not free <= frame.start < len(tokens):
            problem = f"has {frame.start}, must be from {free} to {len(tokens) - 1}"
            raise FormatError(f"{place}[{frame.item}].starts", problem)
        ids = tokens[frame.start : frame.stop]
        if (ids != ids[0]).any():
            raise FormatError(f"{place}[{frame.item}].starts", f"has {frame.start}, where different tokens stand")
        free = frame.stop


def shown(entries: Sequence[MediaEntry], shared: int, own: Sequence[MediaEntry], tokens: int) -> tuple[MediaEntry, ...]:
    """What a checkpoint's ledger of so many tokens shows: of the session's `entries` those that begin among the tokens
    that it shares with it, then its own."""
    found = (entry for entry in entries if entry.placed.start < shared)
    cut = (MediaEntry(one, entry.segment) for entry in found for one in begun((entry.placed,), tokens))
    return (*cut, *own)


def _parse_entry(entry: Fields) -> MediaEntry:
    entry.allow_only((*PLACED_FIELDS, "segment"))
    return MediaEntry(parse_placed(entry), entry.whole("segment"))
