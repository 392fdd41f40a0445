"""What is encoded comes back, byte by byte, wherever the frontier stands."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from state import codec
from state.checkpoint import Checkpoint
from state.codec import DetachedSegment, SegmentDigests, encode_detached, encode_session
from state.coverage import FORMS, Form
from state.document import open_document
from state.errors import CapacityError, FormatError, MissingSegment, StateError
from state.geometry import StateGeometry
from state.memory import StateMemory
from tests.state.blobs import take_apart
from tests.state.refusals import brought_in
from tests.state.samples import (
    FINGERPRINT,
    FP32,
    GEOMETRIES,
    LEFT,
    MIXED,
    TURN,
    WINDOW,
    advance,
    assert_same_planes,
    checkpoint_at,
    everything_free,
    ledger_of,
    memory_of,
    planes_of,
    record_of,
)

FRONTIERS = (1, 63, 64, 65, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 5)


def encoded(memory: StateMemory, *checkpoints: Checkpoint) -> bytes:
    return encode_session(memory, checkpoints, record_of(checkpoints[-1].ledger), FINGERPRINT)


def two_checkpoints(memory: StateMemory) -> tuple[Checkpoint, Checkpoint]:
    """A turn's start at 70 and its end at 150, which share the first page."""
    sequence = memory.open(1)
    advance(memory, sequence, 70, seed=1)
    start = memory.capture(sequence, ledger_of(70, "prompt"), "prompt", "turn_start")
    advance(memory, sequence, 80, seed=2)
    end = memory.capture(sequence, ledger_of(150), "decode", "turn_end")
    memory.close(sequence)
    return start, end


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES.keys())
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("frontier", FRONTIERS)
def test_a_checkpoint_comes_back_as_it_was(geometry: StateGeometry, form: Form, frontier: int) -> None:
    source, destination = memory_of(geometry), memory_of(geometry)
    checkpoint = checkpoint_at(source, frontier, form)
    blob = encoded(source, checkpoint)
    document, (moved,) = brought_in(destination, blob)

    assert document.manifest.session.record() == record_of(checkpoint.ledger)
    for name in ("id", "kind", "form", "frontier", "ledger", "coverage", "parent", "fork_origin", "created"):
        assert getattr(moved, name) == getattr(checkpoint, name), name
    assert_same_planes(planes_of(destination, moved), planes_of(source, checkpoint))
    assert encoded(destination, moved) == blob
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
    _, (moved,) = brought_in(destination, encoded(source, checkpoint))
    for plane in ("hidden", "target_keys"):
        there, here = planes_of(destination, moved)[plane], planes_of(source, checkpoint)[plane]
        assert torch.equal(there.view(torch.int16), here.view(torch.int16))


def test_what_another_sequence_wrote_beyond_the_frontier_does_not_travel() -> None:
    memory = memory_of(MIXED)
    sequence = memory.open(1)
    advance(memory, sequence, 70, seed=1)
    checkpoint = memory.capture(sequence, ledger_of(70), "decode", "turn_end")
    before = encoded(memory, checkpoint)
    advance(memory, sequence, 40, seed=2)
    assert encoded(memory, checkpoint) == before


def test_a_ring_is_written_in_logical_order_whatever_memory_it_lay_in() -> None:
    memory = memory_of(FP32)
    checkpoint = checkpoint_at(memory, WINDOW + 30)
    rings = memory.images.rings
    wrapped = rings.keys[checkpoint.slot, :, [position % WINDOW for position in range(30, WINDOW + 30)]]
    _, (moved,) = brought_in(memory, encoded(memory, checkpoint))
    assert torch.equal(rings.export_slot(moved.slot, moved.frontier)[0], wrapped)


def test_lineage_travels() -> None:
    memory = memory_of(FP32)
    first = checkpoint_at(memory, 10)
    sequence = memory.restore(first, 20)
    advance(memory, sequence, 5, seed=2)
    fork = memory.fork(memory.capture(sequence, ledger_of(15), "decode", "turn_end"))
    _, (moved,) = brought_in(memory_of(FP32), encoded(memory, fork))
    assert (moved.parent, moved.fork_origin) == (first.id, fork.fork_origin)
    assert fork.fork_origin is not None


