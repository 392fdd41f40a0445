"""From a tower's items to what a turn carries of its media, and back; and where they stand in its prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from model.media import MediaItem
from model.placeholders import MediaSpan, find_spans
from model.vision_config import VisionConfig
from state.media import Media, Placed, PlacedMedia, frames


def media_of(item: MediaItem) -> Media:
    """The item as plain data, which messages, documents and logs can carry."""
    n, channels, height, width = item.pixels.shape
    return Media(
        kind=item.kind,
        digest=item.digest,
        shape=(n, channels, height, width),
        rows=item.rows,
        columns=item.columns,
        times=item.times,
        pixels=item.pixels.contiguous().numpy().tobytes(),
    )


def item_of(media: Media) -> MediaItem:
    # The tower copies the pixels before it does anything with them: nobody writes into these bytes.
    pixels = torch.frombuffer(bytearray(media.pixels), dtype=torch.uint8).view(media.shape)
    return MediaItem(media.kind, pixels, media.frames, media.rows, media.columns, media.times, media.digest)


def placed(ids: Sequence[int], items: Sequence[MediaItem], config: VisionConfig, after: int = 0) -> Placed:
    """Where `items` stand among `ids`, which follow `after` other tokens. Raises MediaError if they do not match."""
    starts: list[list[int]] = [[] for _ in items]
    for span in find_spans(ids, items, config):
        starts[span.item].append(after + span.start)
    return tuple(PlacedMedia(media_of(item), tuple(begin)) for item, begin in zip(items, starts, strict=True))


def spans_of(placed: Placed) -> tuple[MediaSpan, ...]:
    """As the model's functions take them."""
    return tuple(MediaSpan(f.start, f.rows, f.columns, f.item, f.offset) for f in frames(placed))
