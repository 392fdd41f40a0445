"""What does a session document say about itself? The manifest: typed, and read without trust.

`state/FORMAT.md` describes the fields; `state/session_manifest.py` is the part that is about the session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from state.checkpoint import Checkpoint
from state.coverage import FORMS, Coverage
from state.errors import FormatError
from state.fields import LARGEST, Fields, Tokens
from state.geometry import PAGE_TOKENS, pages_for
from state.layouts import SEGMENT_HEADER_LIMIT, Layouts, segment_names
from state.media import Media, Placed, begun, rope_delta, shared_tokens
from state.media_manifest import MediaEntry, bare, check_places, media_entries, media_fields, parse_media, shown
from state.session_manifest import (
    LEDGER_LIMIT,
    SESSION_FIELDS,
    SessionFacts,
    as_tokens,
    parse_session,
    session_fields,
)
from state.session_record import SessionRecord
from state.strict_msgpack import pack, unpack

CHECKPOINT_LIMIT = 64
"""Checkpoints of one document."""

_FIELDS = {
    *SESSION_FIELDS,
    "fingerprint",
    "page_tokens",
    "positions",
    "media",
    "layouts",
    "checkpoints",
    "segments",
}
_CHECKPOINT_FIELDS = {
    "id",
    "kind",
    "form",
    "frontier",
    "coverage",
    "lineage",
    "created",
    "shared_tokens",
    "own_tokens",
    "own_media",
    "segments",
}
_PLANES = ("target_kv", "gdn", "conv", "hidden", "ring", "draft_kv")


@dataclass(frozen=True)
class Segment:
    """One safetensors document, named by its content. `sha256`: 32 bytes."""

    size: int
    sha256: bytes


@dataclass(frozen=True, eq=False)
class CheckpointEntry:
    """One checkpoint of the session. `coverage` holds form, frontier and the ledger's length too.

    Its ledger is the first `shared_tokens` of the session's ledger, then `own_tokens`; `own_media` begin in these.
    `segments`: indices into the segment table: the image, then each page of the target's, then each of the drafter's.
    """

    id: str
    kind: str
    coverage: Coverage
    parent: str | None
    fork_origin: str | None
    created: float
    shared_tokens: int
    own_tokens: Tokens
    segments: Tokens
    own_media: tuple[MediaEntry, ...] = ()

    @property
    def frontier(self) -> int:
        return self.coverage.frontier


@dataclass(frozen=True, eq=False)
class Manifest:
    """All facts of a session document. `media`: of the session's ledger."""

    fingerprint: dict[str, str | int]
    session: SessionFacts
    layouts: Layouts
    checkpoints: tuple[CheckpointEntry, ...]
    segments: tuple[Segment, ...]
    media: tuple[MediaEntry, ...] = ()

    def ledger_of(self, entry: CheckpointEntry) -> Tokens:
        """All tokens of a checkpoint, u32."""
        return np.concatenate((self.session.ledger[: entry.shared_tokens], entry.own_tokens))

    def media_of(self, entry: CheckpointEntry) -> tuple[MediaEntry, ...]:
        """All media of a checkpoint's ledger."""
        return shown(self.media, entry.shared_tokens, entry.own_media, entry.coverage.ledger_tokens)

    @property
    def all_media(self) -> Iterator[MediaEntry]:
        """In the order of their segments: the ledger's, then each checkpoint's own."""
        yield from self.media
        for entry in self.checkpoints:
            yield from entry.own_media

    def names_of(self, entry: CheckpointEntry) -> list[str]:
        """The names of a checkpoint's segments, in the order of `entry.segments`."""
        return segment_names(self.layouts, entry.frontier)


def entry_of(
    checkpoint: Checkpoint,
    session_ledger: Tokens,
    segments: Sequence[int],
    session_media: Placed = (),
    media_index: Callable[[Media], int] = lambda media: 0,
) -> CheckpointEntry:
    """A checkpoint's entry in a session with that ledger and these media in it. `media_index`: see `media_entries`."""
    own = as_tokens(checkpoint.ledger, f"checkpoint {checkpoint.id}.ledger")
    shared = _common(own, session_ledger)
    differing = shared_tokens(checkpoint.media, begun(session_media, len(own)))
    shared = shared if differing is None else min(shared, differing)
    return CheckpointEntry(
        id=checkpoint.id,
        kind=checkpoint.kind,
        coverage=checkpoint.coverage,
        parent=checkpoint.parent,
        fork_origin=checkpoint.fork_origin,
        created=checkpoint.created,
        shared_tokens=shared,
        own_tokens=own[shared:],
        segments=np.asarray(segments, dtype="<u4"),
        own_media=media_entries(tuple(one for one in checkpoint.media if one.start >= shared), media_index),
    )


