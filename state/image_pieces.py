"""Parts of an image's segment, as they are asked for and handed on. Nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass

from state.container import Blob


@dataclass(frozen=True)
class ImagePart:
    """The first `size` bytes of the segment of the image of the checkpoint of that serial."""

    checkpoint: int
    size: int


@dataclass(frozen=True)
class ImagePiece:
    """Bytes of the segment of a checkpoint's image from `offset` on. `checkpoint`: its serial; `sha256`: the segment's,
    of its last piece."""

    checkpoint: int
    offset: int
    data: Blob
    sha256: bytes | None
