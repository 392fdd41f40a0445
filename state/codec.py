"""How does a session leave the device? As one document; `state/FORMAT.md` describes it byte by byte."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import safetensors.torch
import torch

from state.begun_image import BegunImage, Tensors
from state.checkpoint import Checkpoint
from state.container import around, seal
from state.coverage import check_coverage
from state.errors import FormatError, MissingSegment
from state.fingerprint import Fingerprint
from state.geometry import PAGE_TOKENS
from state.image_pieces import ImagePart, ImagePiece
from state.layouts import layouts
from state.manifest import Segment, entry_of, write_manifest
from state.media import Media
from state.media_manifest import media_entries
from state.memory import SequenceMemory, StateMemory
from state.pages import PagePool
from state.session_manifest import as_tokens
from state.session_record import SessionRecord

MEDIA_KNOWN = 4096


@dataclass(frozen=True)
class DetachedSegment:
    """A segment that travels apart from its document. `read` gives its bytes, while the checkpoint is kept. `image`: of
    an image that lies on the device alone, its tensors, for who reads it piece by piece."""

    sha256: bytes
    size: int
    read: Callable[[], bytes]
    image: Callable[[], Tensors] | None = None


@dataclass(frozen=True)
class DetachedSession:
    """A document without its payload, and the segments that it names, each once. `checkpoints`: of each of its
    checkpoints the segments' places among them; `media`: those of its media."""

    document: bytes
    segments: tuple[DetachedSegment, ...]
    checkpoints: tuple[tuple[int, ...], ...]
    media: tuple[int, ...] = ()

    def of(self, checkpoint: int) -> list[DetachedSegment]:
        """The segments of the checkpoint of that number."""
        return [self.segments[index] for index in self.checkpoints[checkpoint]]

    def of_media(self) -> list[DetachedSegment]:
        return [self.segments[index] for index in self.media]


@dataclass(frozen=True)
class SessionParts:
    """An attached document: `head`, what `segments` read in their order, `trailer`."""

    head: bytes
    segments: tuple[DetachedSegment, ...]
    trailer: bytes


@dataclass(frozen=True)
class SessionSlice:
    """Some of a document's segments, or the next piece of one."""

    segments: tuple[DetachedSegment, ...]
    piece: ImagePiece | None


class SegmentDigests:
    """Which contents of one memory were hashed before. Not more entries than the memory has places, times the columns
    that a page was hashed at, and the `MEDIA_KNOWN` media that were hashed last."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], tuple[int, dict[int, Segment]]] = {}
        self._media: dict[str, Segment] = {}
        self._begun: BegunImage | None = None

    def of(self, kind: str, place: int, content: int, columns: int, make: Callable[[], Segment]) -> Segment:
        """A page's or image's segment. `content` says which of those that were ever at its place it is, so that it
        names one content for ever: the epoch of a page, the serial of an image's checkpoint."""
        segment = self.known(kind, place, content, columns)
        if segment is None:
            segment = make()
            if self._known.get((kind, place), (None,))[0] != content:
                self._known[kind, place] = (content, {})
            self._known[kind, place][1][columns] = segment
        return segment

    def known(self, kind: str, place: int, content: int, columns: int) -> Segment | None:
        """The same, if it was hashed before."""
        known = self._known.get((kind, place))
        return known[1].get(columns) if known is not None and known[0] == content else None

    def next_piece(
        self, checkpoint: Checkpoint, tensors: Callable[[], Tensors], most: int, after: ImagePart | None
    ) -> ImagePiece:
        """Reads and hashes about `most` bytes more of an image, whose segment is known after its last piece. `after`:
        what who asks has of an image. Only the image that was asked for last is begun: any other starts anew, and so
        does one of which somebody else has got the last piece, who may never come for the next."""
        begun = self._begun
        if begun is None or begun.serial != checkpoint.serial or begun.read != after:
            begun = self._begun = BegunImage(checkpoint.serial, tensors())
        piece = begun.next_piece(most)
        if (digest := piece.sha256) is not None:
            self._begun = None
            self.of("image", checkpoint.slot, checkpoint.serial, 0, lambda: Segment(begun.size, digest))
        return piece

    def known_media(self, digest: str) -> Segment | None:
        return self._media.get(digest)

    def of_media(self, digest: str, make: Callable[[], Segment]) -> Segment:
        segment = self._media.pop(digest, None) or make()
        self._media[digest] = segment
        while len(self._media) > MEDIA_KNOWN:
            del self._media[next(iter(self._media))]
        return segment


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
    table = _Table(memory, SegmentDigests(), keep_bytes=True)
    parts = _parts(memory, checkpoints, record, fingerprint, table, key)
    return b"".join([parts.head, *(segment.read() for segment in parts.segments), parts.trailer])


