"""What of a turn can travel while it decodes, what is left for the pause, and checkpoints that are asked for."""

from __future__ import annotations

import functools
import hashlib
import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from deployment.engine import errors
from deployment.engine.commands import (
    Checkpoint,
    DropStaged,
    Export,
    ExportPages,
    Fork,
    Import,
    Inspect,
    SegmentBytes,
    StageSegments,
    Submit,
    Suspend,
    Unpin,
    VerifyStaged,
)
from deployment.engine.events import Checkpointed, Evicted, Exported, Failed, Imported, Pages, Staged, Suspended
from deployment.engine.options import Backend
from deployment.engine.staging import StagedSegments
from state.document import open_document
from state.session_record import SessionRecord
from tests.engine.hashing import Clock
from tests.engine.test_resumed_turns import resumed_after, rounds
from tests.engine.tiny import PUBLIC, TinyDriver
from tests.engine.ways import state_of

IDS = tuple((5 * place + 3) % PUBLIC for place in range(150))


def tiny(backend: Backend = "dflash", **more: Any) -> TinyDriver:
    return TinyDriver(backend, **{"lanes": 1, "images": 6, "pages": 24, "check_invariants": True, **more})


def decoding(driver: TinyDriver, told: int, **fields: Any) -> Submit:
    """A turn of session `s` that has told that many rounds."""
    submit = Submit("t", IDS, max_tokens=80, ignore_eos=True, session="s", **fields)
    driver.engine.execute(submit)
    while len(rounds(driver.of("t"))) < told:
        driver.engine.step()
    return submit


def exported(driver: TinyDriver, **how: Any) -> Exported:
    """Session `s` as it stands, of its turn what was told."""
    ledger = IDS + resumed_after(rounds(driver.of("t"))).token_ids
    answer = driver.call(Export("e", "s", SessionRecord("s", ledger), **how))
    assert isinstance(answer, Exported), answer
    return answer


# ------------------------------------------------------------------------------------------------ pre-copy


