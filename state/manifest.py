"""What does an encoded checkpoint say about itself? The manifest: typed, and read without trust.

`state/FORMAT.md` describes the fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from state.coverage import FORMS, Coverage
from state.errors import FormatError
from state.geometry import PAGE_TOKENS
from state.strict_msgpack import pack, unpack

Layouts = Mapping[str, Mapping[str, tuple[str, tuple[int, ...]]]]
"""Per kind of segment (image, target, draft): its tensors by name, each (dtype, shape)."""

_LARGEST = 1 << 53
_KEYS = {
    "fingerprint",
    "checkpoint",
    "kind",
    "form",
    "frontier",
    "coverage",
    "ledger",
    "lineage",
    "positions",
    "page_tokens",
    "created",
    "layouts",
    "segments",
    "record",
}


@dataclass(frozen=True)
class Segment:
    """One safetensors document: bytes [offset, offset + size) of the payload, and their digest, 32 bytes."""

    name: str
    offset: int
    size: int
    sha256: bytes


@dataclass(frozen=True)
class Manifest:
    """All facts of an encoded checkpoint. `coverage` holds form, frontier and the ledger's length too."""

    fingerprint: dict[str, str | int]
    checkpoint: str
    kind: str
    coverage: Coverage
    ledger: tuple[int, ...]
    parent: str | None
    fork_origin: str | None
    created: float
    layouts: Layouts
    segments: tuple[Segment, ...]
    record: dict[str, Any]


def write_manifest(manifest: Manifest) -> bytes:
    """Encodes a manifest. Raises `FormatError`, naming the element of a record that cannot be encoded."""
    coverage = manifest.coverage
    return pack(
        {
            "fingerprint": dict(manifest.fingerprint),
            "checkpoint": manifest.checkpoint,
            "kind": manifest.kind,
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
            "ledger": np.asarray(manifest.ledger, dtype="<u4").tobytes(),
            "lineage": {"parent": manifest.parent, "fork_origin": manifest.fork_origin},
            "positions": {"rope_delta": 0},
            "page_tokens": PAGE_TOKENS,
            "created": manifest.created,
            "layouts": {
                kind: {name: [dtype, list(shape)] for name, (dtype, shape) in tensors.items()}
                for kind, tensors in manifest.layouts.items()
            },
            "segments": [
                {"name": segment.name, "offset": segment.offset, "size": segment.size, "sha256": segment.sha256}
                for segment in manifest.segments
            ],
            "record": manifest.record,
        },
        "manifest",
    )


def parse_manifest(data: bytes, newer_minor: bool) -> Manifest:
    """Decodes and types a manifest; says nothing yet about its fit to a geometry or payload. Raises `FormatError`.

    `newer_minor`: the format's minor version is newer than ours, so top-level fields that we do not know are ignored.
    """
    root = _Fields(unpack(data, "manifest"), "manifest")
    if not newer_minor:
        root.allow_only(_KEYS)
    ledger_bytes = root.octets("ledger")
    if len(ledger_bytes) % 4:
        raise FormatError("manifest.ledger", f"has {len(ledger_bytes)} bytes, must be a multiple of 4")
    ledger = tuple(cast(list[int], np.frombuffer(ledger_bytes, dtype="<u4").tolist()))
    lineage = root.child("lineage")
    rope_delta = root.child("positions").whole("rope_delta", lowest=-_LARGEST)
    if rope_delta != 0:
        raise FormatError("manifest.positions.rope_delta", f"is {rope_delta}, must be 0: only text is supported")
    page_tokens = root.whole("page_tokens")
    if page_tokens != PAGE_TOKENS:
        raise FormatError("manifest.page_tokens", f"is {page_tokens}, must be {PAGE_TOKENS}")
    return Manifest(
        fingerprint=root.child("fingerprint").facts(),
        checkpoint=root.checkpoint_id("checkpoint"),
        kind=root.label("kind"),
        coverage=_parse_coverage(root, len(ledger)),
        ledger=ledger,
        parent=lineage.optional_checkpoint_id("parent"),
        fork_origin=lineage.optional_checkpoint_id("fork_origin"),
        created=root.seconds("created"),
        layouts=_parse_layouts(root.child("layouts")),
        segments=tuple(_parse_segment(entry) for entry in root.children("segments")),
        record=root.child("record").values,
    )


def _parse_coverage(root: _Fields, ledger_tokens: int) -> Coverage:
    form = root.label("form")
    if form not in FORMS:
        raise FormatError("manifest.form", f"is {form!r}, must be one of {', '.join(FORMS)}")
    planes = root.child("coverage")
    return Coverage(
        form=form,
        frontier=root.whole("frontier"),
        ledger_tokens=ledger_tokens,
        target_kv=planes.whole("target_kv"),
        gdn=planes.whole("gdn"),
        conv=planes.whole("conv"),
        hidden=planes.whole("hidden"),
        ring=planes.optional_interval("ring"),
        draft_kv=None if planes.raw("draft_kv") is None else planes.whole("draft_kv"),
    )