def test_one_document_may_come_in_twice() -> None:
    memory = memory_of(FP32)
    blob = encoded(memory, checkpoint_at(memory, 70))
    _, (one,) = brought_in(memory, blob)
    _, (other,) = brought_in(memory, memoryview(bytearray(blob)))
    assert one.id == other.id and one.slot != other.slot and not set(one.pages) & set(other.pages)
    memory.release(one)
    memory.check_invariants()
    assert encoded(memory, other) == blob


def test_an_imported_image_holds_nothing_of_the_slots_last_holder() -> None:
    source, destination = memory_of(FP32), memory_of(FP32, images=2)
    blob = encoded(source, checkpoint_at(source, 5))
    destination.release(checkpoint_at(destination, WINDOW))
    _, (moved,) = brought_in(destination, blob)
    assert not destination.images.rings.keys[moved.slot, :, 5:].any()


def test_a_released_checkpoint_cannot_be_encoded() -> None:
    memory = memory_of(FP32)
    checkpoint = checkpoint_at(memory, 70)
    memory.release(checkpoint)
    with pytest.raises(StateError, match="was released"):
        encoded(memory, checkpoint)


@pytest.mark.parametrize(("pages", "images", "pool"), [(2, 2, "target pages"), (6, 1, "images")])
def test_without_room_nothing_is_taken(pages: int, images: int, pool: str) -> None:
    source, destination = memory_of(FP32), memory_of(FP32, pages, images)
    blob = encoded(source, checkpoint_at(source, 150))
    if pool == "images":
        destination.open(0)
    free = (destination.target.free, destination.images.free)
    with pytest.raises(CapacityError) as refused:
        brought_in(destination, blob)
    assert refused.value.pool == pool
    assert (destination.target.free, destination.images.free) == free
    destination.check_invariants()


# ------------------------------------------------------------------------------------------- several checkpoints


def test_checkpoints_of_a_session_share_pages_in_the_document_and_in_the_memory_they_come_to() -> None:
    source, destination = memory_of(MIXED), memory_of(MIXED)
    start, end = two_checkpoints(source)
    blob = encoded(source, start, end)
    parts = take_apart(blob)
    # two images, and of either kind: the common first page, the start's tail, the end's second and third page
    assert len(parts.segments) == 2 + 2 * 4
    assert parts.names(0)["target/0"] == parts.names(1)["target/0"]
    _, moved = brought_in(destination, blob)
    assert moved[0].pages[:1] == moved[1].pages[:1] and destination.target.pages - destination.target.free == 4
    for found, wanted in zip(moved, (start, end), strict=True):
        assert found.ledger == wanted.ledger
        assert_same_planes(planes_of(destination, found), planes_of(source, wanted))
    assert encoded(destination, *moved) == blob
    destination.release(moved[0])
    destination.check_invariants()
    assert_same_planes(planes_of(destination, moved[1]), planes_of(source, end))


