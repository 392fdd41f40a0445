"""A checkpoint by few large copies is the one that goes tensor by tensor, whatever the sizes of buffers and windows."""

from __future__ import annotations

import pytest
import torch

from state.codec import encode_detached, encode_session
from state.document import open_document
from state.errors import CapacityError, StateError
from state.host_copy import HostTransfer
from state.memory import StateMemory
from tests.state.samples import (
    FINGERPRINT,
    GEOMETRIES,
    MIXED,
    advance,
    assert_same_planes,
    checkpoint_at,
    everything_free,
    memory_of,
    planes_of,
    record_of,
)

FRONTIERS = [1, 63, 64, 65, 80, 81, 128, 200]


def digests(memory: StateMemory) -> list[bytes]:
    detached = encode_detached(memory, memory.checkpoints, record_of([1, 2, 3]), FINGERPRINT)
    return [segment.sha256 for segment in detached.segments]


@pytest.mark.parametrize("frontier", FRONTIERS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_out_and_back_gives_the_same_planes_and_the_same_segments(name: str, frontier: int) -> None:
    memory = memory_of(GEOMETRIES[name])
    checkpoint = checkpoint_at(memory, frontier)
    before, segments = planes_of(memory, checkpoint), digests(memory)
    pools = [memory.target] + ([memory.draft] if memory.draft else [])
    for staging in (4096, 1 << 20):
        transfer = HostTransfer(memory, staging)
        buffer = transfer.host_buffer(transfer.size(checkpoint) + 5)
        copy = transfer.out(checkpoint, buffer)
        assert copy.size == transfer.size(checkpoint)
        memory.release(checkpoint)
        for plane in (memory.images.gdn, memory.images.conv, memory.images.rings.keys, memory.images.rings.values):
            plane.fill_(3.0)
        for pool in pools:
            pool.keys.fill_(3.0)
            pool.values.fill_(3.0)
        checkpoint = transfer.back(copy, buffer)
        assert_same_planes(planes_of(memory, checkpoint), before)
        assert digests(memory) == segments
        for pool, pages in zip(pools, (checkpoint.pages, checkpoint.draft_pages), strict=False):
            beyond = pool.keys[pages[-1], :, frontier - 64 * (len(pages) - 1) :]
            assert not beyond.any(), "what another sequence left travelled"
        memory.check_invariants()


def test_a_copy_holds_what_the_planes_are_read_as_one_by_one() -> None:
    memory = memory_of(MIXED)
    checkpoint = checkpoint_at(memory, 200)
    transfer = HostTransfer(memory, 4096)
    copy = transfer.out(checkpoint, transfer.host_buffer(transfer.size(checkpoint)))
    wanted = planes_of(memory, checkpoint)
    for kind in ("target", "draft"):
        for part in ("keys", "values"):
            paged = copy.planes[f"{kind}_{part}"].movedim(1, 0).flatten(1, 2)[:, :200]
            assert torch.equal(paged, wanted[f"{kind}_{part}"])
    for name in ("gdn", "conv", "hidden", "ring_keys", "ring_values"):
        assert torch.equal(copy.planes[name], wanted[name])


def test_what_is_written_after_a_copy_does_not_reach_it() -> None:
    memory = memory_of(MIXED)
    checkpoint = checkpoint_at(memory, 150)
    before = planes_of(memory, checkpoint)
    transfer = HostTransfer(memory)
    buffer = transfer.host_buffer(transfer.size(checkpoint))
    copy = transfer.out(checkpoint, buffer)
    memory.release(checkpoint)
    other = memory.open(1)
    advance(memory, other, 300, seed=5)
    assert_same_planes(planes_of(memory, transfer.back(copy, buffer)), before)


def test_a_buffer_that_is_too_small_is_refused_before_anything_is_taken() -> None:
    memory = memory_of(MIXED)
    checkpoint = checkpoint_at(memory, 150)
    transfer = HostTransfer(memory)
    size = transfer.size(checkpoint)
    buffer = transfer.host_buffer(size)
    copy = transfer.out(checkpoint, buffer)
    with pytest.raises(StateError, match=f"has {size - 1} bytes, must have {size}"):
        transfer.out(checkpoint, buffer[: size - 1])
    memory.release(checkpoint)
    with pytest.raises(StateError, match="host buffer"):
        transfer.back(copy, buffer[: size - 1])
    assert everything_free(memory)
    with pytest.raises(StateError, match="staging_bytes is 16"):
        HostTransfer(memory, 16)


def test_without_room_nothing_comes_back_and_nothing_is_lost() -> None:
    memory = memory_of(MIXED, images=3)
    checkpoint = checkpoint_at(memory, 150)
    transfer = HostTransfer(memory)
    buffer = transfer.host_buffer(transfer.size(checkpoint))
    copy = transfer.out(checkpoint, buffer)
    held = [memory.open(1), memory.open(1)]
    with pytest.raises(CapacityError):
        transfer.back(copy, buffer)
    memory.check_invariants()
    memory.close(held[0])
    memory.release(checkpoint)
    assert transfer.back(copy, buffer).id == checkpoint.id


@pytest.mark.gpu
@pytest.mark.parametrize("frontier", FRONTIERS)
def test_on_a_card_what_comes_back_from_pinned_memory_is_what_left(frontier: int) -> None:
    source = memory_of(MIXED)
    checkpoint = checkpoint_at(source, frontier)
    record = record_of(checkpoint.ledger)
    document = open_document(encode_session(source, [checkpoint], record, FINGERPRINT))
    memory = StateMemory(MIXED, target_pages=12, draft_pages=12, images=3, device="cuda")
    there = document.load(memory, document.manifest.checkpoints[0])
    transfer = HostTransfer(memory, 4096)
    buffer = transfer.host_buffer(transfer.size(there))
    copy = transfer.out(there, buffer)
    memory.release(there)
    memory.target.keys.fill_(3.0)  # enqueued later: it must not reach the copy
    assert buffer.is_pinned() and transfer.back(copy, buffer).id == checkpoint.id
    assert digests(memory) == digests(source)
