"""Faults and pressure: what one turn, command or session suffers, no other one does, and nothing kept is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from deployment.engine import errors
from deployment.engine.commands import Cancel, Drop, Export, Fork, Import, Inspect, Submit
from deployment.engine.errors import EngineError
from deployment.engine.events import Evicted, Exported, Facts, Failed, Finished, Imported, Tokens
from deployment.engine.service import EngineService
from state.errors import CoverageError
from state.session_record import SessionRecord
from tests.engine.driving import Driver, models, options, prompt

SHORT = prompt(0)[:40]


def holding(*sessions: str, backend: str = "none", **options: Any) -> Driver:
    """An engine in which each session has finished a short turn."""
    driver = Driver(backend, **options)
    for session in sessions:
        driver.run(SHORT, session=session, max_tokens=4, ignore_eos=True)
    return driver


def sessions_of(driver: Driver) -> int:
    return driver.call(Inspect("facts")).facts["sessions"]


# ------------------------------------------------------------------------------------------------ pressure


def test_a_turn_that_can_never_fit_is_refused_at_once_and_costs_no_session_its_state():
    driver = holding("a", "b", "c", lanes=2, images=4, pages=8)
    failed = driver.failed(driver.submit(prompt(0), max_tokens=1000))
    assert (failed.code, failed.param) == (errors.OVERLOADED, "max_tokens")
    assert "18 pages" in failed.message and "8" in failed.message
    assert sessions_of(driver) == 3


def test_a_turn_that_has_to_wait_for_a_lane_evicts_nothing_and_still_goes_on_from_its_own_state():
    driver = holding("a", "b", "c", lanes=2, images=6, pages=8)
    ledger = driver.engine.memory.checkpoints[0].ledger
    running = driver.submit(prompt(1)[:40], max_tokens=250, ignore_eos=True)  # 5 of the 8 pages
    driver.engine.step()
    waiting = driver.submit(ledger, session="a", max_tokens=200, ignore_eos=True)  # 4 more
    for _ in range(5):
        driver.engine.step()
        assert driver.call(Inspect("i")).facts["lanes_running"] == 1 and sessions_of(driver) == 3
    driver.engine.execute(Cancel(running))
    while not driver.started_events(waiting):
        assert driver.engine.step()
    driver.engine.execute(Cancel(waiting))
    driver.steps()
    assert driver.started(waiting).hit == "device" and driver.started(waiting).reused == len(ledger) - 1


def test_the_session_used_longest_ago_makes_room_and_the_others_keep_theirs():
    driver = holding("a", "b", "c", lanes=1, images=6, pages=4)
    driver.run((290, *SHORT), session="d", max_tokens=80, ignore_eos=True)  # 2 pages to run
    held = {name: len(driver.engine._sessions.checkpoints(name)) for name in "abcd"}
    assert held["a"] == 0 and held["c"] == held["d"] == 1


def test_the_engine_says_which_session_it_let_go():
    driver = holding("a", "b", "c", lanes=1, images=6, pages=4)
    driver.run((290, *SHORT), session="d", max_tokens=80, ignore_eos=True)
    assert [event.session for event in driver.events if isinstance(event, Evicted)] == ["a"]


def test_a_session_larger_than_what_is_left_gives_up_its_own_state_rather_than_the_turn():
    driver = holding("a", lanes=1, images=2, pages=4)
    turn = driver.submit((290, *SHORT), session="a", max_tokens=200, ignore_eos=True)  # all 4 pages
    driver.steps()
    assert driver.finished(turn).finish_reason == "length" and driver.started(turn).hit == "none"


def test_an_import_that_is_refused_leaves_the_session_what_it_had():
    source = holding("s", "t", backend="dflash2", images=4)
    damaged = bytearray(source.call(Export("e", "t")).document)
    damaged[100] ^= 1
    driver = holding("s", backend="dflash2", images=3, lanes=1)
    before = driver.engine.memory.checkpoints
    answer = driver.call(Import("i", "s", bytes(damaged)))
    assert isinstance(answer, Failed) and answer.code == errors.BAD_STATE
    assert driver.engine.memory.checkpoints == before
    driver.engine.memory.check_invariants()


def test_an_import_without_room_is_overloaded_and_not_a_bad_state():
    source = Driver(images=4)
    source.run(prompt(0), session="s", stable_boundary=20, max_tokens=4, ignore_eos=True)
    document = source.call(Export("e", "s")).document
    driver = holding("s", images=1, lanes=1)
    driver.submit(prompt(1), max_tokens=100, ignore_eos=True)
    driver.engine.step()
    answer = driver.call(Import("i", "s", document))
    assert isinstance(answer, Failed) and answer.code == errors.OVERLOADED
    assert len(driver.engine._sessions.checkpoints("s")) == 1


def test_a_fork_under_pressure_is_whole_or_refused_and_never_eats_its_parent():
    driver = holding("a", "b", lanes=1, images=2)
    assert isinstance(driver.call(Fork("f", "a", "child")), Imported)  # b makes room
    assert len(driver.engine._sessions.checkpoints("a")) == len(driver.engine._sessions.checkpoints("child")) == 1
    full = holding("a", lanes=1, images=1)
    full.submit(prompt(1), max_tokens=100, ignore_eos=True)
    full.engine.step()
    assert full.call(Fork("f", "a", "child")).code == errors.OVERLOADED
    assert len(full.engine._sessions.checkpoints("a")) == 1


# ------------------------------------------------------------------------------------------------ sessions


@pytest.mark.parametrize("command", ["drop", "import"])
def test_a_session_that_was_dropped_or_replaced_gets_nothing_from_a_turn_that_still_runs(command):
    driver = holding("other", images=6)
    document = driver.call(Export("e", "other")).document
    turn = driver.submit(prompt(0), session="s", max_tokens=20, ignore_eos=True)
    driver.engine.step()
    driver.call(Drop("d", "s") if command == "drop" else Import("i", "s", document))
    driver.steps()
    assert len(driver.finished(turn).token_ids) == 20
    kept = driver.engine._sessions.checkpoints("s")
    assert [c.frontier for c in kept] == ([] if command == "drop" else [43])


def test_an_export_of_what_is_not_held_is_refused_unless_its_ledger_is_known():
    driver = holding("s", images=3)
    for record in (None, SessionRecord("t", ())):
        answer = driver.call(Export("e", "t", record))
        assert isinstance(answer, Failed) and answer.code == errors.UNKNOWN_SESSION and "'t'" in answer.message
    exported = driver.call(Export("e", "t", SessionRecord("t", (1, 2, 3), frontier=2)))
    assert isinstance(exported, Exported) and exported.frontiers == ()


def test_export_gives_the_newest_checkpoint_of_each_kind_oldest_first():
    driver = Driver("dflash", images=6)
    for length in (20, 30):
        driver.run(prompt(0)[:length], session="s", stable_boundary=length - 5, max_tokens=4, ignore_eos=True)
    exported = driver.call(Export("e", "s"))
    assert isinstance(exported, Exported)
    assert list(zip(exported.kinds, exported.frontiers, strict=True)) == [("turn_start", 25), ("turn_end", 33)]


# ------------------------------------------------------------------------------------------------ faults


def test_a_capture_that_fails_costs_its_session_a_checkpoint_and_nobody_a_turn(monkeypatch):
    driver = Driver("dflash2", images=4)
    one = driver.submit(prompt(0), session="s", max_tokens=8, ignore_eos=True)
    two = driver.submit(prompt(1), max_tokens=40, ignore_eos=True)

    def broken(*_args, **_more):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(driver.engine.memory, "capture", broken)
    driver.steps()
    assert len(driver.finished(one).token_ids) == 8 and not driver.captured(one)
    assert len(driver.finished(two).token_ids) == 40


def test_a_fault_while_one_lane_publishes_ends_that_lane_alone(monkeypatch):
    driver = Driver("dflash2", images=4)
    one = driver.submit(prompt(0), max_tokens=30, ignore_eos=True)
    two = driver.submit(prompt(1), max_tokens=30, ignore_eos=True)
    finish = driver.engine._endings.finish

    def broken(lane):
        if lane.submit.turn == one:
            raise RuntimeError("broken pipe")
        finish(lane)

    monkeypatch.setattr(driver.engine._endings, "finish", broken)
    driver.steps()
    assert driver.failed(one).code == errors.INTERNAL_ERROR and len(driver.streamed(one)) == 30
    assert len(driver.finished(two).token_ids) == 30
    assert not driver.engine.memory.sequences


def test_a_torn_commit_is_never_captured(monkeypatch):
    """The image was half written when the device failed: the session has only what was whole before."""
    driver = Driver("dflash2", images=4)
    turn = driver.submit(prompt(0), session="s", stable_boundary=50, max_tokens=30, ignore_eos=True)
    driver.engine.step()

    def torn(records, counts, slots, state):
        state.recurrent[slots, 0] += 1
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(driver.engine.models.target, "commit", torn)
        driver.steps()
    assert driver.failed(turn).code == errors.INTERNAL_ERROR
    assert [c.kind for c in driver.captured(turn)] == ["turn_start"]


@pytest.mark.parametrize("failing", ["run", "commit"])
def test_a_turn_that_fails_tells_what_it_held_back_and_keeps_what_it_had_committed(failing, monkeypatch):
    driver = Driver("dflash2", images=4)
    whole = driver.run(prompt(6), max_tokens=40, ignore_eos=True).token_ids
    almost = models("dflash2").tokenizer.decode(whole) + "\0"  # all of the answer may still belong to it
    turn = driver.submit(prompt(6), session="s", max_tokens=40, ignore_eos=True, stop_strings=(almost,))
    for _ in range(3):
        driver.engine.step()
    assert driver.streamed(turn) == ()

    def broken(*_args):
        raise RuntimeError("device lost")

    monkeypatch.setattr(driver.engine._executor, failing, broken)
    driver.steps()
    kept = driver.failed(turn).committed
    assert kept is not None and kept.finish_reason == "failed" and len(kept.token_ids) > 2
    assert driver.streamed(turn) == kept.token_ids == whole[: len(kept.token_ids)]
    assert [c.frontier for c in driver.captured(turn)] == [kept.frontier] == [len(prompt(6)) + len(kept.token_ids) - 1]


def test_a_turn_that_fails_before_its_first_token_has_committed_nothing(monkeypatch):
    driver = Driver("none", images=2)
    turn = driver.submit(prompt(0), max_tokens=3)

    def broken(*_args):
        raise RuntimeError("device lost")

    monkeypatch.setattr(driver.engine._executor, "first_token", broken)
    driver.steps()
    assert driver.failed(turn).committed is None and driver.streamed(turn) == ()


def test_a_turn_gets_its_last_event_even_if_its_memory_cannot_be_given_back(monkeypatch):
    driver = Driver("none", images=2)
    turn = driver.submit(prompt(0), max_tokens=3, ignore_eos=True)

    def broken(_sequence):
        raise RuntimeError("books are wrong")

    monkeypatch.setattr(driver.engine.memory, "close", broken)
    while driver.engine.step():
        pass
    assert isinstance(driver.of(turn)[-1], Finished)


def test_a_checkpoint_that_is_not_whole_is_a_miss_and_the_turn_is_prefilled(monkeypatch):
    driver = holding("s", images=3)

    def refuse(checkpoint, tokens):
        raise CoverageError("gdn", 42, checkpoint.frontier)

    monkeypatch.setattr(driver.engine.memory, "restore", refuse)
    turn = driver.submit((*SHORT, 290, 291, 292, 293, 294), session="s", max_tokens=3, ignore_eos=True)
    driver.steps()
    assert driver.started(turn).hit == "none" and driver.finished(turn).finish_reason == "length"


def test_a_fault_in_a_command_fails_that_command_and_the_running_turn_goes_on(monkeypatch):
    driver = holding("s", images=3)
    turn = driver.submit(prompt(0), max_tokens=10, ignore_eos=True)
    driver.engine.step()

    def broken(*_args):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(driver.engine._exchange, "export", broken)
    assert driver.call(Export("e", "s")).code == errors.INTERNAL_ERROR
    driver.steps()
    assert len(driver.finished(turn).token_ids) == 10


def test_a_fault_at_admission_fails_that_turn_and_the_next_one_runs(monkeypatch):
    driver = Driver("none", images=2)
    opened = driver.engine.memory.open
    calls = iter([True])

    def broken_once(tokens):
        if next(calls, False):
            raise RuntimeError("device lost")
        return opened(tokens)

    monkeypatch.setattr(driver.engine.memory, "open", broken_once)
    one, two = (driver.submit(prompt(0), max_tokens=3, ignore_eos=True) for _ in range(2))
    driver.steps()
    assert driver.failed(one).code == errors.INTERNAL_ERROR and len(driver.finished(two).token_ids) == 3


def test_the_id_of_a_turn_that_was_left_is_free_only_after_its_last_event():
    """Otherwise its late tokens would reach whoever takes the id next."""

    async def scenario():
        service = EngineService(models("none"), options("none", images=2))
        submit = Submit("a", prompt(0), max_tokens=3000, ignore_eos=True)
        try:
            turn = service.turn(submit)
            async for event in turn:
                if isinstance(event, Tokens):
                    break
            await turn.aclose()
            refusals = []
            while True:
                try:
                    again = [event async for event in service.turn(Submit("a", prompt(2), max_tokens=5))]
                except EngineError as error:
                    refusals.append(error.message)
                    assert isinstance(await service.call(Inspect("i")), Facts)
                else:
                    return refusals, again
        finally:
            await asyncio.to_thread(service.close)

    refusals, again = asyncio.run(scenario())
    assert refusals and all("in use" in message for message in refusals)
    tokens = [event for event in again if isinstance(event, Tokens)]
    assert tokens[0].start == len(prompt(2)) and isinstance(again[-1], Finished)


# -------------------------------------------------------------------------------------- the continuation hidden


@pytest.mark.parametrize("backend", ["none", "dflash", "dflash2"])
@pytest.mark.parametrize("tokens", [1, 2, 5, 9, 17])
def test_the_continuation_hidden_is_that_of_the_last_committed_token(backend, tokens):
    """After rounds that were kept whole and ones that the budget cut: it equals a prefill of the same tokens."""
    driver, oracle = Driver(backend, images=3), Driver("none", images=3)
    finished = driver.run(prompt(8), session="s", max_tokens=tokens, ignore_eos=True)
    (kept,) = driver.engine.memory.checkpoints
    committed = (prompt(8) + finished.token_ids)[: kept.frontier]
    oracle.run(committed, session="s", stable_boundary=len(committed), max_tokens=1, ignore_eos=True)
    recomputed = next(c for c in oracle.engine.memory.checkpoints if c.frontier == kept.frontier)
    ours, theirs = driver.engine.memory.images, oracle.engine.memory.images
    difference = ours.hidden[kept.slot] - theirs.hidden[recomputed.slot]
    assert difference.norm() < 1e-4 * theirs.hidden[recomputed.slot].norm()
    difference = ours.gdn[kept.slot] - theirs.gdn[recomputed.slot]
    assert difference.norm() < 1e-4 * theirs.gdn[recomputed.slot].norm()
