"""Documents that are whole but lie: a typed error names the place, and nothing stays allocated."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
import pytest
import safetensors.torch
import torch

from state.container import HEADER, MANIFEST_LIMIT
from state.errors import CoverageError, FingerprintMismatch, FormatError, StateError
from state.geometry import StateGeometry
from state.session_manifest import LEDGER_LIMIT
from tests.state.blobs import Parts, packed, put_together, take_apart, words
from tests.state.refusals import FRONTIER, brought_in, good_blob, good_parts, refused
from tests.state.samples import (
    FINGERPRINT,
    FP32,
    FULL_ONLY,
    LOCAL_ONLY,
    MIXED,
    NO_DRAFTER,
    PUBLIC_ROWS,
    WINDOW,
    everything_free,
    memory_of,
)

# ------------------------------------------------------------------------------------------------ manifests that lie


@pytest.mark.parametrize("field", sorted(take_apart(good_blob()).manifest))
def test_a_missing_field_is_named(field: str) -> None:
    manifest = dict(good_parts().manifest)
    del manifest[field]
    assert refused(put_together(replace(good_parts(), manifest=manifest))).place == f"manifest.{field}"


@pytest.mark.parametrize("part", ["session", "checkpoints", "turns"])
def test_a_missing_field_of_a_part_is_named(part: str) -> None:
    whole = good_parts().manifest[part]
    fields, place = (whole, f"manifest.{part}") if part == "session" else (whole[0], f"manifest.{part}[0]")
    for field in fields:
        less = {name: value for name, value in fields.items() if name != field}
        changed = good_parts().with_manifest(**{part: less if part == "session" else [less]})
        assert refused(put_together(changed)).place == f"{place}.{field}"


@pytest.mark.parametrize(
    ("field", "value", "place"),
    [
        ("ledger", b"123", "manifest.ledger"),
        ("ledger", [1, 2], "manifest.ledger"),
        ("ledger", bytes(4 * (LEDGER_LIMIT + 1)), "manifest.ledger"),
        ("positions", {"rope_delta": 3}, "manifest.positions.rope_delta"),
        ("positions", {"rope_delta": 0, "more": 1}, "manifest.positions.more"),
        ("media", [{"sha256": bytes(32)}], "manifest.media[0].sha256"),
        ("page_tokens", 16, "manifest.page_tokens"),
        ("fingerprint", {"weights": 1.5}, "manifest.fingerprint.weights"),
        ("fingerprint", ["weights"], "manifest.fingerprint"),
        ("layouts", {"image": {"gdn": "F32"}}, "manifest.layouts.image.gdn"),
        ("layouts", {"image": {"gdn": ["F32", [-1]]}}, "manifest.layouts.image.gdn"),
        ("layouts", {"image": {"../../etc/passwd": ["F32", "x"]}}, "manifest.layouts.image.'../../etc/passwd'"),
        ("segments", {}, "manifest.segments"),
        ("segments", [1], "manifest.segments[0]"),
        ("transcript", "hello", "manifest.transcript"),
        ("transcript", [{"content": "x"}], "manifest.transcript[0].role"),
        ("transcript", [{"role": "user", "content": [1]}], "manifest.transcript[0].content[0]"),
        ("turns", {}, "manifest.turns"),
        ("session", None, "manifest.session"),
        ("checkpoints", [{}] * 65, "manifest.checkpoints"),
    ],
)
def test_a_field_of_another_type_or_range_is_named(field: str, value: object, place: str) -> None:
    assert refused(put_together(good_parts().with_manifest(**{field: value}))).place == place


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("frontier", -1),
        ("frontier", 70.0),
        ("frontier", True),
        ("frontier", 2**63),
        ("frontier", FRONTIER + 2),
        ("created", "now"),
        ("created", -1.0),
        ("created", 1e300),
        ("kind", ""),
        ("kind", "x" * 65),
        ("form", "both"),
        ("id", "0" * 31),
        ("id", "G" * 32),
        ("id", "../../../../../../etc/passwd...."),
        ("id", None),
        ("shared_tokens", FRONTIER + 2),
        ("shared_tokens", -1),
        ("own_tokens", b"123"),
        ("segments", b""),
        ("segments", bytes(4 * 6)),
        ("segments", [0, 1, 2, 3, 4]),
    ],
)
def test_a_checkpoints_field_of_another_type_or_range_is_named(field: str, value: object) -> None:
    error = refused(put_together(good_parts().with_checkpoint(0, **{field: value})))
    assert error.place == f"manifest.checkpoints[0].{field}"


def test_two_checkpoints_of_one_identity_are_refused() -> None:
    (entry,) = good_parts().manifest["checkpoints"]
    assert (
        refused(put_together(good_parts().with_manifest(checkpoints=[entry, entry]))).place
        == "manifest.checkpoints[1].id"
    )
    other = entry | {"id": "f" * 32}
    _, loaded = brought_in(memory_of(MIXED), put_together(good_parts().with_manifest(checkpoints=[entry, other])))
    assert [checkpoint.id for checkpoint in loaded] == [entry["id"], "f" * 32]


LONG = "\x1b[2J\n" + "z" * 100_000


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"fingerprint": FINGERPRINT | {LONG: 1}}, FormatError),
        ({"fingerprint": FINGERPRINT | {"weights": LONG}}, FingerprintMismatch),
        ({"layouts": good_parts().manifest["layouts"] | {LONG: {}}}, FormatError),
        ({"layouts": {"image": {f"t{number}": ["F32", [1]] for number in range(9999)}}}, FormatError),
        ({LONG: 1}, FormatError),
        ({"transcript": [{"role": LONG}]}, FormatError),
    ],
)
def test_what_a_document_says_neither_floods_nor_steers_who_reads_of_its_refusal(
    changes: dict[str, object], kind: type[StateError]
) -> None:
    sentence = str(refused(put_together(good_parts().with_manifest(**changes)), kind))
    assert len(sentence) < 1100 and sentence.isprintable()


def test_a_key_that_stands_there_twice_is_named_briefly() -> None:
    twice = b"\x82" + 2 * (bytes(msgpack.packb(LONG) or b"") + b"\x01")
    sentence = str(refused(put_together(replace(good_parts(), manifest_bytes=twice))))
    assert len(sentence) < 1100 and sentence.isprintable() and sentence.endswith("twice")


@pytest.mark.parametrize("name", ["", "x" * 65, "a b", "Größe"])
def test_a_fact_of_the_fingerprint_has_a_short_visible_name(name: str) -> None:
    error = refused(put_together(good_parts().with_manifest(fingerprint=FINGERPRINT | {name: 1})))
    assert error.place.startswith("manifest.fingerprint.") and "64 visible" in error.problem


def test_a_lineage_or_coverage_that_is_none_is_named() -> None:
    lineage = good_parts().with_checkpoint(lineage={"parent": "x", "fork_origin": None})
    assert refused(put_together(lineage)).place == "manifest.checkpoints[0].lineage.parent"
    coverage = good_parts().with_checkpoint(coverage={})
    assert refused(put_together(coverage)).place == "manifest.checkpoints[0].coverage.target_kv"


def coverage_with(**changes: object) -> bytes:
    coverage = good_parts().manifest["checkpoints"][0]["coverage"]
    return put_together(good_parts().with_checkpoint(coverage=coverage | changes))


@pytest.mark.parametrize("plane", ["target_kv", "gdn", "conv", "hidden", "draft_kv"])
def test_a_coverage_that_is_one_off_is_refused_by_name(plane: str) -> None:
    for off in (-1, 1):
        assert refused(coverage_with(**{plane: FRONTIER + off}), CoverageError).plane == plane


@pytest.mark.parametrize("ring", [None, [0, FRONTIER - 1], [1, FRONTIER]])
def test_a_ring_that_is_not_the_live_interval_is_refused(ring: object) -> None:
    assert refused(coverage_with(ring=ring), CoverageError).plane == "ring"


def test_a_frontier_that_the_ledger_does_not_back_is_refused_before_anything_is_sized_by_it() -> None:
    huge = 2**50
    planes = {"target_kv": huge, "gdn": huge, "conv": huge, "hidden": huge, "draft_kv": huge}
    coverage = planes | {"ring": [huge - WINDOW, huge]}
    error = refused(put_together(good_parts().with_checkpoint(frontier=huge, coverage=coverage)))
    assert error.place == "manifest.checkpoints[0].frontier"


def test_a_form_that_the_ledger_contradicts_is_refused() -> None:
    assert refused(put_together(good_parts().with_checkpoint(form="prompt")), CoverageError).plane == "ledger_tokens"


def test_token_ids_outside_the_public_rows_are_refused() -> None:
    ledger = words(good_parts().manifest["ledger"])
    for index, token in ((0, PUBLIC_ROWS), (FRONTIER, 2**32 - 1)):
        changed = [*ledger[:index], token, *ledger[index + 1 :]]
        parts = good_parts().with_manifest(ledger=packed(changed))
        assert refused(put_together(parts)).place == f"manifest.ledger[{index}]"
    own = good_parts().with_checkpoint(shared_tokens=FRONTIER, own_tokens=packed([PUBLIC_ROWS]))
    assert refused(put_together(own)).place == "manifest.checkpoints[0].own_tokens[0]"
    assert refused(good_blob(), public_rows=max(ledger)).place == f"manifest.ledger[{ledger.index(max(ledger))}]"


def test_a_ledger_that_repeats_what_it_could_share_is_refused() -> None:
    ledger = words(good_parts().manifest["ledger"])
    repeated = good_parts().with_checkpoint(shared_tokens=60, own_tokens=packed(ledger[60:]))
    assert refused(put_together(repeated)).place == "manifest.checkpoints[0].own_tokens"


# -------------------------------------------------------------------------------------------- segment tables that lie


@pytest.mark.parametrize("size", [0, 8, 2**50])
def test_a_size_that_is_not_what_the_geometry_gives_is_refused(size: int) -> None:
    table = [dict(entry) for entry in good_parts().manifest["segments"]]
    table[2]["size"] = size
    assert refused(put_together(good_parts().with_manifest(segments=table))).place == "manifest.segments"
    # moved from one segment to its neighbour, so that the sum is right
    table = [dict(entry) for entry in good_parts().manifest["segments"]]
    table[1]["size"] += 5000
    table[2]["size"] -= 5000
    if table[2]["size"] >= 0:
        error = refused(put_together(good_parts().with_manifest(segments=table)))
        assert error.place == "manifest.segments[1].size"


@pytest.mark.parametrize(
    ("indices", "place"),
    [
        ([1, 0, 2, 3, 4], "manifest.checkpoints[0].segments[0]"),
        ([0, 1, 3, 2, 4], "manifest.checkpoints[0].segments[2]"),
        ([0, 1, 2, 3, 5], "manifest.checkpoints[0].segments[4]"),
        ([0, 1, 2, 3, 2**32 - 1], "manifest.checkpoints[0].segments[4]"),
        ([0, 1, 2, 3, 3], "manifest.segments[4]"),
        ([0, 1, 2, 0, 3], "manifest.segments[4]"),
    ],
)
def test_indices_that_are_not_in_the_order_of_first_use_are_refused(indices: list[int], place: str) -> None:
    assert refused(put_together(good_parts().with_checkpoint(segments=packed(indices)))).place == place


def test_a_page_in_the_place_of_another_is_refused_by_its_content_or_size() -> None:
    """Equal sizes: only what the segment holds can tell, and it does."""
    parts = good_parts()
    swapped = replace(
        parts.with_checkpoint(segments=packed([0, 1, 1, 2, 3])),
        segments=[parts.segments[index] for index in (0, 1, 3, 4)],
    ).with_manifest(segments=[parts.manifest["segments"][index] for index in (0, 1, 3, 4)])
    assert refused(put_together(swapped)).place == "segment target/1"  # the full page has no zeros beyond F


def test_missing_and_doubled_table_entries_are_refused() -> None:
    table = good_parts().manifest["segments"]
    for changed in (table[:-1], [*table, table[-1]], []):
        place = refused(put_together(good_parts().with_manifest(segments=changed))).place
        assert place.startswith(("manifest.segments", "manifest.checkpoints[0].segments"))
    doubled = [*table[:4], table[3]]
    assert refused(put_together(good_parts().with_manifest(segments=doubled))).problem.startswith("hold two")


def test_payload_that_no_segment_claims_is_refused() -> None:
    parts = good_parts()
    smuggled = put_together(replace(parts, segments=[*parts.segments, b"smuggled"]))
    assert refused(smuggled).problem.startswith("take ")


def test_a_digest_that_is_no_sha256_is_refused() -> None:
    table = [dict(entry) for entry in good_parts().manifest["segments"]]
    table[0]["sha256"] = b"short"
    assert refused(put_together(good_parts().with_manifest(segments=table))).place == "manifest.segments[0].sha256"
    table[0]["sha256"] = bytes(32)
    assert refused(put_together(good_parts().with_manifest(segments=table))).place == "segment image"


def with_another_layout(change: Callable[[dict[str, Any]], None]) -> bytes:
    layouts = msgpack.unpackb(msgpack.packb(good_parts().manifest["layouts"]))
    change(layouts)
    return put_together(good_parts().with_manifest(layouts=layouts))


def test_a_layout_that_is_not_the_geometrys_is_refused() -> None:
    changes: dict[str, Callable[[dict[str, Any]], None]] = {
        "manifest.layouts.image": lambda layouts: layouts["image"]["gdn"].__setitem__(0, "BF16"),
        "manifest.layouts.target": lambda layouts: layouts["target"]["keys"][1].__setitem__(0, 2**40),
        "manifest.checkpoints[0].segments": lambda layouts: layouts.pop("draft"),
        "manifest.layouts.extra": lambda layouts: layouts.__setitem__("extra", {}),
    }
    for place, change in changes.items():
        assert refused(with_another_layout(change)).place == place


@pytest.mark.parametrize("geometry", [FP32, LOCAL_ONLY, FULL_ONLY, NO_DRAFTER])
def test_state_of_another_geometry_never_loads_even_if_the_fingerprint_is_silent(geometry: StateGeometry) -> None:
    refused(good_blob(), FormatError if geometry is FP32 else CoverageError, geometry)


# -------------------------------------------------------------------------------------------------- msgpack that lies


@pytest.mark.parametrize(
    ("manifest", "problem"),
    [
        (b"", "ends at byte 0"),
        (b"\x93\x01\x02\x03", "is a list, must be a map"),
        (b"\x80\x80", "has 1 bytes after its end"),
        (b"\x82\xa1a\x01\xa1a\x02", "has the key 'a' twice"),
        (b"\x81\x01\x02", ""),
        (b"\x81\xc4\x01a\x02", "keys must be text"),
        (b"\x81\xa1a\xd4\x05\x00", "ext type"),
        (b"\x81\xa1a\xd6\xff\x00\x00\x00\x00", "ext type"),  # a timestamp
        (b"\x81\xa1a\xc7\x00\x05", "ext type"),
        (b"\x81\xa1a\xc1", "msgpack never uses"),
        (b"\x81\xa1a\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00", "must be finite"),
        (b"\x81\xa1a\xca\x7f\x80\x00\x00", "must be finite"),
        (b"\x81\xa1a\xa2\xff\xfe", "is not msgpack"),
        (b"\x81\xa1a\xdd\xff\xff\xff\xff", "beyond its"),
        (b"\x81\xa1a\xdf\xff\xff\xff\xff", "beyond its"),
        (b"\x81\xa1a\xdb\xff\xff\xff\xff", "beyond its"),
        (b"\x81\xa1a\xc6\xff\xff\xff\xff", "beyond its"),
        (b"\x81\xa1a" + b"\x91" * 100 + b"\xc0", "nested deeper than 64"),
        (b"\x81\xa1a\xdc", "beyond its"),
    ],
)
def test_a_manifest_that_is_no_plain_map_is_refused(manifest: bytes, problem: str) -> None:
    error = refused(put_together(Parts({}, [], manifest_bytes=manifest)))
    assert error.place == "manifest" and problem in error.problem


def test_nested_claims_are_refused_before_memory_is_taken_for_them() -> None:
    claim = b"\xdd" + struct.pack(">I", 1_000_000)
    manifest = b"\x81\xa1a" + claim * 60 + b"\xc0" * 1_200_000
    error = refused(put_together(Parts({}, [], manifest_bytes=manifest)))
    assert "beyond its" in error.problem or "in the middle" in error.problem


def test_too_many_values_are_refused() -> None:
    manifest = b"\x81\xa1a\xdd" + struct.pack(">I", 1 << 21) + b"\xc0" * (1 << 21)
    assert "more than 2097152 values" in refused(put_together(Parts({}, [], manifest_bytes=manifest))).problem


def test_a_manifest_larger_than_the_limit_is_refused_unread() -> None:
    head = HEADER.pack(b"\x89DFS\r\n\x1a\n", 1, 0, 0, MANIFEST_LIMIT + 1, MANIFEST_LIMIT + 65 + 32)
    blob = bytearray(MANIFEST_LIMIT + 65 + 32)
    blob[: len(head)] = head
    assert refused(blob).place == "header.manifest_size"


# ------------------------------------------------------------------------------------------------- payload that lies


def tensors_of(name: str) -> dict[str, torch.Tensor]:
    return safetensors.torch.load(good_parts().segment(name))


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.pop("keys"),
        lambda tensors: tensors.__setitem__("more", torch.zeros(1)),
        lambda tensors: tensors.__setitem__("keys", tensors["keys"].view(torch.float16)),
        lambda tensors: tensors.__setitem__("keys", tensors["keys"].transpose(0, 1).contiguous()),
        lambda tensors: tensors.__setitem__("keys", tensors["keys"].flatten()),
    ],
)
@pytest.mark.parametrize("name", ["target/0", "draft/1"])
def test_a_segment_with_other_tensors_is_refused_and_its_memory_given_back(
    name: str, change: Callable[[dict[str, torch.Tensor]], object]
) -> None:
    tensors = tensors_of(name)
    change(tensors)
    error = refused(put_together(good_parts().with_segment(name, safetensors.torch.save(tensors))))
    # A segment that became too small or large for its tensors is already refused by the table.
    assert error.place == f"segment {name}" or error.place.endswith(".size")


def test_a_segment_that_is_no_safetensors_is_refused() -> None:
    size = len(good_parts().segment("draft/0"))
    for content in (bytes(size), b"\xff" * size, b"\x80" + good_parts().segment("draft/0")[1:]):
        error = refused(put_together(good_parts().with_segment("draft/0", content)))
        assert error.place == "segment draft/0"


@pytest.mark.parametrize("name", ["target/1", "draft/1"])
@pytest.mark.parametrize("content", [1.0, float("nan")])
def test_a_last_page_with_content_beyond_the_frontier_is_refused(name: str, content: float) -> None:
    for part in ("keys", "values"):
        tensors = tensors_of(name)
        tensors[part][0, FRONTIER - 64, 0, 0] = content
        error = refused(put_together(good_parts().with_segment(name, safetensors.torch.save(tensors))))
        assert error.place == f"segment {name}" and "beyond the frontier" in error.problem


def test_an_honest_change_of_a_segment_is_accepted_so_the_refusals_above_mean_something() -> None:
    tensors = tensors_of("target/1")
    tensors["keys"][0, FRONTIER - 65, 0, 0] = 1.0
    blob = put_together(good_parts().with_segment("target/1", safetensors.torch.save(tensors)))
    memory = memory_of(MIXED)
    _, (checkpoint,) = brought_in(memory, blob)
    assert memory.target.keys[checkpoint.pages[1], 0, FRONTIER - 65, 0, 0] == 1.0


def test_a_failure_half_way_through_the_copy_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = memory_of(MIXED)
    assert memory.draft is not None

    def fails(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(memory.draft, "fill_page", fails)
    with pytest.raises(MemoryError):
        brought_in(memory, good_blob())
    assert everything_free(memory) and memory.checkpoints == ()


# ------------------------------------------------------------------------------------------------------- fingerprint


@pytest.mark.parametrize("field", sorted(FINGERPRINT))
def test_every_fingerprint_field_that_differs_is_named(field: str) -> None:
    other = 7 if isinstance(FINGERPRINT[field], int) else "another"
    error = refused(good_blob(), FingerprintMismatch, fingerprint=FINGERPRINT | {field: other})
    assert (error.field, error.stored, error.here) == (field, FINGERPRINT[field], other)


@pytest.mark.parametrize("field", sorted(FINGERPRINT))
def test_a_fingerprint_field_on_one_side_only_is_a_mismatch(field: str) -> None:
    without = {name: value for name, value in FINGERPRINT.items() if name != field}
    assert refused(good_blob(), FingerprintMismatch, fingerprint=without).here is None
    blob = put_together(good_parts().with_manifest(fingerprint=without))
    assert refused(blob, FingerprintMismatch).stored is None
