"""Images, and animations as videos: from a file's bytes to uint8 [H, W, 3], within limits.

Pixels are those of transformers' processors: upright by the EXIF orientation, transparency over white, then RGB.
Decoding takes at most `BYTES_A_PIXEL` for each pixel of the image beside its file. Nothing here has to do with a model.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from deployment.gif_blocks import DEFAULT_SECONDS, walked
from deployment.media_formats import MOVING, STILL, Format, format_of, listed, webp_size
from deployment.media_limits import DECODE_SECONDS, MAX_FRAME_PIXELS, MAX_SIDE, MediaLimits
from model.errors import MediaError

_ROWS = 64
"""How many rows are made RGB at a time: what lies between the decoder's mode and RGB is small then."""


@dataclass(frozen=True)
class Video:
    """`total` frames, `fps` a second. `frames` decodes those with the given ascending numbers, uint8 [H, W, 3] each, as
    they are asked for; it raises MediaError, `EndsEarly` if there are fewer than `total`."""

    total: int
    fps: float
    frames: Callable[[Sequence[int]], Iterator[np.ndarray]]


class EndsEarly(MediaError):
    """A video has fewer frames than its container lists."""

    def __init__(self, frames: int) -> None:
        super().__init__(f"ends after {frames} frames, before those that its container lists")
        self.frames = frames


def decode_image(data: bytes, limits: MediaLimits) -> np.ndarray:
    """uint8 [H, W, 3]; of an animation the first frame. Raises MediaError."""
    kind = format_of(data)
    if kind not in STILL:
        raise MediaError(f"is {kind}, which is no image; it must be {listed(STILL)}")
    with _opened(data, kind, limits.pixels) as image:
        image.load()
        _turn_upright(image)
        return _rgb(image)


def open_video(data: bytes, limits: MediaLimits, deadline: Deadline) -> Video:
    """A video file, or an animated GIF, WebP or PNG. Raises MediaError: also where a file's decoder is missing."""
    kind = format_of(data)
    if kind not in MOVING:
        raise MediaError(f"is {kind}, which is no video; it must be {listed(MOVING)}")
    if kind in ("MP4", "Matroska"):
        from deployment.media_video import open_container

        return open_container(data, kind, limits, deadline)
    total = _count(data, kind)
    if total < 2:
        raise MediaError(f"is a {kind} of one frame, which is an image; send it as one")
    if total > limits.frames:
        raise MediaError(f"has {total} frames; at most {limits.frames} are taken")
    seconds = walked(data).seconds if kind == "GIF" else _seconds(data, kind, total, deadline)
    if seconds > limits.seconds:
        raise MediaError(f"takes {seconds:.1f} s; at most {limits.seconds:g} are taken")
    return Video(total, total / seconds, lambda numbers: _frames(data, kind, numbers, deadline))


def check_size(width: int, height: int, pixels: int) -> None:
    """Raises MediaError for more pixels, or a longer side, than may be decoded."""
    if width < 1 or height < 1:
        raise MediaError(f"has {width} x {height} pixels; it must have at least one")
    if max(width, height) > MAX_SIDE:
        raise MediaError(f"has {width} x {height} pixels; no side may have more than {MAX_SIDE}")
    if width * height > pixels:
        raise MediaError(f"has {width} x {height} pixels; at most {pixels} in all are taken")


class Deadline:
    """Of decoding the media of one request, from now on."""

    def __init__(self, seconds: float = DECODE_SECONDS) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    def check(self) -> None:
        """Raises MediaError once it is over."""
        if time.monotonic() > self._end:
            raise MediaError(f"with the media before it takes more than {self._seconds:g} s to decode")


# ------------------------------------------------------------------------------------------------ pillow


@contextmanager
def _opened(data: bytes, kind: Format, pixels: int) -> Iterator[Image.Image]:
    """The image, of which the header alone has been read. Raises MediaError, for what its decoder says inside too."""
    if (size := _claimed(data, kind)) is not None:
        check_size(*size, pixels)
    try:
        with Image.open(io.BytesIO(data), formats=(kind.upper(),)) as image:
            check_size(*image.size, pixels)
            yield image
    except (MediaError, MemoryError):
        raise
    except Image.DecompressionBombError:
        raise MediaError(f"has far more than {pixels} pixels") from None
    except UnidentifiedImageError:
        raise MediaError(f"begins as {kind}, but is none") from None
    except Exception as error:  # foreign bytes make decoders fail in any way
        raise MediaError(f"is damaged or cut off: {str(error) or type(error).__name__}") from None


def _claimed(data: bytes, kind: Format) -> tuple[int, int] | None:
    """The size of an image whose decoder takes memory for it as soon as it is made."""
    if kind == "GIF":
        facts = walked(data)
        return facts.width, facts.height
    return webp_size(data) if kind == "WebP" else None


def _turn_upright(image: Image.Image) -> None:
    try:
        ImageOps.exif_transpose(image, in_place=True)
    except MemoryError:
        raise
    except Exception:  # a camera's notes that nobody can read do not make its picture unreadable
        return


def _rgb(image: Image.Image) -> np.ndarray:
    width, height = image.size
    over_white = "A" in image.getbands() or image.info.get("transparency") is not None
    pixels = np.empty((height, width, 3), np.uint8)
    for top in range(0, height, _ROWS):
        rows = image.crop((0, top, width, min(height, top + _ROWS)))
        if over_white:
            rows = Image.alpha_composite(Image.new("RGBA", rows.size, (255, 255, 255, 255)), rows.convert("RGBA"))
        pixels[top : top + _ROWS] = np.asarray(rows.convert("RGB"))
    return pixels


def _count(data: bytes, kind: Format) -> int:
    with _opened(data, kind, MAX_FRAME_PIXELS) as image:
        return getattr(image, "n_frames", 1)


def _seconds(data: bytes, kind: Format, total: int, deadline: Deadline) -> float:
    milliseconds = 0.0
    with _opened(data, kind, MAX_FRAME_PIXELS) as image:
        for number in range(total):
            deadline.check()
            image.seek(number)
            image.load()
            milliseconds += float(image.info.get("duration") or 0) or 1000 * DEFAULT_SECONDS
    return milliseconds / 1000


def _frames(data: bytes, kind: Format, numbers: Sequence[int], deadline: Deadline) -> Iterator[np.ndarray]:
    """Every frame is composed from those before."""
    wanted = set(numbers)
    with _opened(data, kind, MAX_FRAME_PIXELS) as image:
        for number in range(max(numbers) + 1):
            deadline.check()
            image.seek(number)
            image.load()
            if number in wanted:
                yield _rgb(image)
