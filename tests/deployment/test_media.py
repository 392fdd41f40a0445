"""Bytes of images and videos: the pixels that transformers' processors make of them, and what is refused, by which name
and within which memory."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image

from deployment.media import Deadline, EndsEarly, decode_image, open_video
from deployment.media_limits import BYTES_A_PIXEL, MediaLimits
from model.errors import MediaError
from tests.deployment.media_files import (
    BOMBS,
    animation,
    encoded,
    filmed,
    gif,
    noise,
    picture,
    png,
    shades,
)

LIMITS = MediaLimits()


# ------------------------------------------------------------------------------------------------ pixels


def with_alpha(mode: str = "RGBA") -> Image.Image:
    image = Image.fromarray(noise(64, 96, 4))
    return image if mode == "RGBA" else image.convert(mode)


def transparent_palette() -> bytes:
    return encoded(Image.fromarray(noise(64, 96, 3)).quantize(16), "PNG", transparency=3)


def turned(orientation: int) -> bytes:
    image = Image.fromarray(noise(64, 96, 3))
    notes = image.getexif()
    notes[ExifTags.Base.Orientation] = orientation
    return encoded(image, "JPEG", exif=notes)


FILES: dict[str, Any] = {
    "PNG": picture,
    "PNG with transparency": lambda: encoded(with_alpha(), "PNG"),
    "PNG in grey with transparency": lambda: encoded(with_alpha("LA"), "PNG"),
    "PNG with a transparent colour of its palette": transparent_palette,
    "PNG with a transparent colour": lambda: encoded(Image.fromarray(noise(64, 96) // 64 * 64), "PNG", transparency=64),
    "PNG in 16 bits": lambda: encoded(Image.fromarray(noise(64, 96).astype(np.uint16) * 257), "PNG"),
    "PNG in one bit": lambda: encoded(Image.fromarray(noise(64, 96) > 127), "PNG"),
    "JPEG": lambda: picture(kind="JPEG"),
    "JPEG that comes in scans": lambda: picture(kind="JPEG", progressive=True),
    "JPEG in grey": lambda: encoded(Image.fromarray(noise(64, 96)), "JPEG"),
    "JPEG in CMYK": lambda: encoded(Image.fromarray(noise(64, 96, 4), "CMYK"), "JPEG"),
    "WebP": lambda: picture(kind="WebP"),
    "WebP with transparency": lambda: encoded(with_alpha(), "WebP", lossless=True),
    "GIF": lambda: encoded(Image.fromarray(noise(64, 96, 3)).quantize(64), "GIF"),
    "GIF of three frames": lambda: animation([noise(64, 96, 3, seed=i) for i in range(3)], "GIF"),
} | {f"JPEG with orientation {i}": lambda i=i: turned(i) for i in range(1, 9)}


@pytest.fixture(scope="module")
def theirs() -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    size = {"shortest_edge": 32 * 32, "longest_edge": 1 << 24}
    return Qwen2VLImageProcessorPil(size=size, patch_size=16, temporal_patch_size=2, merge_size=2)


@pytest.mark.parametrize("name", FILES)
def test_pixels_are_those_of_transformers_for_the_same_bytes(name: str, theirs: Any, tmp_path: Path) -> None:
    """Its processor opens the file upright; then its patches are put back into a picture. No side is resized."""
    from PIL import ImageOps

    data = FILES[name]()
    (tmp_path / "file").write_bytes(data)
    with Image.open(tmp_path / "file") as image:
        out = theirs(ImageOps.exif_transpose(image), do_normalize=False, do_rescale=False, return_tensors="np")
    (_, rows, columns), patches = out["image_grid_thw"][0], np.asarray(out["pixel_values"])
    patches = patches.reshape(rows // 2, columns // 2, 2, 2, 3, 2, 16, 16)[:, :, :, :, :, 0]
    oracle = patches.transpose(0, 2, 5, 1, 3, 6, 4).reshape(16 * rows, 16 * columns, 3)
    assert np.array_equal(decode_image(data, LIMITS), oracle)


def test_notes_of_a_camera_that_nobody_can_read_do_not_make_a_picture_unreadable() -> None:
    data = encoded(Image.fromarray(noise(32, 32, 3)), "PNG", exif=b"Exif\0\0MM\0*" + b"\xff" * 20)
    assert np.array_equal(decode_image(data, LIMITS), noise(32, 32, 3))


# ------------------------------------------------------------------------------------------------ videos


@pytest.mark.parametrize("kind", ["PNG", "WebP"])
def test_an_animation_is_a_video_of_its_frames(kind: str) -> None:
    frames = [noise(40, 56, 3, seed=i) for i in range(6)]
    video = open_video(animation(frames, kind, [100, 200, 50, 100, 100, 50]), LIMITS, Deadline())
    assert video.total == 6 and video.fps == pytest.approx(10.0)
    for number, frame in zip((0, 3, 5), video.frames((0, 3, 5)), strict=True):
        assert np.array_equal(frame, frames[number])


def test_a_gif_s_frames_and_their_time_are_told_without_decoding_them() -> None:
    video = open_video(animation(shades(5), "GIF", [40, 0, 100, 60, 100]), LIMITS, Deadline())
    assert video.total == 5 and video.fps == pytest.approx(5 / 0.4)  # a frame that says 0 is shown for 0.1 s
    assert [int(frame.mean()) for frame in video.frames((1, 4))] == [60, 240]


@pytest.mark.parametrize("codec, container", [("mpeg4", "mp4"), ("libx264", "mov"), ("libvpx-vp9", "webm")])
def test_frames_of_a_video_are_those_of_transformers_for_the_same_bytes(
    codec: str, container: str, tmp_path: Path
) -> None:
    from transformers.video_utils import read_video_pyav

    data = filmed(shades(25), codec, container)
    film: Any = tmp_path / "film"
    film.write_bytes(data)
    numbers = (0, 7, 8, 20, 24)
    oracle, _ = read_video_pyav(film, lambda metadata, **_: list(numbers))
    video = open_video(data, LIMITS, Deadline())
    assert (video.total, video.fps) == (25, 25.0)
    assert np.array_equal(np.stack(list(video.frames(numbers))), oracle)


@pytest.mark.parametrize("sound, container", [("aac", "mp4"), ("pcm_s16le", "mov")])
def test_sound_changes_nothing_however_many_samples_it_has(sound: str, container: str) -> None:
    fragments = {"movflags": "frag_keyframe+empty_moov"} if sound == "aac" else {}
    for options in ({}, fragments):
        silent, heard = (
            open_video(filmed(shades(6), container=container, options=options, sound=how), LIMITS, Deadline())
            for how in (None, sound)
        )
        assert heard.total == silent.total == 6 and heard.fps == silent.fps
        assert np.array_equal(list(heard.frames(range(6))), list(silent.frames(range(6))))


def test_a_video_that_was_filmed_upright_is_upright() -> None:
    frame = np.zeros((48, 64, 3), np.uint8)
    frame[:24, :32] = 255  # the upper left of what the sensor saw
    for rotation, bright in ((90, (slice(40, 64), slice(0, 20))), (-90, (slice(0, 24), slice(28, 48)))):
        (shown,) = open_video(filmed([frame] * 2, rotation=rotation), LIMITS, Deadline()).frames((0,))
        assert shown.shape == (64, 48, 3) and shown[bright].mean() > 200 and shown.mean() < 80


def test_a_video_with_fewer_frames_than_its_container_lists_says_where_it_ends() -> None:
    video = open_video(filmed(shades(6), "mpeg4", "matroska"), LIMITS, Deadline())
    with pytest.raises(EndsEarly) as caught:
        list(video.frames((0, 9)))
    assert caught.value.frames == 6


def test_a_video_without_its_decoder_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    data = filmed(shades(2))
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MediaError, match="lacks its extra 'video'"):
        open_video(data, LIMITS, Deadline())


# ------------------------------------------------------------------------------------------------ what is refused


SVG = b"<?xml version='1.0'?>\n<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>"


@pytest.mark.parametrize(
    "data, sentence",
    [
        (b"", "is empty; it must be PNG, JPEG, WebP, GIF, MP4 or Matroska"),
        (SVG, "is SVG, a document that would have to be rendered"),
        (b"\xef\xbb\xbf  <html>", "is HTML or XML"),
        (b"hello", "is in no known format"),
        (b"BM" + bytes(60), "is a BMP image"),
        (b"II*\0" + bytes(60), "is a TIFF image"),
        (b"\0\0\0\x18ftypheic" + bytes(60), "is a HEIC or AVIF image"),
        (picture()[:-2000], "is damaged or cut off"),
        (picture(kind="JPEG")[:-2000], "is damaged or cut off"),
        (picture(kind="WebP")[:-2000], "is damaged or cut off"),
        (picture()[:20], "is damaged or cut off|begins as PNG, but is none"),
        (picture(kind="GIF")[:-500], "is cut off"),
        (picture(kind="GIF")[:9], "is cut off"),
        (gif(8, 8, (0, 0, 8, 8))[:-1] + b"\x77;", "is damaged: byte 42 begins no block of a GIF"),
        (b"\x89PNG\r\n\x1a\n" + bytes(500), "begins as PNG, but is none|is damaged"),
        (b"\xff\xd8\xff" + bytes(500), "begins as JPEG, but is none|is damaged"),
        (b"RIFF\0\0\0\0WEBPVP8L" + bytes(500), "begins as WebP, but is none|is damaged|at least one"),
        (png(0, 8), "begins as PNG, but is none|at least one|is damaged"),
    ],
)
def test_what_is_no_image_is_refused_by_its_nature(data: bytes, sentence: str) -> None:
    with pytest.raises(MediaError, match=f"^({sentence})") as caught:
        decode_image(data, LIMITS)
    assert "\n" not in str(caught.value) and "0x" not in str(caught.value)


def test_a_video_where_an_image_belongs_is_refused_and_the_reverse() -> None:
    with pytest.raises(MediaError, match="is MP4, which is no image"):
        decode_image(filmed(shades(2)), LIMITS)
    with pytest.raises(MediaError, match="is JPEG, which is no video"):
        open_video(picture(kind="JPEG"), LIMITS, Deadline())
    with pytest.raises(MediaError, match="is a GIF of one frame, which is an image"):
        open_video(picture(kind="GIF"), LIMITS, Deadline())


@pytest.mark.parametrize(
    "limits, sentence",
    [
        (MediaLimits(frames=4), "has (more than 4|5) frames"),
        (MediaLimits(seconds=0.1), r"takes 0\.\d s; at most 0.1 are taken"),
    ],
)
def test_a_video_beyond_its_limits_is_refused_before_it_is_decoded(limits: MediaLimits, sentence: str) -> None:
    for data in (filmed(shades(5)), animation(shades(5), "GIF"), animation(shades(5), "WebP")):
        with pytest.raises(MediaError, match=sentence):
            open_video(data, limits, Deadline())


@pytest.mark.parametrize("kind", ["GIF", "mp4"])
def test_a_video_that_takes_too_long_to_decode_is_given_up(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = filmed(shades(8)) if kind == "mp4" else animation(shades(8), kind)
    clock = iter(range(0, 1000, 20))
    monkeypatch.setattr("deployment.media.time.monotonic", lambda: float(next(clock)))
    video = open_video(data, LIMITS, Deadline())
    with pytest.raises(MediaError, match="takes more than 60 s to decode"):
        list(video.frames(range(8)))


def test_finding_out_how_long_an_animation_is_counts_as_decoding_it(monkeypatch: pytest.MonkeyPatch) -> None:
    data = animation(shades(4), "WebP")
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr("deployment.media.time.monotonic", lambda: float(next(clock)))
    video = open_video(data, LIMITS, Deadline())
    with pytest.raises(MediaError, match="takes more than 60 s to decode"):
        list(video.frames(range(4)))


def test_every_way_to_cut_or_damage_a_file_is_refused_or_decoded_and_nothing_else() -> None:
    random = np.random.default_rng(7)
    files = [picture(24, 24, kind) for kind in ("PNG", "JPEG", "WebP", "GIF")]
    files += [animation(shades(3, 16, 16), "GIF"), animation(shades(3, 16, 16), "PNG"), filmed(shades(3, 32, 32))]
    for data in files:
        for _ in range(60):
            harmed = bytearray(data)
            for place in random.integers(0, len(data), random.integers(1, 4)):
                harmed[place] = random.integers(0, 256)
            harmed = harmed[: random.integers(1, len(data) + 1)] if random.random() < 0.3 else harmed
            for read in (decode_image, lambda data, limits: list(open_video(data, limits, Deadline()).frames((0, 1)))):
                with contextlib.suppress(MediaError):
                    read(bytes(harmed), MediaLimits(pixels=1 << 16))


# ------------------------------------------------------------------------------------------------ memory

MEMORY_TEST = """
import resource, sys
from pathlib import Path
from deployment.media import Deadline, decode_image, open_video
from deployment.media_limits import MediaLimits
from model.errors import MediaError