@pytest.mark.parametrize("backend", ["none", "dflash", "dflash2"])
def test_a_turn_moves_with_its_pages_ahead_and_goes_on_as_if_it_had_stayed(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, destination = tiny(backend), tiny(backend)
    submit = decoding(source, 3)
    first = source.call(ExportPages("p", "t", most=1))
    second = source.call(ExportPages("p", "t", first=first.end))
    assert isinstance(second, Pages) and (first.end, first.full, second.first, second.end) == (1, 2, 1, 2)
    kinds = 2 if backend == "dflash" else 1  # the drafter of DFlash has a full-attention layer
    ahead = first.segments + second.segments
    assert len(ahead) == 2 * kinds
    assert all(hashlib.sha256(segment.data).digest() == segment.sha256 for segment in ahead)
    staged = destination.call(StageSegments("g", "m", ahead))
    assert staged == Staged("g", "m", len(ahead), sum(len(segment.data) for segment in ahead))

    for _ in range(3):
        source.engine.step()
    source.engine.execute(Suspend("x", "t"))
    assert isinstance(source.events[-1], Suspended)
    read = counting(monkeypatch, "state.codec._page")
    left = exported(source, without=frozenset(segment.sha256 for segment in ahead))
    assert len(read) == kinds, "of all pages, the tail's alone"
    assert not {segment.sha256 for segment in left.segments} & {segment.sha256 for segment in ahead}
    destination.call(StageSegments("g", "m", left.segments))
    hashed = counting(monkeypatch, "state.document.SessionDocument._check_digest")
    answer = destination.call(Import("i", "s", left.document, migration="m"))
    assert isinstance(answer, Imported) and answer.frontiers == left.frontiers and not hashed
    assert destination.call(Inspect("f")).facts["staged_bytes"] == 0

    told = rounds(source.of("t"))
    destination.engine.execute(replace(submit, resumed=resumed_after(told)))
    destination.steps()
    undisturbed = tiny(backend)
    stayed = undisturbed.run(IDS, session="s", max_tokens=80, ignore_eos=True)
    came = destination.finished("t")
    assert (came.token_ids, came.rounds) == (stayed.token_ids, stayed.rounds)
    assert destination.started("t").prefilled == 0
    assert state_of(destination, "s")[-1] == state_of(undisturbed, "s")[-1], "the state after it differs in some byte"


def counting(monkeypatch: pytest.MonkeyPatch, name: str) -> list[object]:
    """Arguments of every call of a function, which does what it did."""
    calls: list[object] = []
    path, _, attribute = name.rpartition(".")
    try:
        holder: Any = importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, cls = path.rpartition(".")
        holder = getattr(importlib.import_module(module), cls)
    real: Callable[..., Any] = getattr(holder, attribute)

    @functools.wraps(real)
    def counted(*args: Any) -> Any:
        calls.append(args)
        return real(*args)

    monkeypatch.setattr(holder, attribute, counted)
    return calls


def test_a_page_that_the_draft_context_has_not_reached_does_not_travel() -> None:
    driver = tiny()
    decoding(driver, 2)
    (lane,) = driver.engine._lanes
    while lane.frontier < 192:
        driver.engine.step()
    full = driver.call(ExportPages("p", "t")).full
    assert lane.pending and full == min(lane.frontier, lane.memory.context_frontier) // 64
    assert driver.call(ExportPages("p", "t", first=full)).segments == ()


def test_pages_of_a_turn_that_does_not_run_and_pages_that_cannot_be_are_refused_by_name() -> None:
    driver = tiny()
    answer = driver.call(ExportPages("p", "t"))
    assert isinstance(answer, Failed) and answer.code == errors.UNKNOWN_TURN
    decoding(driver, 1)
    for fields in ({"first": -1}, {"most": 0}):
        answer = driver.call(ExportPages("p", "t", **fields))
        assert isinstance(answer, Failed) and (answer.code, answer.param) == (errors.INVALID_REQUEST, "first")


def test_a_segment_that_never_came_costs_its_checkpoint_and_the_turn_is_rebuilt_from_its_ledger() -> None:
    source, destination = tiny(), tiny()
    submit = decoding(source, 3)
    source.engine.execute(Suspend("x", "t"))
    left = exported(source, without=frozenset())
    destination.call(StageSegments("g", "m", left.segments[1:]))
    answer = destination.call(Import("i", "s", left.document, migration="m"))
    assert isinstance(answer, Imported) and answer.frontiers == ()
    destination.engine.execute(replace(submit, resumed=resumed_after(rounds(source.of("t")))))
    destination.steps()
    assert destination.finished("t").token_ids == tiny().run(IDS, max_tokens=80, ignore_eos=True).token_ids


def handed_over(source: TinyDriver, destination: TinyDriver, harm: bool = False) -> tuple[tuple[bytes, bytes], ...]:
    """Session `s` with its suspended turn, from one engine of a node to another; returns the digests that are due."""
    left = exported(source, without=frozenset(), hashed=False)
    digests = tuple((segment.sha256, hashlib.sha256(segment.data).digest()) for segment in left.segments)
    came = left.segments
    if harm:
        data = came[0].data
        came = (replace(came[0], data=data[:-1] + bytes([data[-1] ^ 1])), *came[1:])
    destination.call(StageSegments("g", "m", came, hashed=False))
    answer = destination.call(Import("i", "s", left.document, migration="m"))
    assert isinstance(answer, Imported) and answer.frontiers == left.frontiers
    return digests


def test_on_one_node_a_turn_moves_without_a_hash_and_is_verified_while_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, destination = tiny(), tiny()
    submit = decoding(source, 3)
    source.engine.execute(Suspend("x", "t"))
    with monkeypatch.context() as patched:
        patched.setattr("state.document.SessionDocument._check_digest", lambda *args: pytest.fail("it was hashed"))
        patched.setattr("state.codec._Table._digested", lambda *args: pytest.fail("it was hashed"))
        digests = handed_over(source, destination)
        destination.engine.execute(replace(submit, resumed=resumed_after(rounds(source.of("t")))))
        destination.engine.step()
    assert destination.call(VerifyStaged("v", "m", "s", digests)) == Staged("v", "m", 0, 0)
    destination.steps()
    assert destination.started("t").prefilled == 0
    assert destination.finished("t").token_ids == tiny().run(IDS, max_tokens=80, ignore_eos=True).token_ids


def test_a_segment_that_was_damaged_on_its_way_is_found_and_nothing_of_that_state_stays() -> None:
    source, destination = tiny(), tiny()
    submit = decoding(source, 3)
    source.engine.execute(Suspend("x", "t"))
    digests = handed_over(source, destination, harm=True)
    resumed = resumed_after(rounds(source.of("t")))
    destination.engine.execute(replace(submit, resumed=resumed))
    destination.engine.step()
    answer = destination.call(VerifyStaged("v", "m", "s", digests))
    assert isinstance(answer, Failed) and (answer.code, answer.param) == (errors.BAD_STATE, "digests")
    destination.engine.execute(Suspend("x", "t"))
    last = destination.events[-1]
    assert isinstance(last, Suspended) and last.frontier == 0 and not destination.engine.memory.checkpoints
    destination.events.clear()
    destination.engine.execute(replace(submit, resumed=resumed))
    destination.steps()
    assert destination.started("t").reused == 0
    assert destination.finished("t").token_ids == tiny().run(IDS, max_tokens=80, ignore_eos=True).token_ids


def test_a_verification_of_what_is_not_held_any_more_is_refused() -> None:
    answer = tiny().call(VerifyStaged("v", "m", "s", ((b"n" * 32, b"d" * 32),)))
    assert isinstance(answer, Failed) and answer.code == errors.BAD_STATE


# ------------------------------------------------------------------------------------------------ what is staged


def segment(data: bytes) -> SegmentBytes:
    return SegmentBytes(hashlib.sha256(data).digest(), data)


def test_staged_segments_are_bounded_and_go_when_they_are_dropped_or_nobody_comes() -> None:
    clock = Clock()
    staged = StagedSegments(10, 60.0, clock)
    staged.add("a", [segment(b"12345"), segment(b"12345")])
    clock.now = 30.0
    staged.add("b", [segment(b"67")])
    with pytest.raises(errors.EngineError) as refused:
        staged.add("b", [segment(b"89"), segment(b"0000")])
    assert refused.value.code == errors.OVERLOADED and "staged_bytes" in refused.value.message
    assert staged.held("a") == (1, 5) and staged.held("b") == (1, 2)
    assert staged.segment("a", segment(b"67").sha256) is None and staged.segment(None, b"") is None
    staged.add("a", [segment(b"12345")])  # heard of again
    clock.now = 90.0
    staged.expire()
    assert staged.held("b") == (0, 0) and staged.held("a") == (0, 0)
    staged.add("a", [segment(b"0123456789")])
    staged.drop("a")
    assert staged.size == 0


def test_a_segment_that_is_not_what_it_is_called_is_refused_and_nothing_of_its_call_stays() -> None:
    driver = tiny()
    answer = driver.call(StageSegments("g", "m", (segment(b"good"), SegmentBytes(b"0" * 32, b"bad"))))
    assert isinstance(answer, Failed) and (answer.code, answer.param) == (errors.BAD_STATE, "segments")
    assert "segments[1]" in answer.message
    assert driver.call(DropStaged("d", "m")) == Staged("d", "m", 0, 0)


# ------------------------------------------------------------------------------------------------ explicit checkpoints


def kinds(driver: TinyDriver, session: str = "s") -> list[tuple[str, int]]:
    return [(c.kind, c.frontier) for c in driver.engine._sessions.checkpoints(session)]


def test_a_checkpoint_of_a_running_turn_is_what_its_turn_would_go_on_from_and_the_turn_goes_on() -> None:
    driver = tiny("dflash2")
    submit = decoding(driver, 4)
    answer = driver.call(Checkpoint("c", "s"))
    told = rounds(driver.of("t"))
    committed = resumed_after(told)
    assert answer == Checkpointed("c", "s", len(IDS) + len(committed.token_ids) - 1)
    assert driver.call(Checkpoint("c", "s")) == answer and kinds(driver).count(("explicit", answer.frontier)) == 1
    document = exported(driver).document
    driver.steps()
    stayed = tiny("dflash2").run(IDS, max_tokens=80, ignore_eos=True)
    assert driver.finished("t").token_ids == stayed.token_ids
    other = tiny("dflash2")
    other.call(Import("i", "s", document))
    other.engine.execute(replace(submit, resumed=committed))
    other.steps()
    assert other.started("t").prefilled == 0
    assert (other.finished("t").token_ids, other.finished("t").rounds) == (stayed.token_ids, stayed.rounds)


def test_a_checkpoint_between_turns_stays_through_later_turns_until_it_is_unpinned() -> None:
    driver = tiny(images=8)
    ids = IDS
    for number in range(6):
        finished = driver.run(ids, session="s", max_tokens=3, ignore_eos=True)
        ids += finished.token_ids
        if number == 0:
            answer = driver.call(Checkpoint("c", "s"))
            assert answer == Checkpointed("c", "s", finished.frontier) == driver.call(Checkpoint("c", "s"))
        ids += (1, 2)
    assert ("explicit", answer.frontier) in kinds(driver)
    assert [kind for kind, _ in kinds(driver)].count("explicit") == 1
    driver.call(Unpin("u", "s", answer.frontier + 1))
    assert ("explicit", answer.frontier) in kinds(driver)
    driver.call(Unpin("u", "s", answer.frontier))
    assert "explicit" not in [kind for kind, _ in kinds(driver)]
    driver.engine.memory.check_invariants()


def test_explicit_checkpoints_are_evicted_after_all_others() -> None:
    driver = tiny(images=3)
    driver.run(IDS[:20], session="pinned", max_tokens=3, ignore_eos=True, tenant="a")
    driver.call(Checkpoint("c", "pinned"))
    for name in ("x", "y", "z"):
        driver.run(IDS[:40], session=name, max_tokens=3, ignore_eos=True, tenant=name)
    ((kind, frontier),) = kinds(driver, "pinned")
    assert kind == "explicit"
    driver.engine.execute(Unpin("u", "pinned", frontier))
    assert driver.events[-2] == Evicted("pinned"), "nothing is held of the session any more"


def test_a_checkpoint_of_a_session_that_is_not_here_is_refused() -> None:
    answer = tiny().call(Checkpoint("c", "nobody"))
    assert isinstance(answer, Failed) and answer.code == errors.UNKNOWN_SESSION


def test_a_checkpoint_without_room_is_refused_and_the_turn_goes_on() -> None:
    driver = tiny(images=0)
    decoding(driver, 2)
    answer = driver.call(Checkpoint("c", "s"))
    assert isinstance(answer, Failed) and answer.code == errors.OVERLOADED
    driver.steps()
    assert len(driver.finished("t").token_ids) == 80


# ------------------------------------------------------------------------------------------------ forks from the past


def test_a_fork_of_an_earlier_ledger_has_what_led_there_and_nothing_that_came_later() -> None:
    driver = tiny(images=12)
    ids, ends = IDS[:30], []
    for _ in range(3):
        finished = driver.run(ids, session="s", max_tokens=4, ignore_eos=True)
        ids += finished.token_ids
        ends.append((finished.frontier, ids))
        ids += (1,)
    frontier, ledger = ends[1]
    answer = driver.call(Fork("f", "s", "child", ledger))
    assert isinstance(answer, Imported) and max(answer.frontiers) == frontier
    assert set(answer.frontiers) == {end for end, _ in ends[:2]}
    more = (*ledger, 3, 4)
    turn = driver.submit(more, session="child", tenant="of its own", max_tokens=9, ignore_eos=True)
    driver.steps()
    assert driver.started(turn).reused == frontier
    assert driver.finished(turn).token_ids == tiny().run(more, max_tokens=9, ignore_eos=True).token_ids
    within = driver.call(Fork("f", "s", "between", (*ledger, 1)))
    assert max(within.frontiers) == frontier, "the deepest one on the way"


def test_a_fork_of_a_branch_that_the_session_has_left_has_that_ones_state() -> None:
    driver = tiny(images=12)
    left = driver.run(IDS[:30], session="s", max_tokens=4, ignore_eos=True)
    other = (*IDS[:29], (IDS[29] + 1) % PUBLIC)
    finished = driver.run(other, session="s", max_tokens=4, ignore_eos=True)
    assert finished.frontier == left.frontier
    for name, ledger in (("old", IDS[:30] + left.token_ids), ("new", other + finished.token_ids)):
        answer = driver.call(Fork("f", "s", name, ledger))
        assert answer.frontiers == (finished.frontier,)
        (child,) = driver.engine._sessions.checkpoints(name)
        assert child.ledger == ledger


def test_a_fork_before_the_first_checkpoint_is_refused_and_says_what_there_is() -> None:
    driver = tiny()
    finished = driver.run(IDS, session="s", max_tokens=4, ignore_eos=True)
    answer = driver.call(Fork("f", "s", "child", IDS[:10]))
    assert isinstance(answer, Failed) and (answer.code, answer.param) == (errors.UNKNOWN_CHECKPOINT, "ledger")
    assert str(finished.frontier) in answer.message


def test_what_was_staged_for_nobody_goes_with_time_whatever_the_engine_does() -> None:
    driver = tiny(staged_seconds=0.0)
    driver.call(StageSegments("g", "m", (segment(b"late"),)))
    assert driver.call(Inspect("f")).facts["staged_bytes"] == 0


def test_segments_of_a_document_are_those_that_were_asked_for() -> None:
    driver = tiny()
    driver.run(IDS, session="s", max_tokens=4, ignore_eos=True)
    everything = driver.call(Export("e", "s", without=frozenset()))
    manifest = open_document(everything.document).manifest
    assert {s.sha256 for s in everything.segments} == {s.sha256 for s in manifest.segments}
    some = frozenset(s.sha256 for s in everything.segments[:2])
    fewer = driver.call(Export("e", "s", without=some))
    assert fewer.document == everything.document and fewer.segments == everything.segments[2:]
