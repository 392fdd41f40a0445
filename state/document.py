"""How does a session come back? Its document is opened and checked in phases, and only then takes memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError

from state.checkpoint import Checkpoint
from state.container import VERSION, Blob, Envelope, unseal
from state.coverage import check_coverage
from state.errors import FormatError, MissingSegment
from state.geometry import DTYPE_NAMES, PAGE_TOKENS, StateGeometry, pages_for
from state.layouts import SEGMENT_HEADER_LIMIT, Layout, at_frontier, check_layouts, data_bytes, kind_of
from state.manifest import CheckpointEntry, Manifest, parse_manifest
from state.media import Media, Placed, PlacedMedia, media_digest
from state.media_manifest import MediaEntry
from state.memory import StateMemory
from state.session_record import SessionRecord

Fetch = Callable[[bytes], Blob | None]
"""A segment's bytes by their sha256; None if they are not there."""

_DTYPES = DTYPE_NAMES | {torch.uint8: "U8"}


def open_document(
    blob: Blob,
    *,
    fetch: Fetch | None = None,
    verified: Fetch | None = None,
    key: bytes | None = None,
    demand_signature: bool = False,
) -> SessionDocument:
    """Phase one: header, trailer and manifest, without a geometry and without reading the payload.

    `fetch`: where a detached document's segments lie. `verified`: where those lie that were hashed when they came, and
    are not hashed again; it is asked first. `key`: this cluster's, which says whether the document is signed
    by it; `demand_signature`: another is refused (`SignatureError`). Raises `FormatError`.
    """
    envelope = unseal(blob, key=key, demand_signature=demand_signature)
    manifest = parse_manifest(envelope.manifest, newer_minor=envelope.minor > VERSION[1])
    if not envelope.detached:
        stated = sum(segment.size for segment in manifest.segments)
        if stated != len(envelope.payload):
            raise FormatError("manifest.segments", f"take {stated} bytes, but the payload has {len(envelope.payload)}")
    return SessionDocument(manifest, envelope, fetch, verified)


