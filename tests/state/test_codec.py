"""What is encoded comes back, byte by byte, wherever the frontier stands."""

from __future__ import annotations

import pytest
import torch

from state.codec import decode_checkpoint, encode_checkpoint, read_manifest
from state.coverage import FORMS, Form
from state.errors import CapacityError, FormatError, StateError
from state.geometry import StateGeometry
from tests.state.samples import (
    FINGERPRINT,
    FP32,
    GEOMETRIES,
    MIXED,
    PUBLIC_ROWS,
    WINDOW,
    advance,
    assert_same_planes,
    checkpoint_at,
    everything_free,
    ledger_of,
    memory_of,
    planes_of,
)

FRONTIERS = (1, 63, 64, 65, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 5)
RECORD = {
    "session": "s-1",
    "branch": None,
    "turns": [{"id": 1, "published": 17, "finish": "stop", "seed": 2**64 - 1, "cost": 0.25, "key": b"\x00\xff"}],
    "transcript": [{"role": "user", "content": "Grüße, 世界 🌍"}],
    "epoch": [1795989508, 4],
}


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES.keys())
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("frontier", FRONTIERS)
def test_a_checkpoint_comes_back_as_it_was(geometry: StateGeometry, form: Form, frontier: int) -> None:
    source, destination = memory_of(geometry), memory_of(geometry)
    checkpoint = checkpoint_at(source, frontier, form)
    blob = encode_checkpoint(source, checkpoint, FINGERPRINT, RECORD)
    moved, record = decode_checkpoint(destination, blob, FINGERPRINT, PUBLIC_ROWS)

    assert record == RECORD
    for name in ("id", "kind", "form", "frontier", "ledger", "coverage", "parent", "fork_origin", "created"):
        assert getattr(moved, name) == getattr(checkpoint, name), name
    assert_same_planes(planes_of(destination, moved), planes_of(source, checkpoint))
    assert encode_checkpoint(destination, moved, FINGERPRINT, RECORD) == blob
    destination.check_invariants()
    destination.release(moved)
    assert everything_free(destination)


def test_special_values_travel_bit_by_bit() -> None:
    source, destination = memory_of(MIXED), memory_of(MIXED)
    sequence = source.open(64)
    advance(source, sequence, 64, seed=1)
    specials = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, 3e38])
    source.images.hidden[sequence.slot] = specials.to(torch.bfloat16)
    source.target.keys[sequence.pages[0]].view(-1)[:7] = specials.to(torch.bfloat16)
    checkpoint = source.capture(sequence, ledger_of(64), "decode", "turn_end")
    moved, _ = decode_checkpoint(
        destination, encode_checkpoint(source, checkpoint, FINGERPRINT, {}), FINGERPRINT, PUBLIC_ROWS
    )
    for plane in ("hidden", "target_keys"):
        there, here = planes_of(destination, moved)[plane], planes_of(source, checkpoint)[plane]
        assert torch.equal(there.view(torch.int16), here.view(torch.int16))


def test_what_another_sequence_wrote_beyond_the_frontier_does_not_travel() -> None:
    memory = memory_of(MIXED)
    sequence = memory.open(1)
    advance(memory, sequence, 70, seed=1)
    checkpoint = memory.capture(sequence, ledger_of(70), "decode", "turn_end")
    before = encode_checkpoint(memory, checkpoint, FINGERPRINT, {})
    advance(memory, sequence, 40, seed=2)
    assert encode_checkpoint(memory, checkpoint, FINGERPRINT, {}) == before


def test_a_ring_is_written_in_logical_order_whatever_memory_it_lay_in() -> None:
    memory = memory_of(FP32)
    checkpoint = checkpoint_at(memory, WINDOW + 30)
    blob = encode_checkpoint(memory, checkpoint, FINGERPRINT, {})
    rings = memory.images.rings
    wrapped = rings.keys[checkpoint.slot, :, [position % WINDOW for position in range(30, WINDOW + 30)]]
    moved, _ = decode_checkpoint(memory, blob, FINGERPRINT, PUBLIC_ROWS)
    assert torch.equal(rings.export_slot(moved.slot, moved.frontier)[0], wrapped)


def test_lineage_travels() -> None:
    memory = memory_of(FP32)
    first = checkpoint_at(memory, 10)
    sequence = memory.restore(first, 20)
    advance(memory, sequence, 5, seed=2)
    fork = memory.fork(memory.capture(sequence, ledger_of(15), "decode", "turn_end"))
    blob = encode_checkpoint(memory, fork, FINGERPRINT, {})
    moved, _ = decode_checkpoint(memory_of(FP32), blob, FINGERPRINT, PUBLIC_ROWS)
    assert (moved.parent, moved.fork_origin) == (first.id, fork.fork_origin)
    assert fork.fork_origin is not None


