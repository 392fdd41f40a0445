"""Damaged and cut documents: a typed error names the place, and nothing stays allocated."""

from __future__ import annotations

import hashlib
import struct
import tracemalloc
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from state.codec import encode_session
from state.document import open_document
from state.errors import FormatError, SignatureError, StateError
from state.session_manifest import LEDGER_LIMIT
from tests.state.altering import altered
from tests.state.blobs import HEADER_BYTES, Parts, put_together, take_apart
from tests.state.refusals import FRONTIER, brought_in, good_blob, good_parts, refused
from tests.state.samples import FINGERPRINT, MIXED, checkpoint_at, everything_free, memory_of, record_of

# ------------------------------------------------------------------------------------------------ damage in transit


@dataclass(frozen=True)
class Region:
    start: int
    end: int
    places: tuple[str, ...]


def regions() -> dict[str, Region]:
    """Every byte of the document belongs to one of these; damage there must be reported under one of `places`."""
    blob, parts = good_blob(), good_parts()
    manifest_size = struct.unpack_from("<Q", blob, 16)[0]
    start = HEADER_BYTES + manifest_size
    known = {
        "magic": Region(0, 8, ("header.magic",)),
        "version": Region(8, 12, ("header.version", "trailer")),
        # A document that claims a signature has less room for its manifest, or another digest.
        "flags": Region(12, 16, ("header.flags", "trailer")),
        "manifest size": Region(16, 24, ("header.manifest_size", "trailer")),
        "size": Region(24, 32, ("header.size",)),
        "manifest": Region(HEADER_BYTES, start, ("trailer",)),
        "trailer": Region(len(blob) - 32, len(blob), ("trailer",)),
    }
    for name, index in parts.names().items():
        known[name] = Region(start, start + len(parts.segments[index]), (f"segment {name}",))
        start = known[name].end
    return known


def test_the_regions_cover_every_byte() -> None:
    spans = sorted((region.start, region.end) for region in regions().values())
    assert spans[0][0] == 0 and spans[-1][1] == len(good_blob())
    assert all(left[1] == right[0] for left, right in pairwise(spans))


@pytest.mark.parametrize("name", regions())
def test_a_flipped_bit_anywhere_is_found_and_its_place_named(name: str) -> None:
    region = regions()[name]
    for at in range(region.start, region.end):
        damaged = bytearray(good_blob())
        damaged[at] ^= 1 << at % 8
        assert found_by_opening(damaged).place in region.places, f"byte {at}"