limits, room = MediaLimits(pixels=int(sys.argv[1])), int(sys.argv[2])
files = [Path(name) for name in sys.argv[3:]]
decode_image(files[0].read_bytes(), limits)  # what decoders load for good
list(open_video(files[1].read_bytes(), limits, Deadline()).frames((0, 1)))
taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + room, taken + room))
for file in files:
    data = file.read_bytes()
    for read in (decode_image, lambda data, limits: list(open_video(data, limits, Deadline()).frames((0, 1)))):
        try:
            read(data, limits)
            print("taken")
        except MediaError as error:
            print(error)
"""


def read_within(room: int, pixels: int, files: list[Path]) -> list[str]:
    """What a process says that may not take more than `room` bytes above what it has when it begins. Every file is read
    as an image and as a video; the first is a small image, the second a small video."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_TEST, str(pixels), str(room), *map(str, files)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "MALLOC_ARENA_MAX": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def written(directory: Path, files: dict[str, bytes]) -> list[Path]:
    paths = [directory / f"{number}" for number in range(len(files))]
    for path, data in zip(paths, files.values(), strict=True):
        path.write_bytes(data)
    return paths


def test_bombs_are_refused_by_name_within_the_memory_of_a_small_image(tmp_path: Path) -> None:
    pixels = 1 << 20
    files = {"image": picture(16, 16), "video": filmed(shades(2))} | {name: make() for name, make in BOMBS.items()}
    said = read_within(pixels * BYTES_A_PIXEL + (48 << 20), pixels, written(tmp_path, files))
    assert said[0] == said[3] == "taken" and "taken" not in said[4:]
    for name, sentences in zip(BOMBS, zip(said[4::2], said[5::2], strict=True), strict=True):
        film, other = "film" in name, ("no image" if "film" in name else "no video")
        natures = ("pixels", other, *(("too large", "damaged", "claims 16777") if film or "is 256 MiB" in name else ()))
        assert all(any(nature in sentence for nature in natures) for sentence in sentences), (name, sentences)
        # What takes so much should not even have been tried.
        assert "allocate" not in "".join(sentences), (name, sentences)


@pytest.mark.parametrize("kind, mode, how", [("WebP", "RGBA", {}), ("JPEG", "CMYK", {"progressive": True})])
def test_an_image_of_the_limit_is_decoded_within_the_memory_that_is_promised(
    kind: str, mode: str, how: dict[str, Any], tmp_path: Path
) -> None:
    pixels = 4096 * 1024
    large = encoded(Image.fromarray(np.full((1024, 4096, 4), 9, np.uint8), mode), kind, **how)
    files = written(tmp_path, {"image": picture(16, 16, kind), "video": filmed(shades(2)), "large": large})
    said = read_within(pixels * BYTES_A_PIXEL + (4 << 20), pixels, files)
    assert said[4] == "taken"