def encode_sliced(
    memory: StateMemory,
    checkpoints: Sequence[Checkpoint],
    record: SessionRecord,
    fingerprint: Fingerprint,
    key: bytes | None,
    digests: SegmentDigests,
    without: Collection[bytes],
    most: int,
    after: ImagePart | None = None,
) -> SessionParts | SessionSlice:
    """The same document for whoever has its segments `without`: those are not read, and what `digests` knows is not
    hashed. Where about `most` bytes are too few for the others, the first of these, to be asked for again with them
    among `without`; an image comes in pieces, of which who asks has those `after` which it goes on."""
    table = _Table(memory, digests, keep_bytes=True)
    bringing: list[DetachedSegment] = []
    listed, left = 0, most
    for checkpoint in checkpoints:
        memory.check_kept(checkpoint)
        if (piece := table.next_piece(checkpoint, left, after)) is not None:
            return SessionSlice(tuple(bringing), piece)
        for index in table.add(checkpoint):
            if index == listed and table.detached[index].sha256 not in without:
                bringing.append(table.detached[index])
                left -= table.detached[index].size
            listed = len(table.detached)
            if left <= 0:
                return SessionSlice(tuple(bringing), None)
    return _parts(memory, checkpoints, record, fingerprint, table, key)


def encode_detached(
    memory: StateMemory,
    checkpoints: Sequence[Checkpoint],
    record: SessionRecord,
    fingerprint: Fingerprint,
    key: bytes | None = None,
    digests: SegmentDigests | None = None,
    keep_bytes: bool = False,
    hashed: bool = True,
) -> DetachedSession:
    """The same document without its payload. What `digests` knows is neither read nor hashed. `keep_bytes`: what is
    read for its digest is kept, so that `read` of such a segment needs neither the memory nor the checkpoint.

    Not `hashed`: the other segments are read and kept under random names in place of their sha256. Such a document is
    of use only to who gets those segments beside it, and must not be stored.
    """
    table = _Table(memory, digests or SegmentDigests(), keep_bytes, hashed)
    manifest, places, media = _manifest(memory, checkpoints, record, fingerprint, table)
    return DetachedSession(seal(manifest, [], detached=True, key=key), tuple(table.detached), places, media)


def encode_pages(
    memory: StateMemory, sequence: SequenceMemory, pages: range, digests: SegmentDigests
) -> tuple[DetachedSegment, ...]:
    """Segments of a running sequence's pages of these numbers, which must be full (`StateMemory.full_pages`): those of
    the target, then the drafter's, each content once. Later checkpoints of the sequence have the same segments, which
    `digests` knows then."""
    table = _Table(memory, digests, keep_bytes=True)
    for _ in table.add_pages(sequence.pages, sequence.draft_pages, pages.stop * PAGE_TOKENS, pages):
        pass
    return tuple(table.detached)


