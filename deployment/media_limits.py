"""How much may the media of one request be? Every limit is checked before the memory is spent that it is about."""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_SIDE = 16_384
"""Pixels of a side: no picture that people take or draw has more, and WebP ends there."""

MAX_FRAME_PIXELS = 4096 * 2304
"""Of one frame of a video. A decoder holds up to 16 of them, and more of its own."""

MAX_SAMPLES = 1 << 19
"""What a video file may claim beyond `MediaLimits.frames`: other tracks of pictures, and fragments. FFmpeg takes about
36 bytes for each."""

DECODE_SECONDS = 60.0
"""A small file can hold work for hours: the media of one request together get no more than that."""

BYTES_A_PIXEL = 16
"""What decoding an image takes at most, beside its file: a decoder's own planes, what it leaves, and RGB."""


@dataclass(frozen=True)
class MediaLimits:
    """`items`: images and videos of a request. `item_bytes`, `total_bytes`: of one, and of all of a request, as files.
    `pixels`: of an image. `frames`, `seconds`: of a video, or of an animation that is sent as one.
    `hosts`: from where http(s) URLs are fetched, as `example.org`, `example.org:8443` or `*.example.org`; none: from
    nowhere."""

    items: int = 32
    item_bytes: int = 20 << 20
    total_bytes: int = 64 << 20
    pixels: int = 50_000_000
    frames: int = 36_000
    seconds: float = 600.0
    hosts: tuple[str, ...] = ()


HOST_NAME = re.compile(r"[a-z0-9-]+(\.[a-z0-9-]+)*", re.IGNORECASE)
_HOST = re.compile(rf"(\*\.)?{HOST_NAME.pattern}(:[0-9]{{1,5}})?", re.IGNORECASE)


def check_host(host: str) -> None:
    """Raises ValueError for what is no entry of `hosts`."""
    if not _HOST.fullmatch(host):
        raise ValueError(f"{host!r} is no host; one is written as example.org, example.org:8443 or *.example.org")
