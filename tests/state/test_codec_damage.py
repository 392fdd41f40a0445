"""Damaged and cut blobs: a typed error names the place, and nothing stays allocated."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from state.codec import decode_checkpoint, read_manifest
from state.errors import FormatError
from tests.state.blobs import HEADER_BYTES, Parts, put_together
from tests.state.refusals import good_blob, good_parts, refused
from tests.state.samples import (
    FINGERPRINT,
    MIXED,
    PUBLIC_ROWS,
    memory_of,
)

# ------------------------------------------------------------------------------------------------ damage in transit


@dataclass(frozen=True)
class Region:
    start: int
    end: int
    places: tuple[str, ...]


def regions() -> dict[str, Region]:
    """Every byte of the blob belongs to one of these; damage there must be reported under one of `places`."""
    blob, parts = good_blob(), good_parts()
    manifest_size = struct.unpack_from("<I", blob, 12)[0]
    payload = HEADER_BYTES + manifest_size
    known = {
        "magic": Region(0, 8, ("header.magic",)),
        "version": Region(8, 12, ("header.version", "trailer")),
        "manifest size": Region(12, 16, ("header.manifest_size", "trailer")),
        "size": Region(16, 24, ("header.size",)),
        "manifest": Region(HEADER_BYTES, payload, ("trailer",)),
        "trailer": Region(len(blob) - 32, len(blob), ("trailer",)),
    }
    for entry in parts.manifest["segments"]:
        start = payload + entry["offset"]
        known[entry["name"]] = Region(start, start + entry["size"], (f"segment {entry['name']}",))
    return known


def test_the_regions_cover_every_byte() -> None:
    spans = sorted((region.start, region.end) for region in regions().values())
    assert spans[0][0] == 0 and spans[-1][1] == len(good_blob())
    assert all(left[1] == right[0] for left, right in pairwise(spans))


@pytest.mark.parametrize("name", regions())
def test_a_flipped_bit_is_found_and_its_place_named(name: str) -> None:
    region = regions()[name]
    step = max(1, (region.end - region.start) // 24)
    for at in [*range(region.start, region.end, step), region.end - 1]:
        for bit in (0, 7):
            damaged = bytearray(good_blob())
            damaged[at] ^= 1 << bit
            assert refused(damaged).place in region.places, f"byte {at}, bit {bit}"


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_replaced_stretch_is_refused(data: st.DataObject) -> None:
    blob = good_blob()
    start = data.draw(st.integers(0, len(blob) - 1))
    stretch = data.draw(st.binary(min_size=1, max_size=40))
    damaged = (blob[:start] + stretch + blob[start + len(stretch) :])[: len(blob)]
    if damaged != blob:
        refused(damaged)


def test_every_way_to_cut_a_blob_is_refused() -> None:
    blob = good_blob()
    cuts = {0, 1, 7, 8, 23, 24, 55, 56, len(blob) - 1, len(blob) - 31, len(blob) - 32, len(blob) - 33}
    for region in regions().values():
        cuts |= {region.start, region.start + 1, (region.start + region.end) // 2, region.end - 1}
    for cut in sorted(cuts):
        error = refused(blob[:cut])
        assert error.place == ("header" if cut < HEADER_BYTES + 32 else "header.size"), cut


def test_bytes_that_follow_or_precede_are_refused() -> None:
    assert refused(good_blob() + b"\0").place == "header.size"
    assert refused(good_blob() * 2).place == "header.size"
    assert refused(b"\0" + good_blob()).place == "header.magic"


def test_a_blob_without_its_middle_is_refused_even_if_the_size_was_mended() -> None:
    blob = good_blob()
    region = regions()["target/1"]
    shorter = bytearray(blob[: region.start] + blob[region.end :])
    struct.pack_into("<Q", shorter, 16, len(shorter))
    assert refused(shorter).place == "trailer"


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    refused(data)
    manifest = Parts({}, {}, manifest_bytes=data)
    refused(put_together(manifest))
    with pytest.raises(FormatError):
        read_manifest(put_together(manifest))


def test_a_newer_major_version_is_refused_and_a_newer_minor_one_is_read() -> None:
    parts = good_parts()
    error = refused(put_together(replace(parts, version=(2, 0))))
    assert (error.place, error.problem) == ("header.version", "is 2.0, this reader knows 1.x")
    newer = replace(parts.with_manifest(hints={"a": 1}), version=(1, 9))
    decode_checkpoint(memory_of(MIXED), put_together(newer), FINGERPRINT, PUBLIC_ROWS)
    assert refused(put_together(parts.with_manifest(hints={"a": 1}))).place == "manifest.hints"


def test_the_trailer_is_not_taken_from_another_blob() -> None:
    parts = good_parts()
    blob = put_together(parts.with_manifest(kind="explicit"))
    assert hashlib.sha256(blob[:-32]).digest() != blob[-32:]
    assert refused(blob[:-32] + good_blob()[-32:]).place == "trailer"