def encode_carried(
    memory: StateMemory,
    carried: Sequence[tuple[Checkpoint, Sequence[Segment]]],
    record: SessionRecord,
    fingerprint: Fingerprint,
    key: bytes | None = None,
    digests: SegmentDigests | None = None,
) -> DetachedSession:
    """The same of a session whose checkpoints went out before, each with its segments: the record is new, the state is
    what it was then, and nothing of the memory is read. Only segments of media can be."""
    table = _Table(memory, digests or SegmentDigests(), keep_bytes=True)
    places = tuple(tuple(table.add_known(segment) for segment in segments) for _, segments in carried)
    manifest, media = _written([checkpoint for checkpoint, _ in carried], places, record, fingerprint, table)
    return DetachedSession(seal(manifest, [], detached=True, key=key), tuple(table.detached), places, media)


def _parts(
    memory: StateMemory,
    checkpoints: Sequence[Checkpoint],
    record: SessionRecord,
    fingerprint: Fingerprint,
    table: _Table,
    key: bytes | None,
) -> SessionParts:
    manifest, _, _ = _manifest(memory, checkpoints, record, fingerprint, table)
    size = sum(segment.size for segment in table.detached)
    head, trailer = around(manifest, size, detached=False, key=key)
    return SessionParts(head, tuple(table.detached), trailer)


