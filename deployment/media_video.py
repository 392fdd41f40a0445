"""Videos in MP4, QuickTime, WebM and Matroska, by PyAV: the one file that knows it.

Frames are those of transformers' processor: counted over the file, RGB by FFmpeg's own conversion. They are turned as
the file says, which that processor leaves to its caller.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np

from deployment.media import Deadline, EndsEarly, Video, check_size
from deployment.media_limits import MAX_FRAME_PIXELS, MediaLimits
from deployment.mp4_tables import check_tables, pictures_alone
from model.errors import MediaError

# Named, so that no other demuxer is tried: some of them are playlists, and open what a file tells them to.
_DEMUXERS = {"MP4": "mov", "Matroska": "matroska"}


def open_container(data: bytes, kind: Literal["MP4", "Matroska"], limits: MediaLimits, deadline: Deadline) -> Video:
    """Reads the container and no frame. Raises MediaError: also where PyAV is not installed."""
    if kind == "MP4":
        data = pictures_alone(data)
        check_tables(data, limits)
    with _opened(data, kind) as (container, stream):
        width, height = stream.codec_context.width, stream.codec_context.height
        if not width or not height:
            raise MediaError(f"has frames of more than {MAX_FRAME_PIXELS} pixels, or none that can be read")
        check_size(width, height, MAX_FRAME_PIXELS)
        fps = float(stream.average_rate or stream.guessed_rate or 0)
        total = 0
        for packet in container.demux(stream):
            total += bool(packet.size) and not packet.is_discard
            if total > limits.frames:
                raise MediaError(f"has more than {limits.frames} frames")
    if not total or fps <= 0:
        raise MediaError(f"has {total} frames at {fps:g} a second; a video has some of them")
    if total / fps > limits.seconds:
        raise MediaError(f"takes {total / fps:.1f} s; at most {limits.seconds:g} are taken")
    return Video(total, fps, lambda numbers: _frames(data, kind, numbers, deadline))


def _frames(data: bytes, kind: str, numbers: Sequence[int], deadline: Deadline) -> Iterator[np.ndarray]:
    wanted, last, seen = set(numbers), max(numbers), 0
    with _opened(data, kind) as (container, stream):
        for frame in container.decode(stream):
            deadline.check()
            if seen in wanted:
                check_size(frame.width, frame.height, MAX_FRAME_PIXELS)
                yield np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))
            seen += 1
            if seen > last:
                return
    raise EndsEarly(seen)


@contextmanager
def _opened(data: bytes, kind: str) -> Iterator[tuple[Any, Any]]:
    """The container and its first video stream."""
    try:
        import av
    except ImportError:
        raise MediaError(
            "is a video file, for which this server lacks its extra 'video' (pip install 'dflash-serve[video]'); an"
            " animated GIF, WebP or PNG needs none"
        ) from None
    # FFmpeg itself refuses frames above max_pixels: while it looks for a stream's format, and when it decodes.
    options = {"max_pixels": str(MAX_FRAME_PIXELS)}
    try:
        with av.open(io.BytesIO(data), "r", format=_DEMUXERS[kind], options=options) as container:
            if not container.streams.video:
                raise MediaError("has no video stream")
            stream = container.streams.video[0]
            stream.codec_context.options = options
            yield container, stream
    except MediaError:
        raise
    except Exception as error:  # as of images; FFmpeg's MemoryError is about sizes that the file claims
        raise MediaError(f"is damaged or cut off: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or type(error).__name__
