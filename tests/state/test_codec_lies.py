"""Blobs that are whole but lie: a typed error names the place, and nothing stays allocated."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
import pytest
import safetensors.torch
import torch

from state.codec import MANIFEST_LIMIT, decode_checkpoint
from state.errors import CoverageError, FingerprintMismatch, FormatError
from state.geometry import StateGeometry
from tests.state.blobs import Parts, put_together, take_apart
from tests.state.refusals import FRONTIER, good_blob, good_parts, refused
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


@pytest.mark.parametrize(
    ("field", "value", "place"),
    [
        ("frontier", -1, "manifest.frontier"),
        ("frontier", 70.0, "manifest.frontier"),
        ("frontier", True, "manifest.frontier"),
        ("frontier", 2**63, "manifest.frontier"),
        ("created", "now", "manifest.created"),
        ("created", -1.0, "manifest.created"),
        ("created", 1e300, "manifest.created"),
        ("kind", "", "manifest.kind"),
        ("kind", "x" * 65, "manifest.kind"),
        ("form", "both", "manifest.form"),
        ("checkpoint", "0" * 31, "manifest.checkpoint"),
        ("checkpoint", "G" * 32, "manifest.checkpoint"),
        ("checkpoint", None, "manifest.checkpoint"),
        ("ledger", b"123", "manifest.ledger"),
        ("ledger", [1, 2], "manifest.ledger"),
        ("lineage", {"parent": "x", "fork_origin": None}, "manifest.lineage.parent"),
        ("positions", {"rope_delta": 3}, "manifest.positions.rope_delta"),
        ("page_tokens", 16, "manifest.page_tokens"),
        ("fingerprint", {"weights": 1.5}, "manifest.fingerprint.weights"),
        ("fingerprint", ["weights"], "manifest.fingerprint"),
        ("coverage", {}, "manifest.coverage.target_kv"),
        ("layouts", {"image": {"gdn": "F32"}}, "manifest.layouts.image.gdn"),
        ("layouts", {"image": {"gdn": ["F32", [-1]]}}, "manifest.layouts.image.gdn"),
        ("segments", {}, "manifest.segments"),
        ("segments", [1], "manifest.segments[0]"),
        ("segments", [], "manifest.segments"),
        ("record", None, "manifest.record"),
    ],
)
def test_a_field_of_another_type_or_range_is_named(field: str, value: object, place: str) -> None:
    assert refused(put_together(good_parts().with_manifest(**{field: value}))).place == place


@pytest.mark.parametrize("plane", ["target_kv", "gdn", "conv", "hidden", "draft_kv"])
def test_a_coverage_that_is_one_off_is_refused_by_name(plane: str) -> None:
    coverage = good_parts().manifest["coverage"]
    changed = good_parts().with_manifest(coverage=coverage | {plane: coverage[plane] - 1})
    assert refused(put_together(changed), CoverageError).plane == plane


@pytest.mark.parametrize("ring", [None, [0, FRONTIER - 1], [1, FRONTIER]])
def test_a_ring_that_is_not_the_live_interval_is_refused(ring: object) -> None:
    changed = good_parts().with_manifest(coverage=good_parts().manifest["coverage"] | {"ring": ring})
    assert refused(put_together(changed), CoverageError).plane == "ring"


def test_a_frontier_that_the_ledger_does_not_back_is_refused_before_anything_is_sized_by_it() -> None:
    huge = 2**50
    planes = {"target_kv": huge, "gdn": huge, "conv": huge, "hidden": huge, "draft_kv": huge}
    coverage = planes | {"ring": [huge - WINDOW, huge]}
    error = refused(put_together(good_parts().with_manifest(frontier=huge, coverage=coverage)), CoverageError)
    assert error.plane == "ledger_tokens"


def test_token_ids_outside_the_public_rows_are_refused() -> None:
    ledger = list(struct.unpack(f"<{FRONTIER + 1}I", good_parts().manifest["ledger"]))
    for index, token in ((0, PUBLIC_ROWS), (FRONTIER, 2**32 - 1)):
        changed = [*ledger[:index], token, *ledger[index + 1 :]]
        parts = good_parts().with_manifest(ledger=struct.pack(f"<{len(changed)}I", *changed))
        assert refused(put_together(parts)).place == f"manifest.ledger[{index}]"
    assert refused(good_blob(), public_rows=max(ledger)).place == f"manifest.ledger[{ledger.index(max(ledger))}]"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", "target/7"),
        ("name", "../image"),
        ("offset", 0),
        ("offset", 2**50),
        ("size", 0),
        ("size", 2**50),
        ("size", 8),
    ],
)
def test_a_segment_table_that_is_not_what_the_geometry_gives_is_refused(key: str, value: object) -> None:
    table = [dict(entry) for entry in good_parts().manifest["segments"]]
    table[2][key] = value
    assert refused(put_together(good_parts().with_manifest(segments=table))).place == f"manifest.segments[2].{key}"


def test_missing_doubled_and_reordered_segments_are_refused() -> None:
    table = good_parts().manifest["segments"]
    for changed in (table[:-1], [*table, table[-1]], [table[1], table[0], *table[2:]]):
        assert refused(put_together(good_parts().with_manifest(segments=changed))).place.startswith("manifest.segments")


def test_payload_that_no_segment_claims_is_refused() -> None:
    parts = good_parts()
    smuggled = put_together(replace(parts, segments=parts.segments | {"more": b"smuggled"}))
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
        "manifest.layouts.draft": lambda layouts: layouts.pop("draft"),
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
    error = refused(put_together(Parts({}, {}, manifest_bytes=manifest)))
    assert error.place == "manifest" and problem in error.problem


def test_nested_claims_are_refused_before_memory_is_taken_for_them() -> None:
    claim = b"\xdd" + struct.pack(">I", 1_000_000)
    manifest = b"\x81\xa1a" + claim * 60 + b"\xc0" * 1_200_000
    error = refused(put_together(Parts({}, {}, manifest_bytes=manifest)))
    assert "beyond its" in error.problem or "in the middle" in error.problem


def test_too_many_values_are_refused() -> None:
    manifest = b"\x81\xa1a\xdd" + struct.pack(">I", 1 << 21) + b"\xc0" * (1 << 21)
    assert "more than 2097152 values" in refused(put_together(Parts({}, {}, manifest_bytes=manifest))).problem


def test_a_manifest_larger_than_the_limit_is_refused_unread() -> None:
    head = struct.pack("<8sHHIQ", b"\x89DFS\r\n\x1a\n", 1, 0, MANIFEST_LIMIT + 1, MANIFEST_LIMIT + 57 + 32)
    blob = bytearray(MANIFEST_LIMIT + 57 + 32)
    blob[: len(head)] = head
    assert refused(blob).place == "header.manifest_size"


# ------------------------------------------------------------------------------------------------- payload that lies


def tensors_of(name: str) -> dict[str, torch.Tensor]:
    return safetensors.torch.load(good_parts().segments[name])


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
    size = len(good_parts().segments["draft/0"])
    for content in (bytes(size), b"\xff" * size, b"\x80" + good_parts().segments["draft/0"][1:]):
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
    checkpoint, _ = decode_checkpoint(memory, blob, FINGERPRINT, PUBLIC_ROWS)
    assert memory.target.keys[checkpoint.pages[1], 0, FRONTIER - 65, 0, 0] == 1.0


def test_a_failure_half_way_through_the_copy_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = memory_of(MIXED)
    assert memory.draft is not None

    def fails(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(memory.draft, "fill_page", fails)
    with pytest.raises(MemoryError):
        decode_checkpoint(memory, good_blob(), FINGERPRINT, PUBLIC_ROWS)
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