def test_damage_that_opening_finds_leaves_no_memory_taken() -> None:
    for region in regions().values():
        damaged = bytearray(good_blob())
        damaged[(region.start + region.end) // 2] ^= 16
        assert refused(damaged).place in region.places


def found_by_opening(blob: bytes | bytearray) -> FormatError:
    """The error of the phases before memory is taken."""
    with pytest.raises(FormatError) as error:
        open_document(blob).check_payload()
    return error.value


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_replaced_stretch_is_refused(data: st.DataObject) -> None:
    blob = good_blob()
    start = data.draw(st.integers(0, len(blob) - 1))
    stretch = data.draw(st.binary(min_size=1, max_size=40))
    damaged = (blob[:start] + stretch + blob[start + len(stretch) :])[: len(blob)]
    if damaged != blob:
        refused(damaged)


def test_every_way_to_cut_a_document_is_refused() -> None:
    blob = good_blob()
    for cut in range(len(blob)):
        place = found_by_opening(blob[:cut]).place
        assert place == ("header" if cut < HEADER_BYTES + 32 else "header.size"), cut
    assert refused(blob[:-1]).place == "header.size"


def test_bytes_that_follow_or_precede_are_refused() -> None:
    assert refused(good_blob() + b"\0").place == "header.size"
    assert refused(good_blob() * 2).place == "header.size"
    assert refused(b"\0" + good_blob()).place == "header.magic"


def test_a_document_without_its_middle_is_refused_even_if_the_size_was_mended() -> None:
    blob = good_blob()
    region = regions()["target/1"]
    shorter = bytearray(blob[: region.start] + blob[region.end :])
    struct.pack_into("<Q", shorter, 24, len(shorter))
    assert refused(shorter).place == "trailer"


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    refused(data)
    refused(put_together(Parts({}, [], manifest_bytes=data)))


def test_random_damage_with_digests_made_to_fit_is_a_typed_error_or_the_same_facts() -> None:
    """A seeded fuzz of what only the manifest's own rules stand against: header and trailer are right each time."""
    parts, random = good_parts(), Random(20)
    manifest = bytes(msgpack.packb(parts.manifest) or b"")
    refusals = 0
    for _ in range(1500):
        changed = bytearray(manifest)
        for _ in range(random.randint(1, 4)):
            at = random.randrange(len(changed))
            match random.randrange(4):
                case 0:
                    changed[at] = random.randrange(256)
                case 1:
                    changed[at] ^= 1 << random.randrange(8)
                case 2:
                    del changed[at : at + random.randint(1, 8)]
                case _:
                    changed[at:at] = random.randbytes(random.randint(1, 8))
        memory = memory_of(MIXED, images=2)
        try:
            _, loaded = brought_in(memory, put_together(replace(parts, manifest_bytes=bytes(changed))))
        except StateError:
            refusals += 1
            assert everything_free(memory)
        else:
            assert len(loaded) <= 1
        memory.check_invariants()
    assert refusals > 1000


def test_a_manifest_that_lies_anywhere_is_a_typed_error_in_one_short_sentence_or_harmless() -> None:
    parts, random = good_parts(), Random(6)
    memory = memory_of(MIXED)
    refusals: list[str] = []
    for minor in (1, 2) * 1000:
        lying = replace(parts, manifest=altered(parts.manifest, random), version=(1, minor))
        try:
            _, loaded = brought_in(memory, put_together(lying))
        except StateError as error:
            refusals.append(str(error))
        else:
            for checkpoint in loaded:
                memory.release(checkpoint)
        assert everything_free(memory)
        memory.check_invariants()
    assert len(refusals) > 1000
    assert all(len(sentence) < 1100 and sentence.isprintable() for sentence in refusals)


def test_opening_and_refusing_a_manifest_takes_no_more_memory_than_a_few_times_its_bytes() -> None:
    ledger = bytes(4 * LEDGER_LIMIT)
    (entry,) = good_parts().manifest["checkpoints"]
    shared = [entry | {"id": f"{number:032x}", "shared_tokens": LEDGER_LIMIT} for number in range(64)]
    blob = put_together(good_parts().with_manifest(ledger=ledger, checkpoints=shared))
    tracemalloc.start()
    try:
        with pytest.raises(StateError):
            open_document(blob).check_fit(MIXED)
        assert tracemalloc.get_traced_memory()[1] < 5 * len(blob)
    finally:
        tracemalloc.stop()


def test_a_newer_major_version_is_refused_and_of_a_newer_minor_one_unknown_fields_are_ignored() -> None:
    parts = good_parts()
    error = refused(put_together(replace(parts, version=(2, 0))))
    assert (error.place, error.problem) == ("header.version", "is 2.0, this reader knows 1.x")
    turns = [parts.manifest["turns"][0] | {"mood": 1}]
    more = {
        "manifest.hints": parts.with_manifest(hints={"a": 1}),
        "manifest.turns[0].mood": parts.with_manifest(turns=turns),
        "manifest.session.tenant": parts.with_session(tenant="x"),
        "manifest.checkpoints[0].hints": parts.with_checkpoint(hints=1),
        "manifest.fork_points[0].hints": parts.with_manifest(
            fork_points=[parts.manifest["fork_points"][0] | {"hints": 1}]
        ),
    }
    for place, changed in more.items():
        assert refused(put_together(changed)).place == place
        brought_in(memory_of(MIXED), put_together(replace(changed, version=(1, 9))))


def test_unknown_flags_and_a_payload_where_none_belongs_are_refused() -> None:
    assert refused(put_together(replace(good_parts(), flags=4))).place == "header.flags"
    assert refused(put_together(replace(good_parts(), flags=2))).place == "payload"


def test_the_trailer_is_not_taken_from_another_document() -> None:
    other = put_together(good_parts().with_checkpoint(kind="explicit"))
    assert refused(other[:-32] + good_blob()[-32:]).place == "trailer"


# ---------------------------------------------------------------------------------------------------- signatures

KEY = b"a secret of this cluster"


def signed_blob() -> bytes:
    return put_together(replace(good_parts(), flags=1, key=KEY))


def test_a_signature_tells_the_clusters_documents_from_others() -> None:
    memory = memory_of(MIXED)
    checkpoint = checkpoint_at(memory, FRONTIER)
    record = record_of(checkpoint.ledger)
    ours = encode_session(memory, [checkpoint], record, FINGERPRINT, KEY)
    assert put_together(take_apart(ours, KEY)) == ours and open_document(ours, key=KEY).signed
    for blob, key, signed in (
        (signed_blob(), KEY, True), (signed_blob(), b"another", False), (signed_blob(), None, False),
        (good_blob(), KEY, False),
    ):  # fmt: skip
        document = open_document(blob, key=key)
        assert document.signed is signed and document.has_signature is (blob == signed_blob())
        if signed:
            _, loaded = brought_in(memory_of(MIXED), blob, key=key, demand_signature=True)
            assert [c.frontier for c in loaded] == [FRONTIER]
        else:
            refused(blob, SignatureError, key=key, demand_signature=True)


def test_every_byte_of_a_signed_document_is_covered_even_for_a_reader_without_the_key() -> None:
    blob = signed_blob()
    open_document(blob).check_payload()
    for at in range(len(blob) - 64, len(blob)):
        damaged = bytearray(blob)
        damaged[at] ^= 1
        assert found_by_opening(damaged).place == "trailer"


def test_a_signature_made_for_another_manifest_is_none() -> None:
    other = bytearray(put_together(replace(good_parts().with_checkpoint(kind="explicit"), flags=1, key=b"theirs")))
    head = len(other) - 64 - sum(map(len, good_parts().segments))
    other[-64:-32] = signed_blob()[-64:-32]
    other[-32:] = hashlib.sha256(other[:head] + other[-64:-32]).digest()
    assert refused(other, SignatureError, key=KEY, demand_signature=True).problem == "is that of another key"
