"""What do the tables of an MP4 or QuickTime file claim? FFmpeg builds a track's whole index as it opens a file, before
anybody is asked, and a claim of a million samples takes twenty bytes.

FFmpeg finds boxes in places where they do not belong, and reads past their ends, so that a walk along the standard's
tree would miss some. So every name of a table counts, wherever it is outside of the media data, and what all of them
claim together is limited.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from deployment.media_limits import MAX_SAMPLES, MediaLimits
from model.errors import MediaError

_ENTRY_BYTES = {b"stts": 8, b"ctts": 8, b"stss": 4, b"stps": 4, b"stsc": 12, b"stco": 4, b"co64": 8, b"sbgp": 8}
_STREAMS = (b"trak", b"data", b"infe")
"""Tracks, and what FFmpeg makes streams of beside them: covers and pictures."""

_NAMES = re.compile(b"|".join((*_ENTRY_BYTES, b"stsz|stz2|trun|moof|sidx|tfra|cmov|schm|senc|tenc", *_STREAMS)))
_FREE = b"skip"
"""FFmpeg looks into what is named `free`, not into this."""

_BLOCK = 512
"""FFmpeg's index has an entry for each so many samples of uncompressed sound, or for more of them."""


def pictures_alone(data: bytes) -> bytes:
    """The file with its other tracks made free space: sound has millions of samples, and nobody asks for them. Raises
    MediaError for what is no sequence of boxes."""
    silent = bytearray(data)
    for name, _, content, end in _boxes(data, 0, len(data)):
        if name == b"moov":
            for inner, first, _, last in _boxes(data, content, end):
                if inner == b"trak" and data.find(b"vide", first, last) < 0:
                    silent[first + 4 : first + 8] = _FREE
    return bytes(silent)


def check_tables(data: bytes, limits: MediaLimits) -> None:
    """`data`: of `pictures_alone`. Raises MediaError for tables that claim more samples than may be, or more entries
    than the file has bytes for."""
    samples = entries = fragments = streams = 0
    for begin, end in _parts(data):
        chunks = longest = 0
        for found in _NAMES.finditer(data, begin, end):
            name, place = found[0], found.end() + 8 * (_word(data, found.start() - 4) == 1)
            count = _word(data, place + 4)
            if name == b"cmov":
                raise MediaError("has a compressed header, which is not supported")
            if name in (b"schm", b"senc", b"tenc"):
                raise MediaError("is encrypted, which is not supported")
            if name in _STREAMS:
                streams += 1
            elif name == b"moof":
                fragments += 1
            elif name == b"sidx":
                fragments += _word(data, place + (28 if data[place : place + 1] != b"\0" else 20)) & 0xFFFF
            elif name == b"tfra":
                fragments += _word(data, place + 12)
            elif name == b"trun":
                samples += count
            elif name in (b"stsz", b"stz2"):
                count = _word(data, place + 8)
                samples += count
                entries += 0 if name == b"stsz" and _word(data, place + 4) else count // 2
            else:
                if name == b"sbgp":  # says first what it groups by
                    count = _word(data, place + (12 if data[place : place + 1] == b"\1" else 8))
                entries += count * _ENTRY_BYTES[name]
                if name == b"stsc" and entries <= len(data):
                    longest = max(longest, _longest(data, place + 8, count))
                elif name in (b"stco", b"co64"):
                    chunks = max(chunks, count)
            if entries > len(data):
                raise MediaError("is damaged: its tables list more than a file of its length can hold")
            # FFmpeg keeps facts of every stream for every fragment.
            _check_samples(samples + max(1, fragments) * max(1, streams), limits)
        _check_samples(chunks * (1 + longest // _BLOCK), limits)


def _check_samples(count: int, limits: MediaLimits) -> None:
    most = limits.frames + MAX_SAMPLES
    if count > most:
        raise MediaError(f"claims {count} samples and fragments; at most {most} are taken")


def _parts(data: bytes) -> Iterator[tuple[int, int]]:
    """Where boxes are, other than media data: those of a header one by one, as each track has its own tables."""
    for name, begin, content, end in _boxes(data, 0, len(data)):
        if name == b"moov":
            yield from ((first, last) for inner, first, _, last in _boxes(data, content, end) if inner != _FREE)
        elif name not in (b"mdat", _FREE):
            yield begin, end


def _boxes(data: bytes, place: int, end: int) -> Iterator[tuple[bytes, int, int, int]]:
    """The name of each, where it begins, its content begins, and it ends."""
    while place + 8 <= end:
        size, header = _word(data, place), 8
        if size == 1:
            size, header = int.from_bytes(data[place + 8 : place + 16], "big"), 16
        elif size == 0:
            size = end - place
        if size < header or place + size > end:
            raise MediaError(
                f"is damaged or cut off: byte {place} begins a box of {size} bytes, but {end - place} follow"
            )
        yield data[place + 4 : place + 8], place, place + header, place + size
        place += size


def _longest(data: bytes, place: int, count: int) -> int:
    """The most samples that one chunk has."""
    return max((_word(data, place + 12 * number + 4) for number in range(count)), default=0)


def _word(data: bytes, place: int) -> int:
    return int.from_bytes(data[max(0, place) : place + 4], "big")