def _manifest(
    memory: StateMemory,
    checkpoints: Sequence[Checkpoint],
    record: SessionRecord,
    fingerprint: Fingerprint,
    table: _Table,
) -> tuple[bytes, tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """The manifest, and where segments are in the table: those of each checkpoint, those of all media."""
    places: list[tuple[int, ...]] = []
    for checkpoint in checkpoints:
        memory.check_kept(checkpoint)
        check_coverage(checkpoint.coverage, memory.geometry)
        places.append(tuple(table.add(checkpoint)))
    manifest, media = _written(checkpoints, places, record, fingerprint, table)
    return manifest, tuple(places), media


def _written(
    checkpoints: Sequence[Checkpoint],
    places: Sequence[tuple[int, ...]],
    record: SessionRecord,
    fingerprint: Fingerprint,
    table: _Table,
) -> tuple[bytes, tuple[int, ...]]:
    """The manifest of checkpoints whose segments are in the table already, and the places of all media."""
    ledger = as_tokens(record.ledger, "manifest.ledger")
    media = media_entries(record.media, table.add_media)
    entries = [
        entry_of(checkpoint, ledger, its, record.media, table.add_media)
        for checkpoint, its in zip(checkpoints, places, strict=True)
    ]
    every = (*media, *(one for entry in entries for one in entry.own_media))
    stated = layouts(table.memory.geometry)
    manifest = write_manifest(dict(fingerprint), record, stated, entries, table.segments, media)
    return manifest, tuple(dict.fromkeys(one.segment for one in every))


class _Table:
    """The segments of all checkpoints and media of a document, each content once, in the order of first use."""

    def __init__(self, memory: StateMemory, digests: SegmentDigests, keep_bytes: bool, hashed: bool = True) -> None:
        self.memory = memory
        self._digests = digests
        self._keep_bytes = keep_bytes
        self._hashed = hashed
        self._by_content: dict[bytes, int] = {}
        self.segments: list[Segment] = []
        self.payload: dict[bytes, bytes] = {}
        self.detached: list[DetachedSegment] = []

    def add(self, checkpoint: Checkpoint) -> Iterator[int]:
        """The indices of a checkpoint's segments, in their order."""
        yield self._index("image", checkpoint.slot, checkpoint.serial, 0, partial(_image, self.memory, checkpoint))
        numbers = range(len(checkpoint.pages))
        yield from self.add_pages(checkpoint.pages, checkpoint.draft_pages, checkpoint.frontier, numbers)

    def next_piece(self, checkpoint: Checkpoint, most: int, after: ImagePart | None) -> ImagePiece | None:
        """Of a checkpoint's image; None where it is known."""
        if self._digests.known("image", checkpoint.slot, checkpoint.serial, 0) is not None:
            return None
        return self._digests.next_piece(checkpoint, partial(_image, self.memory, checkpoint), most, after)

    def add_pages(self, target: Sequence[int], draft: Sequence[int], frontier: int, numbers: range) -> Iterator[int]:
        """The indices of pages of these numbers, of those that hold [0, frontier): the target's, the drafter's."""
        for kind, pool, pages in (
            ("target", self.memory.target if self.memory.geometry.kv_layers else None, target),
            ("draft", self.memory.draft, draft),
        ):
            if pool is None:
                continue
            for number in numbers:
                page, columns = pages[number], min(PAGE_TOKENS, frontier - number * PAGE_TOKENS)
                yield self._index(kind, page, pool.epoch(page), columns, partial(_page, pool, page, columns))

    def _index(self, kind: str, place: int, content: int, columns: int, tensors: Callable[[], Tensors]) -> int:
        read = partial(_serialized, tensors)
        if self._hashed:
            segment = self._digests.of(kind, place, content, columns, partial(self._digested, read))
        else:
            segment = self._digests.known(kind, place, content, columns) or self._named(read)
        return self._listed(segment, read, tensors if kind == "image" else None)

    def add_media(self, media: Media) -> int:
        """The index of an item's pixels."""
        read = partial(_serialized, partial(_pixels, media))
        if self._hashed:
            return self._listed(self._digests.of_media(media.digest, partial(self._digested, read)), read)
        return self._listed(self._digests.known_media(media.digest) or self._named(read), read)

    def add_known(self, segment: Segment) -> int:
        """The index of a segment that went out before, and is not read again."""
        return self._listed(segment, partial(_gone, segment.sha256))

    def _listed(self, segment: Segment, read: Callable[[], bytes], image: Callable[[], Tensors] | None = None) -> int:
        index = self._by_content.setdefault(segment.sha256, len(self.segments))
        if index == len(self.segments):
            self.segments.append(segment)
            kept = segment.sha256 in self.payload
            again = partial(self.payload.__getitem__, segment.sha256) if kept else read
            self.detached.append(DetachedSegment(segment.sha256, segment.size, again, None if kept else image))
        return index

    def _named(self, read: Callable[[], bytes]) -> Segment:
        data, name = read(), secrets.token_bytes(32)
        self.payload[name] = data
        return Segment(len(data), name)

    def _digested(self, read: Callable[[], bytes]) -> Segment:
        data = read()
        digest = hashlib.sha256(data).digest()
        if self._keep_bytes:
            self.payload.setdefault(digest, data)
        return Segment(len(data), digest)


def _serialized(tensors: Callable[[], Tensors]) -> bytes:
    return safetensors.torch.save({name: tensor.cpu().contiguous() for name, tensor in tensors().items()})


def _image(memory: StateMemory, checkpoint: Checkpoint) -> Tensors:
    images, slot = memory.images, checkpoint.slot
    planes = {"gdn": images.gdn[slot], "conv": images.conv[slot], "hidden": images.hidden[slot]}
    if memory.geometry.ring_layers:
        planes["ring_keys"], planes["ring_values"] = images.rings.export_slot(slot, checkpoint.frontier)
    return {name: planes[name] for name in layouts(memory.geometry)["image"]}


def _pixels(media: Media) -> Tensors:
    if not media.pixels:
        raise FormatError(f"media {media.digest}", "is without its pixels")
    return {"pixels": torch.frombuffer(bytearray(media.pixels), dtype=torch.uint8).view(media.shape)}


def _gone(sha256: bytes) -> bytes:
    raise MissingSegment("written before", sha256)


def _page(pool: PagePool, page: int, columns: int) -> Tensors:
    keys, values = pool.keys[page], pool.values[page]
    if columns < PAGE_TOKENS:
        # Beyond the frontier lies what another sequence or round left there: it must not travel.
        keys, values = keys.clone(), values.clone()
        keys[:, columns:] = 0
        values[:, columns:] = 0
    return {"keys": keys, "values": values}
