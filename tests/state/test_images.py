"""Images hold a sequence's state of fixed size; rings hold the last S positions in them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from state.errors import CapacityError, StateError
from state.geometry import StateGeometry
from state.images import ImagePool
from state.rings import DraftRings
from tests.state.samples import FP32, GEOMETRIES, MIXED, NO_DRAFTER, WINDOW, memory_of


def planes_in(images: ImagePool) -> list[torch.Tensor]:
    return [images.gdn, images.conv, images.hidden, images.rings.keys, images.rings.values]


def test_copy_and_clear_reach_every_plane_of_one_slot_only() -> None:
    images = ImagePool(MIXED, 3)
    for number, plane in enumerate(planes_in(images)):
        plane[0], plane[1], plane[2] = number + 1, 20, 30
    images.copy(0, 1)
    for number, plane in enumerate(planes_in(images)):
        assert (plane[0] == number + 1).all() and (plane[1] == number + 1).all() and (plane[2] == 30).all()
    images.clear(0)
    for number, plane in enumerate(planes_in(images)):
        assert (plane[0] == 0).all() and (plane[1] == number + 1).all() and (plane[2] == 30).all()


def test_slots_are_handed_out_once_and_given_back_once() -> None:
    images = ImagePool(FP32, 2)
    first, second = images.allocate(), images.allocate()
    assert {first, second} == {0, 1} and images.free == 0
    with pytest.raises(CapacityError, match=r"^images: 1 wanted, 0 free$"):
        images.allocate()
    images.release(first)
    with pytest.raises(StateError, match=f"slot {first} is released, but it is free already"):
        images.release(first)
    assert images.allocate() == first


def test_books_that_disagree_with_the_holders_are_found() -> None:
    images = ImagePool(FP32, 2)
    slot = images.allocate()
    images.check_slots([slot])
    for held in ([], [slot, slot], [0, 1]):
        with pytest.raises(StateError):
            images.check_slots(held)


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES.keys())
def test_stated_bytes_are_those_of_the_tensors(geometry: StateGeometry) -> None:
    memory = memory_of(geometry)
    assert sum(plane[0].nbytes for plane in planes_in(memory.images)) == geometry.image_bytes
    assert memory.target.keys[0].nbytes + memory.target.values[0].nbytes == geometry.target_page_bytes
    draft = memory.draft
    assert (draft.keys[0].nbytes + draft.values[0].nbytes if draft else 0) == geometry.draft_page_bytes


def test_rings_of_the_official_27b_drafter_take_40_mib() -> None:
    official = replace(
        NO_DRAFTER,
        ring_layers=5,
        draft_kv_heads=8,
        draft_head_dim=128,
        window=2048,
        ring_key_dtype=torch.bfloat16,
        ring_value_dtype=torch.float16,
    )
    assert official.ring_bytes == 40 * 2**20


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("kv_layers", -1, "kv_layers is -1, must not be negative"),
        ("kv_dtype", torch.int8, "kv_dtype is torch.int8, must be one of"),
        ("hidden_size", 0, "hidden_size is 0"),
        ("gdn_key_dim", 0, "gdn_key_dim is 0, but gdn_layers needs at least 1"),
        ("kv_heads", 0, "kv_heads is 0, but kv_layers needs at least 1"),
        ("window", 0, "window is 0, but ring_layers needs at least 1"),
        ("draft_head_dim", 0, "draft_head_dim is 0, but a drafter needs at least 1"),
    ],
)
def test_sizes_that_make_no_sense_are_refused_by_name(field: str, value: object, sentence: str) -> None:
    with pytest.raises(StateError, match=sentence):
        replace(FP32, **{field: value})  # type: ignore[arg-type]


def ring_of(window: int) -> DraftRings:
    return DraftRings(2, 2, window, 1, 2, torch.float32, torch.float16)


@settings(max_examples=80, deadline=None)
@given(window=st.integers(1, 9), steps=st.lists(st.integers(1, 14), min_size=1, max_size=6))
def test_a_ring_gives_back_the_last_window_in_logical_order(window: int, steps: list[int]) -> None:
    rings = ring_of(window)
    frontier = 0
    for step in steps:
        start, frontier = frontier, frontier + step
        for position in range(max(start, frontier - window), frontier):
            rings.keys[1, :, position % window] = position
            rings.values[1, :, position % window] = -position
    keys, values = rings.export_slot(1, frontier)
    live = torch.arange(max(0, frontier - window), frontier)
    assert keys.shape == (2, len(live), 1, 2)
    assert torch.equal(keys[1, :, 0, 1].long(), live) and torch.equal(values[0, :, 0, 0].long(), -live)

    rings.import_slot(0, frontier, keys, values)
    for position in live.tolist():
        assert (rings.keys[0, :, position % window] == position).all()
        assert (rings.values[0, :, position % window] == -position).all()


def test_import_leaves_what_lies_outside_the_live_interval() -> None:
    rings = ring_of(8)
    rings.keys[0], rings.values[0] = 5, 5
    rings.import_slot(0, 3, torch.ones(2, 3, 1, 2), torch.ones(2, 3, 1, 2, dtype=torch.float16))
    assert (rings.keys[0, :, :3] == 1).all() and (rings.keys[0, :, 3:] == 5).all()


def test_more_positions_than_the_window_cannot_lie_in_a_ring() -> None:
    rings = ring_of(8)
    assert rings.indices(5, 13).tolist() == [5, 6, 7, 0, 1, 2, 3, 4]
    with pytest.raises(StateError, match="more than the window 8"):
        rings.indices(5, 14)


def test_without_local_layers_there_is_no_ring_to_read() -> None:
    rings = DraftRings(2, 0, WINDOW, 1, 2, torch.float32, torch.float32)
    assert rings.live(500) == (500, 500)
    assert rings.export_slot(0, 500)[0].shape == (0, 0, 1, 2)
