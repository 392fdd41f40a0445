"""Whatever call fails and wherever a crash comes: afterwards there is the old state or the new one, and no litter."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from state.byte_store import DirectoryStore
from state.durable import DurableTier
from state.errors import StateError, StoreError
from state.names import Epoch, SessionKey
from tests.state.model_files import Crash, ModelFiles
from tests.state.stores import KEY, TENANT, Clock, checkpoint, data_of, document, open_tier, publish, reader, segment

ROOT = Path("/durable")
OTHER = SessionKey(TENANT, "other")
AMPLE = 1 << 20
A, B, C, D, E = (data_of(letter, 90) for letter in "abcde")
NEEDED = {document("old"): (A, B), document("new"): (B, E), document("other"): (A, D)}


def publish_new(tier: DurableTier) -> None:
    publish(tier, "new", [B, E], sequence=2, seconds=3.0)


def delete(tier: DurableTier) -> None:
    tier.delete(KEY, Epoch(1, 1))


def sweep(tier: DurableTier) -> None:
    tier.sweep()


def tight() -> int:
    """A budget in which the new publication needs the bytes of the leftover segment and of one more."""
    clock = Clock()
    _, tier = prepared(clock, AMPLE)
    before = tier.size()
    written = tier.publish(KEY, Epoch(1, 1), 2, document("new"), [checkpoint("new", [B, E], 3.0)], reader(B, E)).written
    return before + written - len(C) - 1


ACTS = {
    "publish": (publish_new, lambda: AMPLE),
    "evict and publish": (publish_new, tight),
    "delete": (delete, lambda: AMPLE),
    "sweep": (sweep, lambda: AMPLE),
}


def prepared(clock: Clock, budget: int) -> tuple[ModelFiles, DurableTier]:
    """A session, another one that shares a segment with it, and a leftover segment."""
    files = ModelFiles()
    tier = open_tier(DirectoryStore(ROOT, files, clock), clock, budget=AMPLE)
    publish(tier, "other", [C], key=OTHER, seconds=2.0)
    publish(tier, "other", [A, D], key=OTHER, sequence=2, seconds=2.0)
    publish(tier, "old", [A, B], seconds=3.0)
    tier = open_tier(DirectoryStore(ROOT, files, clock), clock, budget=budget)
    files.calls = 0
    return files, tier


def state(tier: DurableTier, key: SessionKey, *, evicted: bool) -> bytes | None:
    """The document that is read. Checks that all segments it needs are there, unless they may have been evicted."""
    with tier.reading(key) as reading:
        if reading is None:
            return None
        for data in NEEDED[reading.document]:
            found = reading.segment(segment(data).sha256)
            assert found == data or (evicted and found is None)
        return reading.document


def expected(act: str, done: bool) -> set[bytes | None]:
    new = document("new") if "publish" in act else None if act == "delete" else document("old")
    return {new} if done else {new, document("old")}


def check(files: ModelFiles, clock: Clock, act: str, done: bool) -> None:
    """After a reboot: old or new; then, once leases have ended, a sweep leaves just what is needed, and all goes on."""
    clock.now += 7200
    tier = open_tier(DirectoryStore(ROOT, files, clock), clock, session_ttl=1e9)
    evicted = act.startswith("evict")
    found = state(tier, KEY, evicted=evicted)
    assert found in expected(act, done)
    assert state(tier, OTHER, evicted=evicted) == document("other")
    tier.sweep()
    assert state(tier, KEY, evicted=evicted) == found
    needed = {data for text in (found, document("other")) if text for data in NEEDED[text]}
    segments = [path for path in files.paths() if "segments" in path.parts]
    assert {path.name for path in segments} <= {segment(data).sha256.hex() for data in needed}
    if not evicted:
        assert len(segments) == len(needed)
    assert len([path for path in files.paths() if "sessions" in path.parts]) == 2 - (found is None)
    assert not [path for path in files.paths() if "leases" in path.parts or path.name.startswith("tmp-")]
    publish(tier, "new", [B, E], epoch=Epoch(2, 1))
    assert state(tier, KEY, evicted=False) == document("new")


def calls_of(act: Callable[[DurableTier], None], budget: int) -> int:
    files, tier = prepared(Clock(), budget)
    act(tier)
    return files.calls


def attempt(act: Callable[[DurableTier], None], tier: DurableTier) -> tuple[bool, set[int | None]]:
    """Whether it was done, and with which errno it was not."""
    try:
        act(tier)
    except StoreError as error:
        return False, {error.code}
    return True, set()


@pytest.mark.parametrize("eager_names", [False, True])
@pytest.mark.parametrize("act", ACTS)
def test_a_crash_before_any_call_leaves_old_or_new(act: str, eager_names: bool) -> None:
    run, budget = ACTS[act][0], ACTS[act][1]()
    calls = calls_of(run, budget)
    for crash_at in range(1, calls + 2):
        clock = Clock()
        files, tier = prepared(clock, budget)
        files.crash_at = crash_at
        try:
            run(tier)
            done = True
        except Crash:
            done = False
        check(files.after_crash(eager_names=eager_names), clock, act, done)
    assert done
    assert calls > 10


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("act", ACTS)
def test_a_call_that_fails_is_a_typed_error_and_leaves_old_or_new(act: str, code: int) -> None:
    run, budget = ACTS[act][0], ACTS[act][1]()
    seen: set[bool] = set()
    for fail_at in range(1, calls_of(run, budget) + 1):
        clock = Clock()
        files, tier = prepared(clock, budget)
        files.fail_at, files.code = fail_at, code
        done, codes = attempt(run, tier)
        assert codes <= {code}
        seen.add(done)
        # In the same process: what was there is there, and the same thing can be done again.
        assert state(tier, KEY, evicted=budget != AMPLE) in expected(act, done)
        check(files.after_crash(eager_names=True), clock, act, done)
    assert False in seen


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_what_failed_can_be_tried_again_at_once(code: int) -> None:
    for fail_at in range(1, calls_of(publish_new, AMPLE) + 1):
        files, tier = prepared(Clock(), AMPLE)
        files.fail_at, files.code = fail_at, code
        try:
            publish_new(tier)
        except StateError:
            publish_new(tier)
        assert state(tier, KEY, evicted=False) == document("new")


def test_the_tight_budget_makes_room_by_evicting() -> None:
    _, tier = prepared(Clock(), tight())
    publish_new(tier)
    assert state(tier, KEY, evicted=False) == document("new")
    assert state(tier, OTHER, evicted=True) == document("other")
    assert [tier.segment(segment(data).sha256) for data in (C, D)] == [None, None]
