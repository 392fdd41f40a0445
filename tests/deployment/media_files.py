"""Files of media, made as their senders' programs make them, or as an attacker would."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from PIL import Image


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def encoded(image: Image.Image, kind: str, **how: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **how)
    return out.getvalue()


def picture(height: int = 64, width: int = 96, kind: str = "PNG", **how: Any) -> bytes:
    return encoded(Image.fromarray(noise(height, width, 3)), kind, **how)


def animation(frames: Sequence[np.ndarray], kind: str, milliseconds: Sequence[int] | int = 100) -> bytes:
    first, *more = map(Image.fromarray, frames)
    how = {"lossless": True} if kind == "WebP" else {}
    return encoded(first, kind, save_all=True, append_images=more, duration=milliseconds, **how)


def filmed(
    frames: Sequence[np.ndarray],
    codec: str = "mpeg4",
    container: str = "mp4",
    rotation: int | None = None,
    rate: int = 25,
    options: dict[str, str] | None = None,
    sound: str | None = None,
) -> bytes:
    import av

    out = io.BytesIO()
    height, width = frames[0].shape[:2]
    with av.open(out, "w", format=container, options=options or {}) as file:
        stream: Any = file.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        if rotation is not None:
            stream.set_display_rotation(rotation)
        heard: Any = file.add_stream(sound, rate=48_000, layout="mono") if sound else None
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode(None))
        if heard is not None:
            silence = av.AudioFrame.from_ndarray(np.zeros((1, 600_000), np.int16), format="s16", layout="mono")
            silence.sample_rate = 48_000
            file.mux(heard.encode(silence))
            file.mux(heard.encode(None))
    return out.getvalue()


def shades(count: int, height: int = 48, width: int = 64) -> list[np.ndarray]:
    """Frames that are told apart by their brightness, which codecs keep."""
    return [np.full((height, width, 3), 240 * number // max(1, count - 1), np.uint8) for number in range(count)]


# ------------------------------------------------------------------------------------------------ what attackers send


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, *chunks: bytes, depth: int = 1, colour: int = 0) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IEND", b"")


def zeros(count: int) -> bytes:
    """So many, compressed to a thousandth."""
    packer, block, left = zlib.compressobj(9), bytes(1 << 20), count
    parts = []
    while left > 0:
        parts.append(packer.compress(block[:left]))
        left -= len(block)
    return b"".join(parts) + packer.flush()


def grey(side: int) -> bytes:
    return png(side, side, chunk(b"IDAT", zeros(side * (side + 1))), depth=8)


def swollen(name: bytes) -> bytes:
    """A chunk beside the pixels, of 256 MiB when it is inflated, and the pixels."""
    return chunk(name, b"a\0\0" + zeros(256 << 20)) + chunk(b"IDAT", zeros(16))


def gif(width: int, height: int, frame: tuple[int, int, int, int], disposal: int = 0) -> bytes:
    """A screen, and one frame of `left, top, width, height` that may lie outside of it."""
    screen = b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(3) + b"\xff\xff\xff"
    control = b"\x21\xf9\x04" + bytes((disposal << 2, 10, 0, 0, 0))
    image = b"\x2c" + struct.pack("<HHHHB", *frame, 0) + b"\x02\x02\x4c\x01\x00"
    return screen + control + image + b"\x3b"


def webp(width: int, height: int) -> bytes:
    """A small animation on a canvas of another size, for which its decoder takes memory at once."""
    data = bytearray(animation(shades(2, 8, 8), "WebP"))
    assert data[12:16] == b"VP8X"
    data[24:30] = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return bytes(data)


def jpeg(width: int, height: int) -> bytes:
    """A small picture whose header claims another size."""
    data = bytearray(picture(16, 16, "JPEG"))
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(data)


def film_of(*pictures: bytes) -> bytes:
    """A QuickTime file whose frames are these PNG, whatever sizes they have."""
    import av

    out = io.BytesIO()
    with av.open(out, "w", format="mov") as file:
        stream: Any = file.add_stream("png", rate=1)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "gray"
        for number, picture in enumerate(pictures):
            packet = av.Packet(picture)
            packet.stream, packet.pts, packet.dts, packet.time_base = stream, number, number, Fraction(1)
            file.mux(packet)
    return out.getvalue()


def film_with_a_table_of(entries: int) -> bytes:
    """A film that claims so many frames."""
    data = bytearray(filmed(shades(2)))
    at = data.index(b"stts") + 8
    data[at : at + 4] = struct.pack(">I", entries)
    return bytes(data)


def film_with_a_sample_of_one_byte(count: int) -> bytes:
    """A film of so many frames, all in one chunk and of one size, so that no table lists them."""
    data = bytearray(filmed(shades(2)))
    at = data.index(b"stsz") + 8
    data[at : at + 8] = struct.pack(">II", 1, count)
    at = data.index(b"stsc") + 8
    data[at : at + 16] = struct.pack(">IIII", 1, 1, count, 1)
    at = data.index(b"stts") + 8
    data[at : at + 8] = struct.pack(">II", 1, count)
    return bytes(data)


def box(name: bytes, *content: bytes) -> bytes:
    inside = b"".join(content)
    return struct.pack(">I", 8 + len(inside)) + name + inside


def fragment_of(samples: int) -> bytes:
    """For the end of a film in fragments: one whose samples say nothing of themselves."""
    track = box(b"tfhd", struct.pack(">IIII", 0x020018, 1, 512, 1)), box(b"trun", struct.pack(">II", 0, samples))
    return box(b"moof", box(b"mfhd", bytes(8)), box(b"traf", *track))


BOMBS: dict[str, Callable[[], bytes]] = {
    # Pillow itself refuses what has more than 178,956,970 pixels.
    "a PNG of 13,000 x 13,000 pixels": lambda: png(13_000, 13_000, chunk(b"IDAT", zeros(13_000 * 1626))),
    "a PNG of 2^31 - 1 rows": lambda: png(8, 2**31 - 1, chunk(b"IDAT", zeros(1 << 20))),
    "a PNG whose text is 256 MiB": lambda: png(
        8, 8, chunk(b"zTXt", b"a\0\0" + zeros(256 << 20)), chunk(b"IDAT", zeros(16))
    ),
    "a PNG whose profile is 256 MiB": lambda: png(
        8, 8, chunk(b"iCCP", b"a\0\0" + zeros(256 << 20)), chunk(b"IDAT", zeros(16))
    ),
    "a WebP of 13,000 x 13,000 pixels": lambda: webp(13_000, 13_000),
    "a WebP of 2^24 x 200 pixels": lambda: webp(1 << 24, 200),
    "a JPEG of 13,000 x 13,000 pixels": lambda: jpeg(13_000, 13_000),
    "a JPEG of 65,500 x 65,500 pixels": lambda: jpeg(65_500, 65_500),
    "a film of pictures of 13,000 x 13,000 pixels": lambda: film_of(grey(13_000), grey(13_000)),
    "a film whose second picture is of 13,000 x 13,000 pixels": lambda: film_of(grey(64), grey(13_000)),
    "a film with a table of 2^28 entries": lambda: film_with_a_table_of(1 << 28),
    "a film of 2^24 frames of a byte": lambda: film_with_a_sample_of_one_byte(1 << 24),
    "a film of 2^24 frames whose header is called free space": lambda: film_with_a_sample_of_one_byte(1 << 24).replace(
        b"moov", b"free"
    ),
    "a film whose last fragment has 2^24 frames": lambda: (
        filmed(shades(2), options={"movflags": "frag_keyframe+empty_moov"}) + fragment_of(1 << 24)
    ),
    "a GIF of 65,535 x 65,535 pixels": lambda: gif(65_535, 65_535, (0, 0, 1, 1)),
    "a GIF with a frame far outside": lambda: gif(8, 8, (0, 0, 13_000, 13_000), disposal=2),
    "a GIF with a frame beside its screen": lambda: gif(8, 8, (60_000, 60_000, 8, 8)),
}
