"""Sequences, checkpoints and forks share what they may share, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from state.checkpoint import Checkpoint
from state.coverage import FORMS, Form
from state.errors import CapacityError, CoverageError, StateError
from state.geometry import StateGeometry
from state.memory import UNSETTLED, SequenceMemory, StateMemory
from tests.state.samples import (
    FP32,
    GEOMETRIES,
    MIXED,
    NO_DRAFTER,
    Planes,
    advance,
    assert_same_planes,
    checkpoint_at,
    everything_free,
    ledger_of,
    memory_of,
    planes_of,
)

# ------------------------------------------------------------------------------------------------ single behaviours


def test_an_opened_sequence_has_a_zero_image_even_in_a_used_slot() -> None:
    memory = memory_of(MIXED, images=1)
    sequence = memory.open(10)
    advance(memory, sequence, 10, seed=1)
    memory.close(sequence)
    sequence = memory.open(10)
    images = memory.images
    for plane in (images.gdn, images.conv, images.hidden, images.rings.keys, images.rings.values):
        assert not plane[sequence.slot].any()
    assert (sequence.frontier, sequence.context_frontier) == (0, 0)


@pytest.mark.parametrize("frontier", [63, 64, 65, 128, 150])
def test_restore_shares_full_pages_and_copies_the_partial_one(frontier: int) -> None:
    memory = memory_of(FP32)
    checkpoint = checkpoint_at(memory, frontier)
    sequence = memory.restore(checkpoint, frontier + 1)
    full = frontier // 64
    assert tuple(sequence.pages[:full]) == checkpoint.pages[:full]
    assert tuple(sequence.draft_pages[:full]) == checkpoint.draft_pages[:full]
    assert not set(sequence.pages[full:]) & set(checkpoint.pages)
    assert not set(sequence.draft_pages[full:]) & set(checkpoint.draft_pages)
    assert len(sequence.pages) == len(sequence.draft_pages) == frontier // 64 + 1
    assert sequence.slot != checkpoint.slot and sequence.parent == checkpoint.id
    assert_same_planes(planes_of(memory, sequence), planes_of(memory, checkpoint))


def test_restore_to_fewer_tokens_than_the_frontier_still_holds_the_frontier() -> None:
    memory = memory_of(FP32)
    checkpoint = checkpoint_at(memory, 100)
    sequence = memory.restore(checkpoint, 0)
    assert len(sequence.pages) == 2
    assert_same_planes(planes_of(memory, sequence), planes_of(memory, checkpoint))


def test_a_restored_sequence_sees_none_of_what_the_first_owner_wrote_beyond_the_frontier() -> None:
    memory = memory_of(FP32)
    sequence = memory.open(1)
    advance(memory, sequence, 10, seed=1)
    checkpoint = memory.capture(sequence, ledger_of(10), "decode", "turn_end")
    advance(memory, sequence, 20, seed=2)
    restored = memory.restore(checkpoint, 64)
    assert not memory.target.keys[restored.pages[0], :, 10:].any()
    assert memory.draft is not None and not memory.draft.values[restored.draft_pages[0], :, 10:].any()


def test_a_checkpoint_does_not_hold_pages_that_were_reserved_beyond_its_frontier() -> None:
    memory = memory_of(FP32)
    sequence = memory.open(400)
    advance(memory, sequence, 64, seed=1)
    checkpoint = memory.capture(sequence, ledger_of(64), "decode", "turn_end")
    assert checkpoint.pages == tuple(sequence.pages[:1])
    assert checkpoint.draft_pages == tuple(sequence.draft_pages[:1])


def test_two_sequences_restored_from_one_checkpoint_go_different_ways() -> None:
    memory = memory_of(MIXED)
    checkpoint = checkpoint_at(memory, 70)
    before = planes_of(memory, checkpoint)
    one, other = memory.restore(checkpoint, 90), memory.restore(checkpoint, 90)
    advance(memory, one, 20, seed=11)
    advance(memory, other, 20, seed=12)
    memory.check_invariants()
    assert_same_planes(planes_of(memory, checkpoint), before)
    first, second = planes_of(memory, one), planes_of(memory, other)
    for name in ("target_keys", "draft_values", "gdn", "ring_keys"):
        assert not torch.equal(first[name], second[name])
    assert torch.equal(first["target_keys"][:, :70], second["target_keys"][:, :70])


def test_a_fork_outlives_its_origin() -> None:
    memory = memory_of(MIXED)
    origin = checkpoint_at(memory, 100)
    wanted = planes_of(memory, origin)
    fork = memory.fork(origin)
    assert fork.id != origin.id and fork.fork_origin == origin.id
    assert (fork.ledger, fork.frontier, fork.form) == (origin.ledger, origin.frontier, origin.form)
    assert fork.pages == origin.pages and fork.slot != origin.slot
    memory.release(origin)
    memory.check_invariants()
    assert_same_planes(planes_of(memory, fork), wanted)
    memory.release(fork)
    assert everything_free(memory)


def test_a_checkpoint_knows_what_it_went_on_from() -> None:
    memory = memory_of(FP32)
    first = checkpoint_at(memory, 10)
    sequence = memory.restore(first, 20)
    advance(memory, sequence, 5, seed=3)
    second = memory.capture(sequence, ledger_of(15), "decode", "turn_end")
    named = memory.capture(sequence, ledger_of(15), "decode", "explicit", parent="f" * 32)
    assert (first.parent, second.parent, named.parent) == (None, first.id, "f" * 32)
    assert len({first.id, second.id, named.id}) == 3 and len(second.id) == 32


@pytest.mark.parametrize("lag", [1, 5])
def test_a_draft_context_that_has_not_caught_up_cannot_be_captured(lag: int) -> None:
    memory = memory_of(FP32)
    sequence = memory.open(20)
    sequence.settle(20)
    sequence.context_frontier = 20 - lag
    with pytest.raises(CoverageError) as refused:
        memory.capture(sequence, ledger_of(20), "decode", "turn_end")
    assert (refused.value.plane, refused.value.has, refused.value.needs) == ("ring", (0, 20 - lag), (0, 20))
    assert memory.checkpoints == ()
    memory.check_invariants()


@pytest.mark.parametrize("plane", ["target_kv", "gdn", "conv", "hidden"])
@pytest.mark.parametrize("stamp", [UNSETTLED, 19, 21])
def test_a_plane_that_was_not_stamped_at_the_frontier_cannot_be_captured(plane: str, stamp: int) -> None:
    memory = memory_of(MIXED)
    sequence = memory.open(64)
    sequence.settle(20)
    sequence.context_frontier = 20
    setattr(sequence, plane, stamp)
    with pytest.raises(CoverageError, match=plane):
        memory.capture(sequence, range(21), "decode", "turn_end")
    sequence.settle(20)
    memory.capture(sequence, range(21), "decode", "turn_end")


def test_an_unsettled_image_covers_nothing() -> None:
    memory = memory_of(MIXED)
    sequence = memory.open(64)
    sequence.settle(20)
    sequence.context_frontier = 20
    sequence.unsettle_image()
    with pytest.raises(CoverageError):
        memory.capture(sequence, range(21), "decode", "turn_end")


def test_without_a_drafter_the_context_frontier_does_not_matter() -> None:
    memory = memory_of(NO_DRAFTER)
    sequence = memory.open(20)
    sequence.settle(20)
    assert memory.capture(sequence, ledger_of(20), "decode", "turn_end").coverage.ring is None


@pytest.mark.parametrize(("form", "tokens"), [("decode", 20), ("decode", 22), ("prompt", 19), ("prompt", 21)])
def test_a_ledger_that_does_not_fit_the_form_cannot_be_captured(form: Form, tokens: int) -> None:
    memory = memory_of(FP32)
    sequence = memory.open(20)
    advance(memory, sequence, 20, seed=1)
    with pytest.raises(CoverageError, match="ledger_tokens"):
        memory.capture(sequence, range(tokens), form, "turn_end")


def test_a_frontier_beyond_the_pages_cannot_be_captured() -> None:
    memory = memory_of(FP32)
    sequence = memory.open(64)
    sequence.settle(65)
    sequence.context_frontier = 65
    with pytest.raises(CoverageError, match="coverage of target_kv is 64, but the frontier needs 65"):
        memory.capture(sequence, ledger_of(65), "decode", "turn_end")


def test_restore_and_fork_check_coverage_again() -> None:
    memory = memory_of(FP32)
    good = checkpoint_at(memory, 20)
    slot, pages, draft_pages = memory.take_for_import(20)
    places = {"slot": slot, "pages": pages, "draft_pages": draft_pages}
    bad = replace(good, coverage=replace(good.coverage, gdn=19), **places)
    with pytest.raises(CoverageError, match="gdn"):
        memory.adopt(bad)
    lying = memory.adopt(replace(good, **places))
    object.__setattr__(lying, "coverage", bad.coverage)
    for use in (lambda: memory.restore(lying, 20), lambda: memory.fork(lying)):
        with pytest.raises(CoverageError, match="gdn"):
            use()
    memory.check_invariants()


@pytest.mark.parametrize(
    ("pages", "draft_pages", "images", "pool"),
    [(3, 9, 9, "target pages"), (9, 3, 9, "draft pages"), (9, 9, 1, "images")],
)
def test_whichever_pool_is_full_nothing_is_taken_from_the_others(
    pages: int, draft_pages: int, images: int, pool: str
) -> None:
    memory = StateMemory(FP32, pages, draft_pages, images)
    sequence = memory.open(100)
    advance(memory, sequence, 100, seed=1)
    actions: list[Callable[[], object]] = [lambda: memory.open(200)]
    if pool == "images":
        actions.append(lambda: memory.capture(sequence, ledger_of(100), "decode", "turn_end"))
    else:
        checkpoint = memory.capture(sequence, ledger_of(100), "decode", "turn_end")
        actions.append(lambda: memory.restore(checkpoint, 200))
    assert memory.draft is not None
    before = (memory.target.free, memory.draft.free, memory.images.free, list(sequence.pages))
    for action in actions:
        with pytest.raises(CapacityError) as refused:
            action()
        assert refused.value.pool == pool
        assert (memory.target.free, memory.draft.free, memory.images.free, list(sequence.pages)) == before
        memory.check_invariants()


def test_what_has_ended_cannot_be_used() -> None:
    memory = memory_of(FP32)
    checkpoint = checkpoint_at(memory, 10)
    memory.release(checkpoint)
    sequence = memory.open(10)
    memory.close(sequence)
    uses: list[Callable[[], object]] = [
        lambda: memory.restore(checkpoint, 20),
        lambda: memory.fork(checkpoint),
        lambda: memory.release(checkpoint),
        lambda: memory.close(sequence),
        lambda: memory.capture(sequence, ledger_of(10), "decode", "turn_end"),
    ]
    for use in uses:
        with pytest.raises(StateError, match=r"is not open|was released"):
            use()
    assert everything_free(memory)


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES.keys())
@pytest.mark.parametrize("form", FORMS)
def test_capture_and_restore_keep_every_readable_byte(geometry: StateGeometry, form: Form) -> None:
    for frontier in (1, 64, 65, 200):
        memory = memory_of(geometry)
        sequence = memory.open(1)
        advance(memory, sequence, frontier, seed=frontier)
        wanted = planes_of(memory, sequence)
        checkpoint = memory.capture(sequence, ledger_of(frontier, form), form, "turn_end")
        memory.close(sequence)
        restored = memory.restore(checkpoint, frontier + 70)
        assert_same_planes(planes_of(memory, restored), wanted)
        advance(memory, restored, 70, seed=5)
        assert_same_planes(planes_of(memory, checkpoint), wanted)


def test_the_invariant_check_finds_a_leak_and_a_second_writer() -> None:
    memory = memory_of(FP32)
    memory.target.allocate(1)
    with pytest.raises(StateError, match="counts 1 references, but 0 exist"):
        memory.check_invariants()

    memory = memory_of(FP32)
    one, other = memory.open(10), memory.open(10)
    memory.target.share(one.pages)
    memory.target.release(other.pages)
    other.pages = list(one.pages)
    with pytest.raises(StateError, match="has two writers"):
        memory.check_invariants()


def test_the_invariant_check_finds_a_writer_below_a_checkpoints_frontier() -> None:
    memory = memory_of(FP32)
    sequence = memory.open(10)
    advance(memory, sequence, 10, seed=1)
    memory.capture(sequence, ledger_of(10), "decode", "turn_end")
    memory.check_invariants()
    sequence.settle(9)
    with pytest.raises(StateError, match="written below its frontier"):
        memory.check_invariants()


# ------------------------------------------------------------------------------------------------- random histories


class SessionsGrowForkAndEnd(RuleBasedStateMachine):
    """Random trees of sequences and checkpoints. After each step all books agree, and every holder still reads what
    was written for it, whatever the others did since."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = StateMemory(MIXED, target_pages=14, draft_pages=12, images=6)
        self.sequences: list[tuple[SequenceMemory, Planes]] = []
        self.checkpoints: list[tuple[Checkpoint, Planes]] = []
        self.seed = 0

    def free(self) -> tuple[int, int, int]:
        assert self.memory.draft is not None
        return self.memory.target.free, self.memory.draft.free, self.memory.images.free

    @rule(tokens=st.integers(0, 300))
    def open(self, tokens: int) -> None:
        before = self.free()
        try:
            sequence = self.memory.open(tokens)
        except CapacityError:
            assert self.free() == before
        else:
            self.sequences.append((sequence, planes_of(self.memory, sequence)))

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 9), tokens=st.integers(1, 90))
    def decode(self, which: int, tokens: int) -> None:
        index = which % len(self.sequences)
        sequence, _ = self.sequences[index]
        self.seed += 1
        before = self.free()
        try:
            advance(self.memory, sequence, tokens, self.seed)
        except CapacityError:
            assert self.free() == before
        else:
            self.sequences[index] = (sequence, planes_of(self.memory, sequence))

    @precondition(lambda self: any(sequence.frontier for sequence, _ in self.sequences))
    @rule(which=st.integers(0, 9), form=st.sampled_from(FORMS))
    def capture(self, which: int, form: Form) -> None:
        started = [pair for pair in self.sequences if pair[0].frontier]
        sequence, planes = started[which % len(started)]
        before = self.free()
        try:
            checkpoint = self.memory.capture(sequence, ledger_of(sequence.frontier, form), form, "turn_end")
        except CapacityError:
            assert self.free() == before
        else:
            assert self.free() == (before[0], before[1], before[2] - 1)
            self.checkpoints.append((checkpoint, planes))

    @precondition(lambda self: self.checkpoints)
    @rule(which=st.integers(0, 9), more=st.integers(0, 100))
    def restore(self, which: int, more: int) -> None:
        checkpoint, planes = self.checkpoints[which % len(self.checkpoints)]
        before = self.free()
        try:
            sequence = self.memory.restore(checkpoint, checkpoint.frontier + more)
        except CapacityError:
            assert self.free() == before
        else:
            self.sequences.append((sequence, planes))

    @precondition(lambda self: self.checkpoints)
    @rule(which=st.integers(0, 9))
    def fork(self, which: int) -> None:
        checkpoint, planes = self.checkpoints[which % len(self.checkpoints)]
        before = self.free()
        try:
            self.checkpoints.append((self.memory.fork(checkpoint), planes))
        except CapacityError:
            assert self.free() == before

    @precondition(lambda self: self.checkpoints)
    @rule(which=st.integers(0, 9))
    def release(self, which: int) -> None:
        checkpoint, _ = self.checkpoints.pop(which % len(self.checkpoints))
        self.memory.release(checkpoint)

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 9))
    def close(self, which: int) -> None:
        sequence, _ = self.sequences.pop(which % len(self.sequences))
        self.memory.close(sequence)

    @invariant()
    def books_agree(self) -> None:
        self.memory.check_invariants()

    @invariant()
    def everyone_reads_what_was_written(self) -> None:
        for holder, planes in [*self.sequences, *self.checkpoints]:
            assert_same_planes(planes_of(self.memory, holder), planes)

    def teardown(self) -> None:
        for sequence, _ in self.sequences:
            self.memory.close(sequence)
        for checkpoint, _ in self.checkpoints:
            self.memory.release(checkpoint)
        assert everything_free(self.memory)


SessionsGrowForkAndEnd.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestSessionsGrowForkAndEnd = SessionsGrowForkAndEnd.TestCase
