"""What are these bytes? Told by how they begin, whatever their sender calls them, before any decoder sees them."""

from __future__ import annotations

from typing import Literal

from model.errors import MediaError

Format = Literal["PNG", "JPEG", "WebP", "GIF", "MP4", "Matroska"]

STILL: tuple[Format, ...] = ("PNG", "JPEG", "WebP", "GIF")
"""As an image; of an animated one the first frame."""

MOVING: tuple[Format, ...] = ("MP4", "Matroska", "GIF", "WebP", "PNG")
"""As a video."""

MIME_TYPES: dict[str, Format] = {
    "image/png": "PNG",
    "image/apng": "PNG",
    "image/jpeg": "JPEG",
    "image/jpg": "JPEG",
    "image/webp": "WebP",
    "image/gif": "GIF",
    "video/mp4": "MP4",
    "video/quicktime": "MP4",
    "video/webm": "Matroska",
    "video/x-matroska": "Matroska",
}

_BEGINNINGS: tuple[tuple[bytes, Format], ...] = (
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"\x1a\x45\xdf\xa3", "Matroska"),
)
_FOREIGN: tuple[tuple[bytes, str], ...] = (
    (b"BM", "a BMP image"),
    (b"II*\x00", "a TIFF image"),
    (b"MM\x00*", "a TIFF image"),
    (b"%PDF", "a PDF document"),
    (b"\x00\x00\x01\x00", "an icon"),
    (b"\x1f\x8b", "compressed by gzip"),
    (b"PK\x03\x04", "a ZIP archive"),
)
_PICTURE_BRANDS = (b"heic", b"heix", b"hevc", b"mif1", b"msf1", b"avif", b"avis")


def format_of(data: bytes) -> Format:
    """Raises MediaError saying what the bytes are, where that can be told, and what would be right."""
    for beginning, name in _BEGINNINGS:
        if data.startswith(beginning):
            return name
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WebP"
    if data[4:8] == b"ftyp" and data[8:12] not in _PICTURE_BRANDS:
        return "MP4"
    raise MediaError(f"is {_nature(data)}; it must be {listed((*STILL, 'MP4', 'Matroska'))}")


def check_declared(declared: str, data: bytes) -> Format:
    """The format of the bytes, if `declared`, a media type, says the same. Raises MediaError."""
    wanted = known_type(declared)
    found = format_of(data)
    if found != wanted:
        raise MediaError(f"is declared as {declared}, but its bytes are {found}")
    return found


def known_type(declared: str) -> Format:
    """What a media type stands for. Raises MediaError for one that is not supported."""
    wanted = MIME_TYPES.get(declared.lower())
    if wanted is None:
        nature = "SVG, a document that would have to be rendered" if "svg" in declared.lower() else "not supported"
        raise MediaError(f"has the media type {declared[:80]!r}, which is {nature}; it must be {listed(MIME_TYPES)}")
    return wanted


def webp_size(data: bytes) -> tuple[int, int] | None:
    """Width and height of a WebP file by its first chunk; None if it has none. The decoder takes memory for as many
    pixels as that chunk claims, as soon as it is made."""
    chunk = data[12:30]
    if len(chunk) < 18:
        return None
    if chunk[:4] == b"VP8X":
        return 1 + int.from_bytes(chunk[12:15], "little"), 1 + int.from_bytes(chunk[15:18], "little")
    if chunk[:4] == b"VP8L":
        bits = int.from_bytes(chunk[9:13], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if chunk[:4] == b"VP8 ":
        width, height = (int.from_bytes(chunk[i : i + 2], "little") & 0x3FFF for i in (14, 16))
        return width, height
    return None


def listed(names: tuple[str, ...] | dict[str, Format]) -> str:
    """As in "PNG, JPEG or WebP"."""
    *most, last = names
    return f"{', '.join(most)} or {last}"


def _nature(data: bytes) -> str:
    if not data:
        return "empty"
    for beginning, nature in _FOREIGN:
        if data.startswith(beginning):
            return nature
    if data[4:8] == b"ftyp":
        return "a HEIC or AVIF image"
    text = data[:512].lstrip(b"\xef\xbb\xbf \t\r\n")
    if b"<svg" in text:
        return "SVG, a document that would have to be rendered"
    return "HTML or XML" if text.startswith(b"<") else "in no known format"