def _parse_layouts(root: _Fields) -> dict[str, dict[str, tuple[str, tuple[int, ...]]]]:
    layouts: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    for kind in root.values:
        tensors = root.child(kind)
        layouts[kind] = {name: tensors.layout(name) for name in tensors.values}
    return layouts


def _parse_segment(entry: _Fields) -> Segment:
    digest = entry.octets("sha256")
    if len(digest) != 32:
        raise FormatError(f"{entry.place}.sha256", f"has {len(digest)} bytes, must have 32")
    return Segment(entry.label("name"), entry.whole("offset"), entry.whole("size"), digest)


class _Fields:
    """A decoded map whose fields are taken out with the type that they must have."""

    def __init__(self, values: dict[str, Any], place: str) -> None:
        self.values = values
        self.place = place

    def raw(self, name: str) -> object:
        if name not in self.values:
            raise FormatError(f"{self.place}.{name}", "is missing")
        return self.values[name]

    def allow_only(self, names: set[str]) -> None:
        for name in self.values:
            if name not in names:
                raise FormatError(f"{self.place}.{name}", "is not a field of this format version")

    def _refuse(self, name: str, wanted: str) -> FormatError:
        return FormatError(f"{self.place}.{name}", f"is {_short(self.raw(name))}, must be {wanted}")

    def whole(self, name: str, lowest: int = 0) -> int:
        value = self.raw(name)
        if type(value) is not int or not lowest <= value < _LARGEST:
            raise self._refuse(name, f"a whole number from {lowest} to 2^53")
        return value

    def seconds(self, name: str) -> float:
        value = self.raw(name)
        if type(value) not in (int, float) or not 0 <= (number := float(cast(float, value))) < _LARGEST:
            raise self._refuse(name, "seconds since 1970")
        return number

    def octets(self, name: str) -> bytes:
        value = self.raw(name)
        if not isinstance(value, bytes):
            raise self._refuse(name, "bytes")
        return value

    def label(self, name: str) -> str:
        value = self.raw(name)
        if not isinstance(value, str) or not 1 <= len(value) <= 64:
            raise self._refuse(name, "text of 1 to 64 characters")
        return value

    def checkpoint_id(self, name: str) -> str:
        value = self.raw(name)
        if not isinstance(value, str) or len(value) != 32 or set(value) - set("0123456789abcdef"):
            raise self._refuse(name, "32 hex digits")
        return value

    def optional_checkpoint_id(self, name: str) -> str | None:
        return None if self.raw(name) is None else self.checkpoint_id(name)

    def optional_interval(self, name: str) -> tuple[int, int] | None:
        value = self.raw(name)
        if value is None:
            return None
        pair = _whole_numbers(value)
        if pair is None or len(pair) != 2:
            raise self._refuse(name, "nil or [start, end]")
        return pair[0], pair[1]

    def layout(self, name: str) -> tuple[str, tuple[int, ...]]:
        value = self.raw(name)
        if isinstance(value, list) and len(cast(list[object], value)) == 2:
            dtype, shape = cast(list[object], value)
            sizes = _whole_numbers(shape)
            if isinstance(dtype, str) and sizes is not None:
                return dtype, sizes
        raise self._refuse(name, "[dtype, shape]")

    def facts(self) -> dict[str, str | int]:
        for name, value in self.values.items():
            if type(value) not in (str, int):
                raise self._refuse(name, "text or a whole number")
        return self.values

    def child(self, name: str) -> _Fields:
        value = self.raw(name)
        if not isinstance(value, dict):
            raise self._refuse(name, "a map")
        return _Fields(cast(dict[str, Any], value), f"{self.place}.{name}")

    def children(self, name: str) -> list[_Fields]:
        value = self.raw(name)
        if not isinstance(value, list):
            raise self._refuse(name, "a list of maps")
        entries: list[_Fields] = []
        for index, entry in enumerate(cast(list[object], value)):
            if not isinstance(entry, dict):
                raise FormatError(f"{self.place}.{name}[{index}]", f"is {_short(entry)}, must be a map")
            entries.append(_Fields(cast(dict[str, Any], entry), f"{self.place}.{name}[{index}]"))
        return entries


def _whole_numbers(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    numbers = cast(list[object], value)
    if all(type(number) is int and 0 <= number < _LARGEST for number in numbers):
        return tuple(cast(list[int], numbers))
    return None


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
