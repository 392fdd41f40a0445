"""How large an image or a video becomes before a tower sees it, and which frames of a video it sees.

Read from the processor's files of a Hugging Face directory: `processor_config.json`, where it holds the parts, else
`preprocessor_config.json` and `video_preprocessor_config.json`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from model.errors import MediaError
from model.fields import Fields, read_json
from model.vision_config import VisionConfig

_MAX_ASPECT_RATIO = 200


@dataclass(frozen=True)
class ImageRules:
    """Pixels that an image has after resizing."""

    min_pixels: int
    max_pixels: int


@dataclass(frozen=True)
class VideoRules:
    """Pixels that all sampled frames of a video have together after resizing, and how many are sampled: `fps` of them
    a second, `min_frames` to `max_frames`. `max_frame_tokens` limits each frame, None does not."""

    min_pixels: int
    max_pixels: int
    fps: float
    min_frames: int
    max_frames: int
    max_frame_tokens: int | None


@dataclass(frozen=True)
class MediaRules:
    """`factor`: both sides of what a tower sees are multiples of it. `mean`, `std`: of each channel, for values in
    [0, 1]."""

    image: ImageRules
    video: VideoRules
    factor: int
    temporal_patch: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def image_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width after resizing. Raises MediaError for a side of 0 or an extreme shape."""
        _check_shape("image", height, width)
        return self._fitted(1, 1, height, width, self.image.min_pixels, self.image.max_pixels)

    def video_size(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Height and width of each of so many sampled frames after resizing. Raises MediaError."""
        if frames < self.temporal_patch:
            raise MediaError(f"the video has {frames} frames, must have at least {self.temporal_patch}")
        _check_shape("video", height, width)
        smallest = max(self.factor / height, self.factor / width)
        if smallest > 1:
            height, width = int(height * smallest), int(width * smallest)
        _check_shape("video", height, width)
        rules, largest = self.video, self.video.max_pixels
        if rules.max_frame_tokens is not None:
            share = min(rules.max_frame_tokens * self.factor**2, rules.max_pixels // frames)
            largest = frames * max(share, int(rules.min_pixels * 1.05))
        whole = round(frames / self.temporal_patch) * self.temporal_patch
        return self._fitted(frames, whole, height, width, rules.min_pixels, largest)

    def sampled_frames(self, total: int, fps: float) -> tuple[int, ...]:
        """Which of a video's `total` frames are shown, where it has `fps` a second. Raises MediaError."""
        if total < 1:
            raise MediaError("the video has no frames")
        if not 0 < fps < math.inf:
            raise MediaError(f"the video has {fps} frames a second, must be a number above 0")
        rules = self.video
        count = min(max(int(total / fps * rules.fps), rules.min_frames), rules.max_frames, total)
        return tuple(int(i) for i in np.linspace(0, total - 1, count).round())

    def _fitted(self, frames: int, whole: int, height: int, width: int, smallest: int, largest: int) -> tuple[int, int]:
        """The nearest multiples of `factor`; where `whole` frames of them have too many or too few pixels, those next
        below or above the sides of this shape that `frames` frames fill the limit with."""
        factor = self.factor
        # Python's round (half to even) is part of the rule.
        rows, columns = round(height / factor) * factor, round(width / factor) * factor
        if whole * rows * columns > largest:
            shrink = math.sqrt(frames * height * width / largest)
            rows = max(factor, math.floor(height / shrink / factor) * factor)
            columns = max(factor, math.floor(width / shrink / factor) * factor)
        elif whole * rows * columns < smallest:
            grow = math.sqrt(smallest / (frames * height * width))
            rows = math.ceil(height * grow / factor) * factor
            columns = math.ceil(width * grow / factor) * factor
        return rows, columns


def load_media_rules(directory: Path, config: VisionConfig) -> MediaRules:
    """Raises ModelError for a missing file, a rule that is not implemented, or one that the tower contradicts."""
    image = _part(directory, "image_processor", "preprocessor_config.json")
    video = _part(directory, "video_processor", "video_preprocessor_config.json")
    for fields in (image, video):
        _refuse_foreign(fields, config)
    video.refuse("do_sample_frames", (True,), "frames are sampled by fps")
    video.refuse("num_frames", (), "frames are sampled by fps")
    constants = [(_channels(fields, "image_mean"), _channels(fields, "image_std")) for fields in (image, video)]
    if constants[0] != constants[1]:
        video.fail(f"image_mean and image_std are {constants[1]}, but must be those of images, {constants[0]}")
    capped = video.flag("cap_pixels_per_frame", False)
    return MediaRules(
        image=ImageRules(*_pixels(image)),
        video=VideoRules(
            *_pixels(video),
            fps=video.number("fps", 2.0),
            min_frames=video.integer("min_frames", 4),
            max_frames=video.integer("max_frames", 768),
            max_frame_tokens=video.integer("max_video_tokens", 768) if capped else None,
        ),
        factor=config.patch * config.merge,
        temporal_patch=config.temporal_patch,
        mean=constants[0][0],
        std=constants[0][1],
    )


def _part(directory: Path, part: str, file: str) -> Fields:
    combined = directory / "processor_config.json"
    if combined.exists():
        fields = Fields(f"processor config ({combined})", read_json(combined))
        nested = fields.mapping(part)
        if nested is not None:
            return Fields(f"{fields.label}: {part}", nested)
    return Fields(f"processor config ({directory / file})", read_json(directory / file))


def _refuse_foreign(fields: Fields, config: VisionConfig) -> None:
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        fields.refuse(name, (True,), "this step is always taken")
    fields.refuse("resample", (3,), "pixels are resized by bicubic interpolation (3)")
    rescale = fields.number("rescale_factor", 1 / 255)
    if not math.isclose(rescale, 1 / 255, rel_tol=1e-6):
        fields.fail(f"rescale_factor is {rescale:g}, but must be 1/255")
    sizes = {
        "patch_size": config.patch,
        "merge_size": config.merge,
        "temporal_patch_size": config.temporal_patch,
    }
    for name, size in sizes.items():
        given = fields.integer(name)
        if given != size:
            fields.fail(f"{name} is {given}, but the vision_config says {size}")


def _pixels(fields: Fields) -> tuple[int, int]:
    """`size`, or the older `min_pixels` and `max_pixels`, which win where both are there."""
    size = Fields(f"{fields.label}: size", fields.mapping("size") or {})
    smallest = fields.integer("min_pixels", None) or size.integer("shortest_edge")
    largest = fields.integer("max_pixels", None) or size.integer("longest_edge")
    if smallest > largest:
        fields.fail(f"size asks for at least {smallest} pixels and at most {largest}")
    return smallest, largest


def _channels(fields: Fields, name: str) -> tuple[float, float, float]:
    value: Any = fields.raw(name)
    if not isinstance(value, list) or len(value) != 3 or not all(isinstance(v, int | float) and v > 0 for v in value):
        fields.fail(f"{name} is {value!r}, but must be three numbers above 0")
    return (float(value[0]), float(value[1]), float(value[2]))


def _check_shape(kind: str, height: int, width: int) -> None:
    if height < 1 or width < 1:
        raise MediaError(f"the {kind} has {height} x {width} pixels, must have at least one")
    ratio = max(height, width) / min(height, width)
    if ratio > _MAX_ASPECT_RATIO:
        raise MediaError(
            f"the {kind} has {height} x {width} pixels, a ratio of {ratio:.1f}, must be at most {_MAX_ASPECT_RATIO}"
        )
