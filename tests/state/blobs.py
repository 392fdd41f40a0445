"""A reader and a writer of `state/FORMAT.md` as a stranger would write them: with nothing of ours but that page.

The writer states whatever it is told, so tests use it to make documents that lie.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack

HEADER = struct.Struct("<8sHHIQQ")
HEADER_BYTES = 32


@dataclass(frozen=True)
class Parts:
    manifest: dict[str, Any]
    segments: list[bytes]
    magic: bytes = b"\x89DFS\r\n\x1a\n"
    version: tuple[int, int] = (1, 0)
    flags: int = 0
    key: bytes | None = None
    manifest_bytes: bytes | None = field(default=None, repr=False)

    def with_manifest(self, **changes: Any) -> Parts:
        return replace(self, manifest=self.manifest | changes)

    def with_session(self, **changes: Any) -> Parts:
        return self.with_manifest(session=self.manifest["session"] | changes)

    def with_checkpoint(self, number: int = 0, **changes: Any) -> Parts:
        checkpoints = [dict(entry) for entry in self.manifest["checkpoints"]]
        checkpoints[number] |= changes
        return self.with_manifest(checkpoints=checkpoints)

    def names(self, number: int = 0) -> dict[str, int]:
        """A checkpoint's segments by name: where each stands in the table."""
        checkpoint = self.manifest["checkpoints"][number]
        pages = -(-checkpoint["frontier"] // 64)
        paged = [kind for kind in ("target", "draft") if kind in self.manifest["layouts"]]
        names = ["image", *(f"{kind}/{page}" for kind in paged for page in range(pages))]
        return dict(zip(names, words(checkpoint["segments"]), strict=True))

    def segment(self, name: str, number: int = 0) -> bytes:
        return self.segments[self.names(number)[name]]

    def with_segment(self, name: str, data: bytes) -> Parts:
        """Another content of a segment of the first checkpoint, with the table made to fit."""
        at = self.names()[name]
        segments, table = list(self.segments), list(self.manifest["segments"])
        segments[at] = data
        table[at] = {"size": len(data), "sha256": hashlib.sha256(data).digest()}
        return replace(self, segments=segments, manifest=self.manifest | {"segments": table})


def words(data: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(data) // 4}I", data))


def packed(numbers: list[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


def take_apart(blob: bytes, key: bytes | None = None) -> Parts:
    magic, major, minor, flags, manifest_size, total = HEADER.unpack(blob[:HEADER_BYTES])
    assert total == len(blob) and flags in (0, 1, 2, 3)
    head = blob[: HEADER_BYTES + manifest_size]
    signature = blob[-64:-32] if flags & 1 else b""
    assert hashlib.sha256(head + signature).digest() == blob[-32:]
    if key is not None:
        assert hmac.new(key, head, hashlib.sha256).digest() == signature
    manifest = msgpack.unpackb(head[HEADER_BYTES:])
    segments: list[bytes] = []
    end = len(head)
    for entry in () if flags & 2 else manifest["segments"]:
        segments.append(blob[end : end + entry["size"]])
        end += entry["size"]
        assert hashlib.sha256(segments[-1]).digest() == entry["sha256"]
    assert end + len(signature) + 32 == len(blob)
    return Parts(manifest, segments, magic, (major, minor), flags, key)


def put_together(parts: Parts) -> bytes:
    manifest = bytes(msgpack.packb(parts.manifest) or b"") if parts.manifest_bytes is None else parts.manifest_bytes
    payload = b"".join(parts.segments)
    trailer = 64 if parts.flags & 1 else 32
    total = HEADER_BYTES + len(manifest) + len(payload) + trailer
    head = HEADER.pack(parts.magic, *parts.version, parts.flags, len(manifest), total) + manifest
    signature = hmac.new(parts.key or b"", head, hashlib.sha256).digest() if parts.flags & 1 else b""
    return head + payload + signature + hashlib.sha256(head + signature).digest()


def read_safetensors(data: bytes) -> dict[str, tuple[str, list[int], bytes]]:
    """name -> (dtype, shape, bytes in row-major order)."""
    (header_size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + header_size])
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = (entry["dtype"], entry["shape"], data[8 + header_size + begin : 8 + header_size + end])
    return tensors
