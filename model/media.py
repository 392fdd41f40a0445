"""Images and videos as a tower sees them: resized uint8 pixels in a grid of patches.

    image [H, W, 3]           -> one frame, resized to multiples of patch * merge
    video frames [n, H, W, 3] -> n frames of one size; each `temporal_patch` of them make one row of the grid in time

An item is a pure function of decoded pixels and of the checkpoint's rules, and what the tower makes of it is a pure
function of the item: its digest stands for both.

Resizing is the bicubic, antialiased one of torch for uint8 on a CPU, which is what transformers' default processors
call; it is within two levels of pillow's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
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
    _check_pixels(image, "image", 3)
    height, width = image.shape[:2]
    return _item("image", image[None], rules.image_size(height, width), (), rules)


def video_item(frames: np.ndarray, indices: Sequence[int], fps: float, rules: MediaRules) -> MediaItem:
    """`frames` uint8 [n, H, W, 3], those that `rules.sampled_frames` chose: number `indices[i]` of a video of `fps`
    frames a second. Raises MediaError."""
    _check_pixels(frames, "video", 4)
    if len(indices) != len(frames):
        raise MediaError(f"the video has {len(frames)} frames, but {len(indices)} numbers of frames")
    size = rules.video_size(*frames.shape[:3])
    return _item("video", frames, size, _times(indices, fps, rules.temporal_patch), rules)


def _times(indices: Sequence[int], fps: float, group: int) -> tuple[float, ...]:
    """Of each group of frames, the middle between its first and its last; the last frame fills the last group."""
    seconds = [index / fps for index in indices]
    seconds += seconds[-1:] * (-len(seconds) % group)
    return tuple((seconds[i] + seconds[i + group - 1]) / 2 for i in range(0, len(seconds), group))


def _item(
    kind: MediaKind, frames: np.ndarray, size: tuple[int, int], times: tuple[float, ...], rules: MediaRules
) -> MediaItem:
    pixels = torch.from_numpy(np.ascontiguousarray(frames.transpose(0, 3, 1, 2)))
    if tuple(pixels.shape[2:]) != size:
        pixels = F.interpolate(pixels, size=size, mode="bicubic", antialias=True)
    rows, columns = size[0] // rules.factor, size[1] // rules.factor
    shape = f"{kind} {tuple(pixels.shape)}"
    digest = hashlib.sha256(shape.encode())
    digest.update(pixels.numpy().data)
    return MediaItem(kind, pixels, max(1, len(times)), rows, columns, times, digest.hexdigest())


def _check_pixels(array: np.ndarray, kind: str, axes: int) -> None:
    wanted = "[H, W, 3]" if axes == 3 else "[frames, H, W, 3]"
    if array.dtype != np.uint8 or array.ndim != axes or array.shape[-1] != 3:
        raise MediaError(f"the {kind} is {array.dtype} {list(array.shape)}, must be uint8 {wanted}")
