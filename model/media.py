"""Images and videos as a tower sees them: resized uint8 pixels in a grid of patches.

    image [H, W, 3]           -> one frame, resized to multiples of patch * merge
    video frames n x [H, W, 3] -> n frames of one size; each `temporal_patch` of them make one row of the grid in time

An item is a pure function of decoded pixels and of the checkpoint's rules, and what the tower makes of it is a pure
function of the item: its digest stands for both.

Resizing is the bicubic, antialiased one of torch for uint8 on a CPU, which is what transformers' default processors
call; it is within two levels of pillow's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

from model.errors import MediaError
from model.media_rules import MediaRules

MediaKind = Literal["image", "video"]


@dataclass(frozen=True)
class MediaItem:
    """`pixels` uint8 [frames, 3, H, W]. `frames`, `rows`, `columns`: embeddings along each axis. `times`: seconds, one
    for each of a video's `frames`; none for an image. `digest`: sha256 of kind, shape and pixels."""

    kind: MediaKind
    pixels: torch.Tensor
    frames: int
    rows: int
    columns: int
    times: tuple[float, ...]
    digest: str

    @property
    def embeddings(self) -> int:
        """How many embeddings and placeholders it has."""
        return self.frames * self.rows * self.columns


def image_item(image: np.ndarray, rules: MediaRules) -> MediaItem:
    """`image` uint8 [H, W, 3]. Raises MediaError for another array or a shape that the rules refuse."""
    return _item("image", (image,), 1, (), rules)


def video_item(frames: Iterable[np.ndarray], indices: Sequence[int], fps: float, rules: MediaRules) -> MediaItem:
    """`frames` uint8 [H, W, 3] each, those that `rules.sampled_frames` chose: number `indices[i]` of a video of `fps`
    frames a second. Each is resized as it comes, so that no two need to be held as they were. Raises MediaError."""
    return _item("video", frames, len(indices), _times(indices, fps, rules.temporal_patch), rules)


def _times(indices: Sequence[int], fps: float, group: int) -> tuple[float, ...]:
    """Of each group of frames, the middle between its first and its last; the last frame fills the last group."""
    seconds = [index / fps for index in indices]
    seconds += seconds[-1:] * (-len(seconds) % group)
    return tuple((seconds[i] + seconds[i + group - 1]) / 2 for i in range(0, len(seconds), group))


def _item(
    kind: MediaKind, frames: Iterable[np.ndarray], count: int, times: tuple[float, ...], rules: MediaRules
) -> MediaItem:
    pixels: torch.Tensor | None = None
    shape: tuple[int, ...] = ()
    number = 0
    for number, frame in enumerate(frames, start=1):
        _check_pixels(frame, kind)
        if pixels is None:
            shape = frame.shape
            pixels = torch.empty(count, 3, *_size(kind, count, shape[0], shape[1], rules), dtype=torch.uint8)
        if number > count or frame.shape != shape:
            raise MediaError(f"frame {number} of the {kind} is {list(frame.shape)}; {count} of {list(shape)} are due")
        pixels[number - 1] = _resized(frame, pixels.shape[2:])
    if pixels is None or number != count:
        raise MediaError(f"the {kind} has {number} frames, but {count} numbers of frames")
    rows, columns = (side // rules.factor for side in pixels.shape[2:])
    digest = hashlib.sha256(f"{kind} {tuple(pixels.shape)}".encode())
    digest.update(pixels.numpy().data)
    return MediaItem(kind, pixels, max(1, len(times)), rows, columns, times, digest.hexdigest())


def _size(kind: MediaKind, count: int, height: int, width: int, rules: MediaRules) -> tuple[int, int]:
    return rules.image_size(height, width) if kind == "image" else rules.video_size(count, height, width)


def _resized(frame: np.ndarray, size: Sequence[int]) -> torch.Tensor:
    pixels = torch.from_numpy(np.ascontiguousarray(frame.transpose(2, 0, 1)))[None]
    if tuple(pixels.shape[2:]) != tuple(size):
        pixels = F.interpolate(pixels, size=tuple(size), mode="bicubic", antialias=True)
    return pixels[0]


def _check_pixels(array: np.ndarray, kind: MediaKind) -> None:
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[-1] != 3:
        what = "image" if kind == "image" else "video's frame"
        raise MediaError(f"the {what} is {array.dtype} {list(array.shape)}, must be uint8 [H, W, 3]")
