"""A reader and a writer of `state/FORMAT.md` as a stranger would write them: with nothing of ours but that page.

The writer states whatever it is told, so tests use it to make blobs that lie.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack

HEADER_BYTES = 24


@dataclass(frozen=True)
class Parts:
    manifest: dict[str, Any]
    segments: dict[str, bytes]
    magic: bytes = b"\x89DFS\r\n\x1a\n"
    version: tuple[int, int] = (1, 0)
    manifest_bytes: bytes | None = field(default=None, repr=False)

    def with_manifest(self, **changes: Any) -> Parts:
        return replace(self, manifest=self.manifest | changes)

    def with_segment(self, name: str, data: bytes) -> Parts:
        """Another content of a segment, with the table made to fit."""
        segments = self.segments | {name: data}
        table, offset = [], 0
        for entry in self.manifest["segments"]:
            content = segments[entry["name"]]
            digest = hashlib.sha256(content).digest()
            table.append({"name": entry["name"], "offset": offset, "size": len(content), "sha256": digest})
            offset += len(content)
        return replace(self, segments=segments, manifest=self.manifest | {"segments": table})


def take_apart(blob: bytes) -> Parts:
    magic, major, minor, manifest_size, total = struct.unpack("<8sHHIQ", blob[:HEADER_BYTES])
    assert total == len(blob)
    payload_start = HEADER_BYTES + manifest_size
    assert hashlib.sha256(blob[:payload_start]).digest() == blob[-32:]
    manifest = msgpack.unpackb(blob[HEADER_BYTES:payload_start])
    segments: dict[str, bytes] = {}
    end = payload_start
    for entry in manifest["segments"]:
        assert payload_start + entry["offset"] == end
        end += entry["size"]
        segments[entry["name"]] = blob[end - entry["size"] : end]
        assert hashlib.sha256(segments[entry["name"]]).digest() == entry["sha256"]
    assert end + 32 == len(blob)
    return Parts(manifest, segments, magic, (major, minor))


def put_together(parts: Parts) -> bytes:
    manifest = bytes(msgpack.packb(parts.manifest) or b"") if parts.manifest_bytes is None else parts.manifest_bytes
    payload = b"".join(parts.segments.values())
    total = HEADER_BYTES + len(manifest) + len(payload) + 32
    head = struct.pack("<8sHHIQ", parts.magic, *parts.version, len(manifest), total) + manifest
    return head + payload + hashlib.sha256(head).digest()


def read_safetensors(data: bytes) -> dict[str, tuple[str, list[int], bytes]]:
    """name -> (dtype, shape, bytes in row-major order)."""
    (header_size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + header_size])
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = (entry["dtype"], entry["shape"], data[8 + header_size + begin : 8 + header_size + end])
    return tensors
