"""How does a checkpoint leave the device and come back? As one blob; `state/FORMAT.md` describes it byte by byte."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, cast

import safetensors.torch
import torch
from safetensors import SafetensorError

from state.checkpoint import Checkpoint
from state.coverage import check_coverage
from state.errors import FormatError
from state.fingerprint import Fingerprint, compare
from state.geometry import DTYPE_NAMES, PAGE_TOKENS, StateGeometry, pages_for
from state.manifest import Manifest, Segment, parse_manifest, write_manifest
from state.memory import StateMemory
from state.pages import PagePool

MAGIC = b"\x89DFS\r\n\x1a\n"
VERSION = (1, 0)
HEADER = struct.Struct("<8sHHIQ")
"""Magic, major, minor, size of the manifest, size of the whole blob."""
TRAILER_BYTES = 32
MANIFEST_LIMIT = 64 << 20
SEGMENT_HEADER_LIMIT = 4096
"""Bytes that a segment may have beyond its tensors' data: its safetensors header, of which ours take about 400."""

Blob = bytes | bytearray | memoryview
Layout = dict[str, tuple[str, tuple[int, ...]]]


def encode_checkpoint(
    memory: StateMemory, checkpoint: Checkpoint, fingerprint: Fingerprint, record: dict[str, Any]
) -> bytes:
    """The blob of a checkpoint that lies in `memory`. The same checkpoint gives the same segments, byte by byte.

    `record` may hold None, bool, int, float, str, bytes, lists and dicts with str keys; what else it holds is refused
    by name (`FormatError`).
    """
    memory.check_kept(checkpoint)
    check_coverage(checkpoint.coverage, memory.geometry)
    segments: list[Segment] = []
    payload: list[bytes] = []
    offset = 0
    for name, tensors in _planes(memory, checkpoint):
        data = safetensors.torch.save({key: tensor.cpu().contiguous() for key, tensor in tensors.items()})
        segments.append(Segment(name, offset, len(data), hashlib.sha256(data).digest()))
        payload.append(data)
        offset += len(data)
    manifest = write_manifest(
        Manifest(
            fingerprint=dict(fingerprint),
            checkpoint=checkpoint.id,
            kind=checkpoint.kind,
            coverage=checkpoint.coverage,
            ledger=checkpoint.ledger,
            parent=checkpoint.parent,
            fork_origin=checkpoint.fork_origin,
            created=checkpoint.created,
            layouts=layouts(memory.geometry, checkpoint.frontier),
            segments=tuple(segments),
            record=record,
        )
    )
    if len(manifest) > MANIFEST_LIMIT:
        raise FormatError("manifest", f"has {len(manifest)} bytes, may have {MANIFEST_LIMIT}: the record is too large")
    total = HEADER.size + len(manifest) + offset + TRAILER_BYTES
    head = HEADER.pack(MAGIC, *VERSION, len(manifest), total) + manifest
    return b"".join([head, *payload, hashlib.sha256(head).digest()])


def decode_checkpoint(
    memory: StateMemory, blob: Blob, fingerprint: Fingerprint, public_rows: int
) -> tuple[Checkpoint, dict[str, Any]]:
    """Brings a blob into `memory`: the checkpoint, and the record that travelled with it.

    Everything is checked before memory is taken, and the checkpoint becomes visible after its last byte is in; on any
    error nothing stays allocated. Raises `FormatError`, `FingerprintMismatch`, `CoverageError` or `CapacityError`.
    Token ids must lie in [0, public_rows).
    """
    manifest, payload = _open(blob)
    compare(manifest.fingerprint, fingerprint)
    check_coverage(manifest.coverage, memory.geometry)
    for index, token in enumerate(manifest.ledger):
        if token >= public_rows:
            raise FormatError(f"manifest.ledger[{index}]", f"is token {token}, public tokens are [0, {public_rows})")
    _check_segments(manifest, memory.geometry, len(payload))
    for segment in manifest.segments:
        if hashlib.sha256(_bytes_of(segment, payload)).digest() != segment.sha256:
            raise FormatError(f"segment {segment.name}", "its bytes do not have the sha256 that the manifest states")

    frontier = manifest.coverage.frontier
    slot, pages, draft_pages = memory.take_for_import(frontier)
    try:
        for segment in manifest.segments:
            tensors = _parse_segment(segment, payload, manifest.layouts[_kind(segment.name)])
            _load(memory, segment.name, tensors, frontier, slot, pages, draft_pages)
        checkpoint = memory.adopt(
            Checkpoint(
                id=manifest.checkpoint,
                kind=manifest.kind,
                form=manifest.coverage.form,
                frontier=frontier,
                ledger=manifest.ledger,
                coverage=manifest.coverage,
                parent=manifest.parent,
                fork_origin=manifest.fork_origin,
                slot=slot,
                pages=pages,
                draft_pages=draft_pages,
                created=manifest.created,
            )
        )
    except BaseException:
        memory.abandon(slot, pages, draft_pages)
        raise
    return checkpoint, manifest.record


