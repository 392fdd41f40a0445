"""Where does a session document begin and end, and is it whole? Header, trailer, signature; `state/FORMAT.md`."""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass
from typing import cast

from state.errors import FormatError, SignatureError

MAGIC = b"\x89DFS\r\n\x1a\n"
VERSION = (1, 1)
HEADER = struct.Struct("<8sHHIQQ")
"""Magic, major, minor, flags, size of the manifest, size of the whole document."""
SIGNED, DETACHED = 1, 2
DIGEST_BYTES = 32
MANIFEST_LIMIT = 64 << 20

Blob = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Envelope:
    """A document whose digest is right. `signed`: by the key that it was opened with; `has_signature`: by some key.
    `payload` is not looked at."""

    minor: int
    signed: bool
    has_signature: bool
    detached: bool
    manifest: bytes
    payload: memoryview


def seal(manifest: bytes, payload: list[bytes], *, detached: bool, key: bytes | None) -> bytes:
    """The document of a manifest and its payload. Raises `FormatError` for a manifest over the limit."""
    head, trailer = around(manifest, sum(map(len, payload)), detached=detached, key=key)
    return b"".join([head, *payload, trailer])


def around(manifest: bytes, payload_bytes: int, *, detached: bool, key: bytes | None) -> tuple[bytes, bytes]:
    """What lies before a payload of so many bytes, and after it."""
    if len(manifest) > MANIFEST_LIMIT:
        raise FormatError("manifest", f"has {len(manifest)} bytes, may have {MANIFEST_LIMIT}: the session is too large")
    flags = (SIGNED if key is not None else 0) | (DETACHED if detached else 0)
    trailer_bytes = DIGEST_BYTES * (1 if key is None else 2)
    total = HEADER.size + len(manifest) + payload_bytes + trailer_bytes
    head = HEADER.pack(MAGIC, *VERSION, flags, len(manifest), total) + manifest
    signature = b"" if key is None else _signature(key, head)
    return head, signature + hashlib.sha256(head + signature).digest()


def unseal(blob: Blob, *, key: bytes | None, demand_signature: bool) -> Envelope:
    """Checks header and trailer. Raises `FormatError`, or `SignatureError` where one is demanded that is not there."""
    view = memoryview(blob).cast("B").toreadonly()
    if len(view) < HEADER.size + DIGEST_BYTES:
        raise FormatError("header", f"the document has {len(view)} bytes, which is less than header and trailer take")
    minor, flags, size, total = _header(view)
    if total != len(view):
        raise FormatError("header.size", f"is {total} bytes, but the document has {len(view)}")
    trailer_bytes = DIGEST_BYTES * (2 if flags & SIGNED else 1)
    if size > min(MANIFEST_LIMIT, total - HEADER.size - trailer_bytes):
        raise FormatError("header.manifest_size", f"is {size}, more than the document or the limit allows")
    start = HEADER.size + size
    head, signature = view[:start], view[total - trailer_bytes : total - DIGEST_BYTES]
    digest = hashlib.sha256(head)
    digest.update(signature)
    if digest.digest() != bytes(view[-DIGEST_BYTES:]):
        raise FormatError("trailer", "is not the sha256 of header, manifest and signature: one of them was changed")
    signed = bool(signature) and key is not None and hmac.compare_digest(_signature(key, head), bytes(signature))
    if demand_signature and not signed:
        raise SignatureError("is that of another key" if signature else "is missing, and only signed state is taken")
    payload = view[start : total - trailer_bytes]
    if flags & DETACHED and len(payload):
        raise FormatError("payload", f"has {len(payload)} bytes, but the header says that it lies elsewhere")
    manifest = bytes(view[HEADER.size : start])
    return Envelope(minor, signed, bool(signature), bool(flags & DETACHED), manifest, payload)


def stated_bytes(head: Blob) -> int:
    """How long a document is that begins with these bytes, so that no more of a file is read. Raises `FormatError`."""
    return _header(memoryview(head).cast("B"))[-1]


def _header(view: memoryview) -> tuple[int, int, int, int]:
    """Minor version, flags, size of the manifest and of the document, as the header states them."""
    if len(view) < HEADER.size:
        raise FormatError("header", f"the document has {len(view)} bytes, which is less than its header takes")
    magic, major, minor, flags, size, total = cast(tuple[bytes, int, int, int, int, int], HEADER.unpack_from(view))
    if magic != MAGIC:
        raise FormatError("header.magic", f"is {magic.hex(' ')}, must be {MAGIC.hex(' ')}: this is no session document")
    if major != VERSION[0]:
        raise FormatError("header.version", f"is {major}.{minor}, this reader knows {VERSION[0]}.x")
    if flags & ~(SIGNED | DETACHED):
        raise FormatError("header.flags", f"is {flags}, this reader knows {SIGNED} (signed) and {DETACHED} (detached)")
    return minor, flags, size, total


def _signature(key: bytes, head: bytes | memoryview) -> bytes:
    return hmac.new(key, head, hashlib.sha256).digest()
