"""Which images and videos stand in a session's tokens, and where? They are part of it: a rebuild needs them again.

A frame's placeholders are `rows` * `columns` ids from its start on; an image has one frame, a video one for each of its
times, with text between them. Rotary positions behind a frame lag behind ordinals, by its placeholders less the longer
of its sides: the sum of that over all frames is the rope delta, never above 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

MediaKind = Literal["image", "video"]


@dataclass(frozen=True)
class Media:
    """An image or a video as a tower sees it.

    `pixels`: uint8 [frames, 3, height, width] of `shape`, resized. `rows`, `columns`: placeholders of a frame along
    each axis. `times`: seconds, one for each frame of placeholders of a video; none for an image. `digest`: 64 hex
    digits, the sha256 of kind, shape and pixels. Where pixels lie elsewhere, under that digest, there are none here.
    """

    kind: MediaKind
    digest: str
    shape: tuple[int, int, int, int]
    rows: int
    columns: int
    times: tuple[float, ...]
    pixels: bytes

    @property
    def frames(self) -> int:
        return max(1, len(self.times))


@dataclass(frozen=True)
class PlacedMedia:
    """`starts`: the ordinal of each frame's first placeholder, ascending; of tokens that end inside a video, those of
    the frames that have begun."""

    media: Media
    starts: tuple[int, ...]

    @property
    def start(self) -> int:
        return self.starts[0]


Placed = tuple[PlacedMedia, ...]
"""The media of a row of tokens, in their order."""


@dataclass(frozen=True)
class Frame:
    """Placeholders at ordinals [start, stop). They stand for the embeddings from `offset` on of item number `item`."""

    item: int
    start: int
    rows: int
    columns: int
    offset: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns


def media_digest(kind: MediaKind, shape: Sequence[int], pixels: bytes) -> str:
    """What `Media.digest` must be."""
    digest = hashlib.sha256(f"{kind} {tuple(shape)}".encode())
    digest.update(pixels)
    return digest.hexdigest()


def frames(placed: Placed) -> Iterator[Frame]:
    for item, one in enumerate(placed):
        rows, columns = one.media.rows, one.media.columns
        for number, start in enumerate(one.starts):
            yield Frame(item, start, rows, columns, number * rows * columns)


def begun(placed: Placed, stop: int) -> Placed:
    """What the first `stop` tokens show of the media: those that begin among them, each with its frames that do."""
    shown = (replace(one, starts=tuple(start for start in one.starts if start < stop)) for one in placed)
    return tuple(one for one in shown if one.starts)


def without_pixels(one: PlacedMedia) -> PlacedMedia:
    return replace(one, media=replace(one.media, pixels=b""))


def with_pixels(placed: Placed, known: Placed) -> Placed:
    """The same with the pixels of known media of equal digests where they are missing."""
    found = {one.media.digest: one.media.pixels for one in known}
    return tuple(
        one if one.media.pixels else replace(one, media=replace(one.media, pixels=found.get(one.media.digest, b"")))
        for one in placed
    )


def rope_delta(placed: Placed) -> int:
    """Rotary position minus ordinal of the text behind all of these media."""
    return sum(max(frame.rows, frame.columns) - frame.rows * frame.columns for frame in frames(placed))


def page_keys(placed: Placed) -> tuple[tuple[int, bytes], ...]:
    """(ordinal, key) of each frame, for `PrefixTree`: equal placeholders of different pictures differ by it."""
    keys: list[tuple[int, bytes]] = []
    for frame in frames(placed):
        shown = f"{placed[frame.item].media.digest} {frame.rows} {frame.columns} {frame.offset}"
        keys.append((frame.start, hashlib.sha256(shown.encode()).digest()))
    return tuple(keys)


def shared_tokens(left: Placed, right: Placed) -> int | None:
    """How many tokens two rows of equal tokens have in common, as far as their media go; None if these are equal."""
    for one, other in zip(left, right, strict=False):
        if one != other:
            return min(one.start, other.start)
    longer: Sequence[PlacedMedia] = max(left, right, key=len)[min(len(left), len(right)) :]
    return longer[0].start if longer else None