def read_manifest(blob: Blob) -> dict[str, Any]:
    """What a blob says about itself, without a geometry and without reading its payload. Raises `FormatError`.

    Keys: fingerprint, checkpoint, kind, form, frontier, coverage, ledger (list of ids), lineage, created, layouts,
    segments (name, offset in the payload, size, sha256 as hex), record, bytes (of the whole blob).
    """
    manifest, _ = _open(blob)
    planes = asdict(manifest.coverage)
    for name in ("form", "frontier", "ledger_tokens"):
        del planes[name]
    return {
        "fingerprint": manifest.fingerprint,
        "checkpoint": manifest.checkpoint,
        "kind": manifest.kind,
        "form": manifest.coverage.form,
        "frontier": manifest.coverage.frontier,
        "coverage": planes,
        "ledger": list(manifest.ledger),
        "lineage": {"parent": manifest.parent, "fork_origin": manifest.fork_origin},
        "created": manifest.created,
        "layouts": manifest.layouts,
        "segments": [asdict(segment) | {"sha256": segment.sha256.hex()} for segment in manifest.segments],
        "record": manifest.record,
        "bytes": memoryview(blob).nbytes,
    }


def layouts(geometry: StateGeometry, frontier: int) -> dict[str, Layout]:
    """The tensors of each kind of segment at a frontier: name -> (dtype, shape). Planes without layers are absent."""
    g = geometry
    image: Layout = {}
    if g.gdn_layers:
        image["gdn"] = ("F32", (g.gdn_layers, g.gdn_heads, g.gdn_key_dim, g.gdn_value_dim))
        image["conv"] = (DTYPE_NAMES[g.conv_dtype], (g.gdn_layers, g.conv_channels, g.conv_history))
    image["hidden"] = (DTYPE_NAMES[g.hidden_dtype], (g.hidden_size,))
    if g.ring_layers:
        live = (g.ring_layers, min(frontier, g.window), g.draft_kv_heads, g.draft_head_dim)
        image["ring_keys"] = (DTYPE_NAMES[g.ring_key_dtype], live)
        image["ring_values"] = (DTYPE_NAMES[g.ring_value_dtype], live)
    known = {"image": image}
    if g.kv_layers:
        page = (g.kv_layers, PAGE_TOKENS, g.kv_heads, g.kv_head_dim)
        known["target"] = dict.fromkeys(("keys", "values"), (DTYPE_NAMES[g.kv_dtype], page))
    if g.full_layers:
        page = (g.full_layers, PAGE_TOKENS, g.draft_kv_heads, g.draft_head_dim)
        known["draft"] = {
            "keys": (DTYPE_NAMES[g.ring_key_dtype], page),
            "values": (DTYPE_NAMES[g.ring_value_dtype], page),
        }
    return known


def _kind(segment_name: str) -> str:
    return segment_name.partition("/")[0]


def _segment_names(kinds: Mapping[str, object], frontier: int) -> list[str]:
    """All segments in their order: image, target/0, target/1, ..., draft/0, draft/1, ..."""
    paged = [kind for kind in kinds if kind != "image"]
    return ["image", *(f"{kind}/{index}" for kind in paged for index in range(pages_for(frontier)))]


# --------------------------------------------------------------------------------------------------------- writing


def _planes(memory: StateMemory, checkpoint: Checkpoint) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    images, slot, frontier = memory.images, checkpoint.slot, checkpoint.frontier
    known = layouts(memory.geometry, frontier)
    image = {"gdn": images.gdn[slot], "conv": images.conv[slot], "hidden": images.hidden[slot]}
    if memory.geometry.ring_layers:
        image["ring_keys"], image["ring_values"] = images.rings.export_slot(slot, frontier)
    yield "image", {name: image[name] for name in known["image"]}
    if "target" in known:
        yield from _page_planes("target", memory.target, checkpoint.pages, frontier)
    if memory.draft:
        yield from _page_planes("draft", memory.draft, checkpoint.draft_pages, frontier)