def _common(left: Tokens, right: Tokens) -> int:
    """Length of the longest common prefix."""
    length = min(len(left), len(right))
    differing = np.flatnonzero(left[:length] != right[:length])
    return int(differing[0]) if len(differing) else length


# --------------------------------------------------------------------------------------------------------- writing


def write_manifest(
    fingerprint: dict[str, str | int],
    record: SessionRecord,
    layouts: Layouts,
    checkpoints: Sequence[CheckpointEntry],
    segments: Sequence[Segment],
    media: Sequence[MediaEntry] = (),
) -> bytes:
    """Encodes a manifest, and reads it back: what a reader would refuse is refused here, by name (`FormatError`)."""
    data = pack(
        {
            **session_fields(record),
            "fingerprint": fingerprint,
            "page_tokens": PAGE_TOKENS,
            "positions": {"rope_delta": rope_delta(bare(media))},
            "media": media_fields(media),
            "layouts": {
                kind: {name: [dtype, list(shape)] for name, (dtype, shape) in tensors.items()}
                for kind, tensors in layouts.items()
            },
            "checkpoints": [_checkpoint_fields(entry) for entry in checkpoints],
            "segments": [{"size": segment.size, "sha256": segment.sha256} for segment in segments],
        },
        "manifest",
    )
    parse_manifest(data, newer_minor=False)
    return data


def _checkpoint_fields(entry: CheckpointEntry) -> dict[str, Any]:
    coverage = entry.coverage
    media = {"own_media": media_fields(entry.own_media)} if entry.own_media else {}
    return media | {
        "id": entry.id,
        "kind": entry.kind,
        "form": coverage.form,
        "frontier": coverage.frontier,
        "coverage": {
            "target_kv": coverage.target_kv,
            "gdn": coverage.gdn,
            "conv": coverage.conv,
            "hidden": coverage.hidden,
            "ring": None if coverage.ring is None else list(coverage.ring),
            "draft_kv": coverage.draft_kv,
        },
        "lineage": {"parent": entry.parent, "fork_origin": entry.fork_origin},
        "created": entry.created,
        "shared_tokens": entry.shared_tokens,
        "own_tokens": entry.own_tokens.tobytes(),
        "segments": entry.segments.tobytes(),
    }


# --------------------------------------------------------------------------------------------------------- reading


def parse_manifest(data: bytes, newer_minor: bool) -> Manifest:
    """Decodes and types a manifest; says nothing yet about its fit to a geometry or payload. Raises `FormatError`.

    `newer_minor`: the format's minor version is newer than ours, so fields that we do not know are ignored.
    """
    root = Fields(unpack(data, "manifest"), "manifest", ignore_unknown=newer_minor)
    root.allow_only(_FIELDS)
    page_tokens = root.whole("page_tokens")
    if page_tokens != PAGE_TOKENS:
        raise FormatError("manifest.page_tokens", f"is {page_tokens}, must be {PAGE_TOKENS}")
    positions = root.child("positions")
    positions.allow_only({"rope_delta"})
    stated_delta = positions.whole("rope_delta", lowest=-LARGEST)
    media = parse_media(root, "media")
    if stated_delta != rope_delta(bare(media)):
        problem = f"is {stated_delta}, must be {rope_delta(bare(media))} for these media"
        raise FormatError("manifest.positions.rope_delta", problem)
    session = parse_session(root)
    check_places("manifest.media", bare(media), session.ledger)
    layouts = _parse_layouts(root.child("layouts"))
    segments = tuple(_parse_segment(entry) for entry in root.children("segments"))
    entries = root.children("checkpoints", CHECKPOINT_LIMIT)
    checkpoints = tuple(_parse_checkpoint(entry, session.ledger, layouts, media) for entry in entries)
    _check_identities(checkpoints)
    manifest = Manifest(root.child("fingerprint").facts(), session, layouts, checkpoints, segments, media)
    _check_table(manifest)
    _check_media(manifest)
    return manifest