def test_one_blob_may_come_in_twice() -> None:
    memory = memory_of(FP32)
    blob = encode_checkpoint(memory, checkpoint_at(memory, 70), FINGERPRINT, {})
    one, _ = decode_checkpoint(memory, blob, FINGERPRINT, PUBLIC_ROWS)
    other, _ = decode_checkpoint(memory, memoryview(bytearray(blob)), FINGERPRINT, PUBLIC_ROWS)
    assert one.id == other.id and one.slot != other.slot and not set(one.pages) & set(other.pages)
    memory.release(one)
    memory.check_invariants()
    assert encode_checkpoint(memory, other, FINGERPRINT, {}) == blob


def test_an_imported_image_holds_nothing_of_the_slots_last_holder() -> None:
    source, destination = memory_of(FP32), memory_of(FP32, images=2)
    blob = encode_checkpoint(source, checkpoint_at(source, 5), FINGERPRINT, {})
    destination.release(checkpoint_at(destination, WINDOW))
    moved, _ = decode_checkpoint(destination, blob, FINGERPRINT, PUBLIC_ROWS)
    assert not destination.images.rings.keys[moved.slot, :, 5:].any()


def test_a_released_checkpoint_cannot_be_encoded() -> None:
    memory = memory_of(FP32)
    checkpoint = checkpoint_at(memory, 70)
    memory.release(checkpoint)
    with pytest.raises(StateError, match="was released"):
        encode_checkpoint(memory, checkpoint, FINGERPRINT, {})


@pytest.mark.parametrize(("pages", "images", "pool"), [(2, 2, "target pages"), (6, 1, "images")])
def test_without_room_nothing_is_taken(pages: int, images: int, pool: str) -> None:
    source, destination = memory_of(FP32), memory_of(FP32, pages, images)
    blob = encode_checkpoint(source, checkpoint_at(source, 150), FINGERPRINT, {})
    if pool == "images":
        destination.open(0)
    free = (destination.target.free, destination.images.free)
    with pytest.raises(CapacityError) as refused:
        decode_checkpoint(destination, blob, FINGERPRINT, PUBLIC_ROWS)
    assert refused.value.pool == pool
    assert (destination.target.free, destination.images.free) == free
    destination.check_invariants()


def test_the_manifest_is_readable_without_geometry_or_payload() -> None:
    memory = memory_of(MIXED)
    checkpoint = checkpoint_at(memory, 100, "prompt", "turn_start")
    blob = encode_checkpoint(memory, checkpoint, FINGERPRINT, RECORD)
    manifest = read_manifest(blob)
    assert manifest["ledger"] == ledger_of(100, "prompt")
    assert (manifest["kind"], manifest["form"], manifest["frontier"]) == ("turn_start", "prompt", 100)
    assert manifest["fingerprint"] == FINGERPRINT and manifest["record"] == RECORD
    assert manifest["checkpoint"] == checkpoint.id and manifest["bytes"] == len(blob)
    assert manifest["coverage"]["ring"] == (100 - WINDOW, 100)
    names = [segment["name"] for segment in manifest["segments"]]
    assert names == ["image", "target/0", "target/1", "draft/0", "draft/1"]
    first_payload_byte = len(blob) - 32 - sum(segment["size"] for segment in manifest["segments"])
    damaged = bytearray(blob)
    damaged[first_payload_byte + 20] ^= 1
    assert read_manifest(damaged) == manifest


@pytest.mark.parametrize(
    ("record", "place"),
    [
        ({"turns": [{"at": float("nan")}]}, "manifest.record.turns[0].at"),
        ({"turns": (1, 2)}, "manifest.record.turns"),
        ({"a": {3: "x"}}, "manifest.record.a"),
        ({"a": {1, 2}}, "manifest.record.a"),
        ({"a": 2**64}, "manifest.record.a"),
        ({"a": "\ud800"}, "manifest.record.a"),
        ({"a": torch.zeros(1)}, "manifest.record.a"),
    ],
)
def test_a_record_that_cannot_travel_is_refused_by_name(record: dict[str, object], place: str) -> None:
    memory = memory_of(FP32)
    with pytest.raises(FormatError) as refused:
        encode_checkpoint(memory, checkpoint_at(memory, 5), FINGERPRINT, record)
    assert refused.value.place == place
