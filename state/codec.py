"""How does a session leave the device? As one document; `state/FORMAT.md` describes it byte by byte."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import safetensors.torch
import torch

from state.checkpoint import Checkpoint
from state.container import seal
from state.coverage import check_coverage
from state.fingerprint import Fingerprint
from state.geometry import PAGE_TOKENS
from state.layouts import layouts
from state.manifest import CheckpointEntry, Segment, entry_of, write_manifest
from state.memory import StateMemory
from state.pages import PagePool
from state.session_manifest import as_tokens
from state.session_record import SessionRecord

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class DetachedSegment:
    """A segment that travels apart from its document. `read` gives its bytes, while the checkpoint is kept."""

    sha256: bytes
    size: int
    read: Callable[[], bytes]


def encode_session(
    memory: StateMemory,
    checkpoints: Sequence[Checkpoint],
    record: SessionRecord,
    fingerprint: Fingerprint,
    key: bytes | None = None,
) -> bytes:
    """The document of a session and of checkpoints that lie in `memory`. The same state gives the same bytes.

    `key`: the document is signed with it. Raises `FormatError` for a record that cannot travel, naming the element.
    """
    table = _Table(memory, keep_bytes=True)
    manifest = _manifest(memory, checkpoints, record, fingerprint, table)
    return seal(manifest, table.payload, detached=False, key=key)


def encode_detached(
    memory: StateMemory,
    checkpoints: Sequence[Checkpoint],
    record: SessionRecord,
    fingerprint: Fingerprint,
    key: bytes | None = None,
) -> tuple[bytes, list[DetachedSegment]]:
    """The same document without its payload, and the segments that it names, each once."""
    table = _Table(memory, keep_bytes=False)
    manifest = _manifest(memory, checkpoints, record, fingerprint, table)
    return seal(manifest, [], detached=True, key=key), table.detached


def _manifest(
    memory: StateMemory,
    checkpoints: Sequence[Checkpoint],
    record: SessionRecord,
    fingerprint: Fingerprint,
    table: _Table,
) -> bytes:
    entries: list[CheckpointEntry] = []
    ledger = as_tokens(record.ledger, "manifest.ledger")
    for checkpoint in checkpoints:
        memory.check_kept(checkpoint)
        check_coverage(checkpoint.coverage, memory.geometry)
        entries.append(entry_of(checkpoint, ledger, table.add(checkpoint)))
    return write_manifest(dict(fingerprint), record, layouts(memory.geometry), entries, table.segments)


class _Table:
    """The segments of all checkpoints of a document, each content once, in the order of first use."""

    def __init__(self, memory: StateMemory, keep_bytes: bool) -> None:
        self._memory = memory
        self._keep_bytes = keep_bytes
        self._by_content: dict[bytes, int] = {}
        self._by_page: dict[tuple[str, int, int], int] = {}
        self.segments: list[Segment] = []
        self.payload: list[bytes] = []
        self.detached: list[DetachedSegment] = []

    def add(self, checkpoint: Checkpoint) -> list[int]:
        """The indices of a checkpoint's segments, in their order."""
        indices = [self._index(partial(_image, self._memory, checkpoint))]
        for kind, pool, pages in (
            ("target", self._memory.target if self._memory.geometry.kv_layers else None, checkpoint.pages),
            ("draft", self._memory.draft, checkpoint.draft_pages),
        ):
            if pool is not None:
                indices += self._pages(kind, pool, pages, checkpoint.frontier)
        return indices

    def _pages(self, kind: str, pool: PagePool, pages: Sequence[int], frontier: int) -> Iterator[int]:
        for number, page in enumerate(pages):
            columns = min(PAGE_TOKENS, frontier - number * PAGE_TOKENS)
            # A page that checkpoints share is hashed once.
            place = (kind, page, columns)
            if place not in self._by_page:
                self._by_page[place] = self._index(partial(_page, pool, page, columns))
            yield self._by_page[place]

    def _index(self, tensors: Callable[[], Tensors]) -> int:
        read = partial(_serialized, tensors)
        data = read()
        digest = hashlib.sha256(data).digest()
        index = self._by_content.setdefault(digest, len(self.segments))
        if index == len(self.segments):
            self.segments.append(Segment(len(data), digest))
            if self._keep_bytes:
                self.payload.append(data)
            else:
                self.detached.append(DetachedSegment(digest, len(data), read))
        return index


def _serialized(tensors: Callable[[], Tensors]) -> bytes:
    return safetensors.torch.save({name: tensor.cpu().contiguous() for name, tensor in tensors().items()})


def _image(memory: StateMemory, checkpoint: Checkpoint) -> Tensors:
    images, slot = memory.images, checkpoint.slot
    planes = {"gdn": images.gdn[slot], "conv": images.conv[slot], "hidden": images.hidden[slot]}
    if memory.geometry.ring_layers:
        planes["ring_keys"], planes["ring_values"] = images.rings.export_slot(slot, checkpoint.frontier)
    return {name: planes[name] for name in layouts(memory.geometry)["image"]}


def _page(pool: PagePool, page: int, columns: int) -> Tensors:
    keys, values = pool.keys[page], pool.values[page]
    if columns < PAGE_TOKENS:
        # Beyond the frontier lies what another sequence or round left there: it must not travel.
        keys, values = keys.clone(), values.clone()
        keys[:, columns:] = 0
        values[:, columns:] = 0
    return {"keys": keys, "values": values}