def _parse_checkpoint(
    entry: Fields, session_ledger: Tokens, layouts: Layouts, media: Sequence[MediaEntry]
) -> CheckpointEntry:
    entry.allow_only(_CHECKPOINT_FIELDS)
    lineage = entry.child("lineage")
    lineage.allow_only({"parent", "fork_origin"})
    shared = entry.whole("shared_tokens", limit=len(session_ledger) + 1)
    own = entry.words("own_tokens", LEDGER_LIMIT)
    own_media = parse_media(entry, "own_media") if "own_media" in entry.values else ()
    # where other media begin, equal tokens are not the same
    parting = any(one.placed.start == shared for one in (*media, *own_media))
    if len(own) and shared < len(session_ledger) and own[0] == session_ledger[shared] and not parting:
        raise FormatError(f"{entry.place}.own_tokens", f"begins with token {shared} of the session's ledger: share it")
    coverage = _parse_coverage(entry, shared + len(own))
    if coverage.frontier > coverage.ledger_tokens:
        raise FormatError(f"{entry.place}.frontier", f"is {coverage.frontier} of {coverage.ledger_tokens} tokens")
    pages = pages_for(coverage.frontier) * sum(kind in layouts for kind in ("target", "draft"))
    segments = entry.words("segments", 1 + pages)
    if len(segments) != 1 + pages:
        raise FormatError(f"{entry.place}.segments", f"has {len(segments)} entries, must have {1 + pages}")
    return CheckpointEntry(
        id=entry.hex_id("id"),
        kind=entry.text("kind"),
        coverage=coverage,
        parent=lineage.optional_hex_id("parent"),
        fork_origin=lineage.optional_hex_id("fork_origin"),
        created=entry.number("created", "seconds since 1970"),
        shared_tokens=shared,
        own_tokens=own,
        segments=segments,
        own_media=own_media,
    )


def _parse_coverage(entry: Fields, ledger_tokens: int) -> Coverage:
    planes = entry.child("coverage")
    planes.allow_only(_PLANES)
    form = entry.one_of("form", FORMS)
    return Coverage(
        form=next(known for known in FORMS if known == form),
        frontier=entry.whole("frontier"),
        ledger_tokens=ledger_tokens,
        target_kv=planes.whole("target_kv"),
        gdn=planes.whole("gdn"),
        conv=planes.whole("conv"),
        hidden=planes.whole("hidden"),
        ring=planes.optional_pair("ring"),
        draft_kv=planes.optional_whole("draft_kv"),
    )


def _parse_layouts(root: Fields) -> Layouts:
    layouts: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    for kind in root.values:
        tensors = root.child(kind)
        layouts[kind] = {name: tensors.layout(name) for name in tensors.values}
    return layouts


def _parse_segment(entry: Fields) -> Segment:
    entry.allow_only({"size", "sha256"})
    return Segment(entry.whole("size"), entry.octets("sha256", 32))


def _check_identities(checkpoints: Sequence[CheckpointEntry]) -> None:
    numbers: dict[str, int] = {}
    for number, entry in enumerate(checkpoints):
        first = numbers.setdefault(entry.id, number)
        if first != number:
            raise FormatError(f"manifest.checkpoints[{number}].id", f"is that of checkpoints[{first}] too")


def _check_media(manifest: Manifest) -> None:
    """They stand where their tokens are, and their segments have room for their pixels."""
    for number, entry in enumerate(manifest.checkpoints):
        place = f"manifest.checkpoints[{number}].own_media"
        early = next((one for one in entry.own_media if one.placed.start < entry.shared_tokens), None)
        if early is not None:
            problem = f"begin at {early.placed.start}, must be from {entry.shared_tokens} on: the others are shared"
            raise FormatError(place, problem)
        if manifest.media or entry.own_media:
            check_places(place, bare(manifest.media_of(entry)), manifest.ledger_of(entry))
    for entry in manifest.all_media:
        size = manifest.segments[entry.segment].size
        if not entry.data_bytes < size <= entry.data_bytes + SEGMENT_HEADER_LIMIT:
            problem = f"is {size}, the pixels of media {entry.placed.media.digest} have {entry.data_bytes} bytes"
            raise FormatError(f"manifest.segments[{entry.segment}].size", f"{problem} and a short header")


def _check_table(manifest: Manifest) -> None:
    """Each segment stands in the table once, at the place of its first use; each is used."""
    segments = manifest.segments
    uses = [
        (f"manifest.checkpoints[{number}].segments[{place}]", index)
        for number, entry in enumerate(manifest.checkpoints)
        for place, index in enumerate(cast(list[int], entry.segments.tolist()))
    ]
    uses += [(f"manifest.media {entry.placed.media.digest}", entry.segment) for entry in manifest.all_media]
    used = 0
    for place, index in uses:
        if index > used or index >= len(segments):
            raise FormatError(place, f"is {index}, must be at most {min(used, len(segments) - 1)}")
        used += index == used
    if used < len(segments):
        raise FormatError(f"manifest.segments[{used}]", "belongs to no checkpoint or media")
    if len({segment.sha256 for segment in segments}) < len(segments):
        raise FormatError("manifest.segments", "hold two entries of the same sha256")