def test_a_ledger_is_stored_once_and_a_branch_with_what_differs() -> None:
    memory = memory_of(FP32)
    start, end = two_checkpoints(memory)
    branch = replace_ledger(memory, (*ledger_of(70)[:40], 4999, *ledger_of(70)[41:]))
    blob = encode_session(memory, [start, branch, end], record_of(end.ledger), FINGERPRINT)
    lengths = [(e["shared_tokens"], len(e["own_tokens"]) // 4) for e in take_apart(blob).manifest["checkpoints"]]
    assert lengths == [(70, 0), (40, 31), (151, 0)]
    _, moved = brought_in(memory_of(FP32), blob)
    assert [c.ledger for c in moved] == [start.ledger, branch.ledger, end.ledger]


def replace_ledger(memory: StateMemory, ledger: tuple[int, ...]) -> Checkpoint:
    sequence = memory.open(1)
    advance(memory, sequence, len(ledger) - 1, seed=9)
    return memory.capture(sequence, ledger, "decode", "explicit")


def test_a_session_is_whole_by_its_ledger_beyond_its_last_image_and_without_any() -> None:
    memory = memory_of(FP32)
    checkpoint = checkpoint_at(memory, 70)
    longer = record_of([*checkpoint.ledger, 1, 2, 3])
    document, (moved,) = brought_in(memory_of(FP32), encode_session(memory, [checkpoint], longer, FINGERPRINT))
    assert document.manifest.session.record() == longer and moved.ledger == longer.ledger[:71]
    document, loaded = brought_in(memory_of(FP32), encode_session(memory, [], longer, FINGERPRINT))
    assert document.manifest.session.record() == longer and loaded == []


# ------------------------------------------------------------------------------------------------------- detached


def detached(*, geometry: StateGeometry = MIXED) -> tuple[bytes, list[DetachedSegment], StateMemory]:
    memory = memory_of(geometry)
    checkpoints = two_checkpoints(memory)
    made = encode_detached(memory, checkpoints, record_of(checkpoints[1].ledger), FINGERPRINT)
    document, segments = made.document, list(made.segments)
    return document, segments, memory


def test_a_detached_document_and_its_segments_are_the_attached_one() -> None:
    document, segments, memory = detached()
    store = {segment.sha256: segment.read() for segment in segments}
    assert [len(data) for data in store.values()] == [segment.size for segment in segments]
    attached = encoded(memory, *memory.checkpoints)
    assert take_apart(document).manifest == take_apart(attached).manifest
    assert list(store.values()) == take_apart(attached).segments
    _, moved = brought_in(memory_of(MIXED), document, fetch=store.get)
    assert [c.ledger for c in moved] == [c.ledger for c in memory.checkpoints]


def test_digests_that_are_remembered_are_those_of_what_lies_there_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places are used again and again, by pages and images that share nothing but the place."""
    memory, digests = memory_of(MIXED), SegmentDigests()
    read: list[object] = []
    serialized = codec._serialized
    monkeypatch.setattr(codec, "_serialized", lambda tensors: read.append(tensors) or serialized(tensors))
    for frontier in (150, 130, 150, 40):
        checkpoint = checkpoint_at(memory, frontier)
        record = record_of(checkpoint.ledger)
        remembered = encode_detached(memory, [checkpoint], record, FINGERPRINT, digests=digests)
        fresh = encode_detached(memory, [checkpoint], record, FINGERPRINT)
        assert remembered.document == fresh.document
        assert [s.sha256 for s in remembered.of(0)] == [s.sha256 for s in fresh.segments]
        read.clear()
        kept = encode_detached(memory, [checkpoint], record, FINGERPRINT, keep_bytes=True)
        count = len(read)
        assert {hashlib.sha256(s.read()).digest() for s in kept.segments} == {s.sha256 for s in fresh.segments}
        assert len(read) == count, "what was kept was read again"
        read.clear()
        assert encode_detached(memory, [checkpoint], record, FINGERPRINT, digests=digests).document == fresh.document
        assert not read, "what is known was read"
        memory.release(checkpoint)


def test_a_checkpoint_whose_segments_are_missing_is_a_miss_and_the_rest_loads() -> None:
    document, segments, _ = detached()
    store = {segment.sha256: segment.read() for segment in segments}
    opened = open_document(document, fetch=store.get)
    start, end = opened.manifest.checkpoints
    del store[opened.manifest.segments[int(start.segments[0])].sha256]
    memory = memory_of(MIXED)
    with pytest.raises(MissingSegment, match="segment image"):
        opened.load(memory, start)
    assert everything_free(memory)
    assert opened.load(memory, end).frontier == 150
    with pytest.raises(MissingSegment):
        open_document(document).load(memory, end)


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data[:-1] + bytes([data[-1] ^ 1])])
def test_a_store_that_gives_other_bytes_is_not_believed(change: Any) -> None:
    document, segments, _ = detached()
    memory = memory_of(MIXED)
    opened = open_document(document, fetch=lambda sha256: change({s.sha256: s.read() for s in segments}[sha256]))
    with pytest.raises(FormatError, match="segment image"):
        opened.load(memory, opened.manifest.checkpoints[0])
    assert everything_free(memory)


# ------------------------------------------------------------------------------------------------------- records


def test_the_manifest_is_readable_without_geometry_or_payload() -> None:
    memory = memory_of(MIXED)
    checkpoint = checkpoint_at(memory, 100, "prompt", "turn_start")
    blob = encoded(memory, checkpoint)
    manifest = open_document(blob).manifest
    (entry,) = manifest.checkpoints
    assert manifest.ledger_of(entry).tolist() == ledger_of(100, "prompt")
    assert (entry.kind, entry.coverage.form, entry.frontier) == ("turn_start", "prompt", 100)
    assert manifest.fingerprint == FINGERPRINT and entry.id == checkpoint.id
    assert entry.coverage.ring == (100 - WINDOW, 100)
    assert manifest.names_of(entry) == ["image", "target/0", "target/1", "draft/0", "draft/1"]
    damaged = bytearray(blob)
    damaged[-40] ^= 1
    assert open_document(damaged).manifest.session.record() == manifest.session.record()


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"id": "two words"}, "manifest.session.id"),
        ({"id": ""}, "manifest.session.id"),
        ({"epoch": (1, -1)}, "manifest.session.epoch"),
        ({"opener": 72}, "manifest.session.opener"),
        ({"frontier": 72}, "manifest.session.frontier"),
        ({"ledger": (-1,)}, "manifest.ledger"),
        ({"transcript": ({"role": "nobody", "content": ""},)}, "manifest.transcript[0].role"),
        ({"transcript": ({"role": "user", "content": 7},)}, "manifest.transcript[0].content"),
        ({"transcript": ({"role": "user", "at": float("nan")},)}, "manifest.transcript[0].at"),
        ({"transcript": ({"role": "user", "content": "\ud800"},)}, "manifest.transcript[0].content"),
        ({"turns": (replace(TURN, request={"a": (1, 2)}),)}, "manifest.turns[0].request.a"),
        ({"turns": (replace(TURN, request={"a": {3: "x"}}),)}, "manifest.turns[0].request.a"),
        ({"turns": (replace(TURN, request={"a": torch.zeros(1)}),)}, "manifest.turns[0].request.a"),
        ({"turns": (replace(TURN, seed=2**64),)}, "manifest.turns[0].seed"),
        ({"turns": (replace(TURN, seed=-1),)}, "manifest.turns[0].seed"),
        ({"turns": (replace(TURN, request_sha256=b"short"),)}, "manifest.turns[0].request_sha256"),
        ({"turns": (replace(TURN, idempotency_key="k" * 256),)}, "manifest.turns[0].idempotency_key"),
        ({"turns": (replace(TURN, mode="both"),)}, "manifest.turns[0].mode"),
        ({"turns": (replace(TURN, published=-1),)}, "manifest.turns[0].published"),
        ({"turns": (replace(TURN, acceptance_length=float("inf")),)}, "manifest.turns[0].acceptance_length"),
        ({"turns": (replace(TURN, ended_at=-1.0),)}, "manifest.turns[0].ended_at"),
        ({"fork_points": (replace(LEFT, name="two words"),)}, "manifest.fork_points[0].name"),
        ({"fork_points": (replace(LEFT, ledger=(-1, 8, 9)),)}, "manifest.fork_points[0].ledger"),
        ({"fork_points": (replace(LEFT, tokens=2),)}, "manifest.fork_points[0]"),
        ({"fork_points": (replace(LEFT, messages=0),)}, "manifest.fork_points[0]"),
        ({"fork_points": (replace(LEFT, image=4),)}, "manifest.fork_points[0].image"),
        ({"fork_points": (replace(LEFT, ledger=()),)}, "manifest.fork_points[0].transcript"),
        ({"fork_points": (replace(LEFT, ledger=(), transcript=(), tokens=72),)}, "manifest.fork_points[0].tokens"),
        ({"fork_points": (replace(LEFT, ledger=(), transcript=(), messages=3),)}, "manifest.fork_points[0].messages"),
    ],
)
def test_a_record_that_cannot_travel_is_refused_by_name(changes: dict[str, Any], place: str) -> None:
    memory = memory_of(FP32)
    checkpoint = checkpoint_at(memory, 70)
    with pytest.raises(FormatError) as refused:
        encode_session(memory, [checkpoint], replace(record_of(checkpoint.ledger), **changes), FINGERPRINT)
    assert refused.value.place == place