def _page_planes(
    kind: str, pool: PagePool, pages: tuple[int, ...], frontier: int
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    for index, page in enumerate(pages):
        keys, values = pool.keys[page], pool.values[page]
        columns = frontier - index * PAGE_TOKENS
        if columns < PAGE_TOKENS:
            # Beyond the frontier lies what another sequence or round left there: it must not travel.
            keys, values = keys.clone(), values.clone()
            keys[:, columns:] = 0
            values[:, columns:] = 0
        yield f"{kind}/{index}", {"keys": keys, "values": values}


# --------------------------------------------------------------------------------------------------------- reading


def _open(blob: Blob) -> tuple[Manifest, memoryview]:
    """Checks header and trailer, parses the manifest. Returns it and the payload, unread."""
    view = memoryview(blob).cast("B").toreadonly()
    if len(view) < HEADER.size + TRAILER_BYTES:
        raise FormatError("header", f"the blob has {len(view)} bytes, which is less than header and trailer take")
    magic, major, minor, manifest_size, total = cast(tuple[bytes, int, int, int, int], HEADER.unpack_from(view))
    if magic != MAGIC:
        raise FormatError("header.magic", f"is {magic.hex(' ')}, must be {MAGIC.hex(' ')}: this is no checkpoint")
    if major != VERSION[0]:
        raise FormatError("header.version", f"is {major}.{minor}, this reader knows {VERSION[0]}.x")
    if total != len(view):
        raise FormatError("header.size", f"is {total} bytes, but the blob has {len(view)}")
    if manifest_size > min(MANIFEST_LIMIT, total - HEADER.size - TRAILER_BYTES):
        raise FormatError("header.manifest_size", f"is {manifest_size}, more than the blob or the limit allows")
    payload_start = HEADER.size + manifest_size
    if hashlib.sha256(view[:payload_start]).digest() != bytes(view[-TRAILER_BYTES:]):
        raise FormatError("trailer", "is not the sha256 of header and manifest: one of the three was changed")
    manifest = parse_manifest(bytes(view[HEADER.size : payload_start]), newer_minor=minor > VERSION[1])
    return manifest, view[payload_start:-TRAILER_BYTES]


def _check_segments(manifest: Manifest, geometry: StateGeometry, payload_bytes: int) -> None:
    """Compares layouts and segment table with the geometry; the coverage has been checked before."""
    frontier = manifest.coverage.frontier
    known = layouts(geometry, frontier)
    if dict(manifest.layouts) != known:
        for kind in [*known, *manifest.layouts]:
            stored, here = manifest.layouts.get(kind), known.get(kind)
            if stored != here:
                raise FormatError(f"manifest.layouts.{kind}", f"is {stored}, this geometry has {here}")
    names = _segment_names(known, frontier)
    if len(manifest.segments) != len(names):
        raise FormatError("manifest.segments", f"has {len(manifest.segments)} entries, must have {len(names)}")
    offset = 0
    for index, (segment, name) in enumerate(zip(manifest.segments, names, strict=True)):
        place = f"manifest.segments[{index}]"
        if segment.name != name:
            raise FormatError(f"{place}.name", f"is {segment.name!r}, must be {name!r}")
        if segment.offset != offset:
            raise FormatError(f"{place}.offset", f"is {segment.offset}, must be {offset}: segments follow each other")
        data = sum(_tensor_bytes(*tensor) for tensor in known[_kind(name)].values())
        if not data < segment.size <= data + SEGMENT_HEADER_LIMIT:
            raise FormatError(f"{place}.size", f"is {segment.size}, its tensors have {data} bytes and a short header")
        offset += segment.size
    if offset != payload_bytes:
        raise FormatError("manifest.segments", f"take {offset} bytes, but the payload has {payload_bytes}")


def _tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    count = 4 if dtype == "F32" else 2
    for size in shape:
        count *= size
    return count


def _bytes_of(segment: Segment, payload: memoryview) -> memoryview:
    return payload[segment.offset : segment.offset + segment.size]


def _parse_segment(
    segment: Segment, payload: memoryview, layout: Mapping[str, tuple[str, tuple[int, ...]]]
) -> dict[str, torch.Tensor]:
    place = f"segment {segment.name}"
    try:
        tensors = safetensors.torch.load(bytes(_bytes_of(segment, payload)))
    except (SafetensorError, ValueError, KeyError) as error:
        raise FormatError(place, f"is not safetensors: {error}") from error
    found = {name: (DTYPE_NAMES.get(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}
    if found != layout:
        raise FormatError(place, f"holds {found}, the manifest states {dict(layout)}")
    return tensors


def _load(
    memory: StateMemory,
    name: str,
    tensors: dict[str, torch.Tensor],
    frontier: int,
    slot: int,
    pages: tuple[int, ...],
    draft_pages: tuple[int, ...],
) -> None:
    if name == "image":
        images = memory.images
        images.clear(slot)
        for plane, tensor in (("gdn", images.gdn), ("conv", images.conv), ("hidden", images.hidden)):
            if plane in tensors:
                tensor[slot].copy_(tensors[plane])
        if "ring_keys" in tensors:
            images.rings.import_slot(slot, frontier, tensors["ring_keys"], tensors["ring_values"])
        return
    kind, _, number = name.partition("/")
    index = int(number)
    columns = min(PAGE_TOKENS, frontier - index * PAGE_TOKENS)
    if any(bool(tensor[:, columns:].any()) for tensor in tensors.values()):
        raise FormatError(f"segment {name}", f"columns from {columns} on lie beyond the frontier and must be zero")
    pool, places = (memory.draft, draft_pages) if kind == "draft" else (memory.target, pages)
    if pool is not None:
        pool.fill_page(places[index], tensors["keys"][:, :columns], tensors["values"][:, :columns])