class SessionDocument:
    """An open document. `signed`: by the key that it was opened with. Nothing of it is in any memory before `load`.

    The order of calls is that of `state/FORMAT.md`: the caller compares `manifest.fingerprint`, then `check_fit`, then,
    where all must be whole, `check_payload`, then `load` for each checkpoint. `load` believes what `check_fit` has
    checked; each segment is hashed once, before its first use.
    """

    def __init__(
        self, manifest: Manifest, envelope: Envelope, fetch: Fetch | None, verified: Fetch | None = None
    ) -> None:
        self.manifest = manifest
        self.signed = envelope.signed
        self.has_signature = envelope.has_signature
        self.detached = envelope.detached
        self._payload = envelope.payload
        self._fetch = fetch
        self._verified = verified
        self._hashed: set[int] = set()
        self._loaded: list[tuple[CheckpointEntry, Checkpoint]] = []
        self._pixels: dict[tuple[Media, int], Media] = {}

    # ------------------------------------------------------------------------------------------------ checks

    def check_tokens(self, public_rows: int) -> None:
        """Raises `FormatError` for a token id outside [0, public_rows)."""
        ledgers = [("manifest.ledger", self.manifest.session.ledger)]
        for number, own in enumerate(self.manifest.session.fork_ledgers):
            ledgers.append((f"manifest.fork_points[{number}].ledger", own))
        for number, entry in enumerate(self.manifest.checkpoints):
            ledgers.append((f"manifest.checkpoints[{number}].own_tokens", entry.own_tokens))
        for place, tokens in ledgers:
            outside = np.flatnonzero(tokens >= public_rows)
            if len(outside):
                first = int(outside[0])
                problem = f"is token {int(tokens[first])}, public tokens are [0, {public_rows})"
                raise FormatError(f"{place}[{first}]", problem)

    def check_fit(self, geometry: StateGeometry) -> None:
        """Coverage, layouts and segment sizes must be those of this geometry. `CoverageError` or `FormatError`."""
        for entry in self.manifest.checkpoints:
            check_coverage(entry.coverage, geometry)
        check_layouts(self.manifest.layouts, geometry)
        for entry in self.manifest.checkpoints:
            for name, index in self._segments_of(entry):
                data = data_bytes(at_frontier(self.manifest.layouts[kind_of(name)], entry.frontier))
                size = self.manifest.segments[index].size
                if not data < size <= data + SEGMENT_HEADER_LIMIT:
                    problem = f"is {size}, the tensors of {name} have {data} bytes and a short header"
                    raise FormatError(f"manifest.segments[{index}].size", problem)

    def check_payload(self) -> None:
        """An attached payload must have the sha256 that the table states, segment by segment. `FormatError`."""
        for entry in self.manifest.checkpoints if not self.detached else ():
            for name, index in self._segments_of(entry):
                self.segment(name, index)
        for entry in self.manifest.all_media if not self.detached else ():
            self._media(entry)

    # ------------------------------------------------------------------------------------------------ reading

    def segment(self, name: str, index: int) -> Blob:
        """The bytes of a segment of the table; `name` is for errors. `MissingSegment` or `FormatError`."""
        if not self.detached:
            data = self._attached(index)
            if index not in self._hashed:
                self._check_digest(name, index, data)
                self._hashed.add(index)
            return data
        stated = self.manifest.segments[index]
        known = None if self._verified is None else self._verified(stated.sha256)
        data = known if known is not None or self._fetch is None else self._fetch(stated.sha256)
        if data is None:
            raise MissingSegment(name, stated.sha256)
        if memoryview(data).nbytes != stated.size:
            raise FormatError(f"segment {name}", f"has {memoryview(data).nbytes} bytes, must have {stated.size}")
        if known is None:
            self._check_digest(name, index, data)
        return data

    def tensors(self, entry: CheckpointEntry) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """A checkpoint's segments by name, parsed one by one: those of their layout, with zeros beyond the frontier."""
        for name, index in self._segments_of(entry):
            yield name, self._parsed(entry, name, index)

    def record(self) -> SessionRecord:
        """The session with its media. `MissingSegment` or `FormatError` if one is not what it should be."""
        return self.manifest.session.record(self._placed(self.manifest.media))

    def load(self, memory: StateMemory, entry: CheckpointEntry) -> Checkpoint:
        """Brings a checkpoint into `memory`. It becomes visible after its last byte is in; on any error nothing stays
        allocated. Pages that it has in common with one that was loaded before are shared.

        Raises `FormatError`, `MissingSegment`, `CoverageError` or `CapacityError`.
        """
        shared = self._pages_in_common(memory, entry)
        media = self._placed(self.manifest.media_of(entry))
        slot, pages, draft_pages = memory.take_for_import(entry.frontier, *shared)
        try:
            places = {"target": pages, "draft": draft_pages}
            common = {"target": len(shared[0]), "draft": len(shared[1])}
            for name, index in self._segments_of(entry):
                kind, _, number = name.partition("/")
                if kind == "image":
                    _load_image(memory, slot, entry.frontier, self._parsed(entry, name, index))
                elif int(number) >= common[kind]:
                    page = places[kind][int(number)]
                    _load_page(memory, kind, page, self._parsed(entry, name, index), _columns(name, entry.frontier))
            checkpoint = memory.adopt(self._checkpoint(entry, slot, pages, draft_pages, media))
        except BaseException:
            memory.abandon(slot, pages, draft_pages)
            raise
        self._loaded.append((entry, checkpoint))
        return checkpoint

    # ------------------------------------------------------------------------------------------------ internals

    @cached_property
    def _offsets(self) -> list[int]:
        return list(accumulate((segment.size for segment in self.manifest.segments), initial=0))

    def _attached(self, index: int) -> memoryview:
        return self._payload[self._offsets[index] : self._offsets[index + 1]]

    def _check_digest(self, name: str, index: int, data: Blob) -> None:
        if hashlib.sha256(data).digest() != self.manifest.segments[index].sha256:
            raise FormatError(f"segment {name}", "its bytes do not have the sha256 that the manifest states")

    def _segments_of(self, entry: CheckpointEntry) -> Iterator[tuple[str, int]]:
        for name, index in zip(self.manifest.names_of(entry), entry.segments, strict=True):
            yield name, int(index)

    def _parsed(self, entry: CheckpointEntry, name: str, index: int) -> dict[str, torch.Tensor]:
        place, layout = f"segment {name}", at_frontier(self.manifest.layouts[kind_of(name)], entry.frontier)
        tensors = self._tensors(place, self.segment(name, index), layout)
        columns = _columns(name, entry.frontier)
        if kind_of(name) != "image" and any(bool(tensor[:, columns:].any()) for tensor in tensors.values()):
            raise FormatError(place, f"columns from {columns} on lie beyond the frontier and must be zero")
        return tensors

    def _placed(self, entries: Sequence[MediaEntry]) -> Placed:
        return tuple(PlacedMedia(self._media(entry), entry.placed.starts) for entry in entries)

    def _media(self, entry: MediaEntry) -> Media:
        """An item with its pixels, which are read and hashed once, however often it is shown."""
        stated = entry.placed.media
        found = self._pixels.get((stated, entry.segment))
        if found is None:
            name = f"media/{stated.digest}"
            tensors = self._tensors(f"segment {name}", self.segment(name, entry.segment), entry.layout)
            found = replace(stated, pixels=tensors["pixels"].numpy().tobytes())
            digest = media_digest(found.kind, found.shape, found.pixels)
            if digest != stated.digest:
                raise FormatError(f"segment {name}", f"its pixels have another digest, {digest}")
            self._pixels[stated, entry.segment] = found
        return found

    def _tensors(self, place: str, data: Blob, layout: Layout) -> dict[str, torch.Tensor]:
        try:
            tensors = safetensors.torch.load(bytes(data))
        except (SafetensorError, ValueError, KeyError) as error:
            raise FormatError(place, f"is not safetensors: {error}") from error
        found = {key: (_DTYPES.get(tensor.dtype), tuple(tensor.shape)) for key, tensor in tensors.items()}
        if found != layout:
            raise FormatError(place, f"holds {found}, the manifest states {layout}")
        return tensors

    def _pages_in_common(self, memory: StateMemory, entry: CheckpointEntry) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The longest run of first pages that a checkpoint loaded before, and still kept, has too."""
        best: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        kept = {id(checkpoint) for checkpoint in memory.checkpoints}
        for other, checkpoint in self._loaded:
            if id(checkpoint) not in kept:
                continue
            count = min(entry.frontier, other.frontier) // PAGE_TOKENS
            same = _page_indices(entry)[:, :count] == _page_indices(other)[:, :count]
            run = int(np.logical_and.accumulate(same.all(axis=0)).sum())
            if run > len(best[0]):
                best = checkpoint.pages[:run], checkpoint.draft_pages[:run]
        return best

    def _checkpoint(
        self, entry: CheckpointEntry, slot: int, pages: tuple[int, ...], draft_pages: tuple[int, ...], media: Placed
    ) -> Checkpoint:
        return Checkpoint(
            id=entry.id,
            kind=entry.kind,
            form=entry.coverage.form,
            frontier=entry.frontier,
            ledger=tuple(int(token) for token in self.manifest.ledger_of(entry)),
            coverage=entry.coverage,
            parent=entry.parent,
            fork_origin=entry.fork_origin,
            slot=slot,
            pages=pages,
            draft_pages=draft_pages,
            created=entry.created,
            media=media,
        )


def _page_indices(entry: CheckpointEntry) -> NDArray[np.uint32]:
    """[kinds of pages, pages]: where each page stands in the table."""
    return entry.segments[1:].reshape(-1, pages_for(entry.frontier))


def _columns(name: str, frontier: int) -> int:
    """Positions of a page that lie below the frontier."""
    _, _, number = name.partition("/")
    return min(PAGE_TOKENS, frontier - int(number) * PAGE_TOKENS) if number else 0


def _load_image(memory: StateMemory, slot: int, frontier: int, tensors: dict[str, torch.Tensor]) -> None:
    images = memory.images
    images.clear(slot)
    for plane, tensor in (("gdn", images.gdn), ("conv", images.conv), ("hidden", images.hidden)):
        if plane in tensors:
            tensor[slot].copy_(tensors[plane])
    if "ring_keys" in tensors:
        images.rings.import_slot(slot, frontier, tensors["ring_keys"], tensors["ring_values"])


def _load_page(memory: StateMemory, kind: str, page: int, tensors: dict[str, torch.Tensor], columns: int) -> None:
    pool = memory.draft if kind == "draft" else memory.target
    if pool is not None:
        pool.fill_page(page, tensors["keys"][:, :columns], tensors["values"][:, :columns])
