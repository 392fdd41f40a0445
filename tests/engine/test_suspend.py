"""Turns that are taken out of an engine, wherever they are, and turns that may not come in as resumed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from deployment.engine import errors
from deployment.engine.commands import Cancel, Preempt, Resumed, Sampling, Submit, Suspend, ThinkingBudget, TokenLogprob
from deployment.engine.errors import EngineError
from deployment.engine.events import Event, Failed, Finished, Round, Suspended, Tokens
from deployment.engine.service import EngineService
from tests.engine.driving import Driver, alone, models, options, prompt, seeded
from tests.engine.hashing import Clock, hash_engine, undisturbed
from tests.engine.test_resumed_turns import moved, resumed_after, rounds, suspended
from tests.engine.tiny import PUBLIC, TinyDriver


def tiny(**more: Any) -> TinyDriver:
    return TinyDriver("dflash2", **{"lanes": 1, "images": 2, "pages": 16, "check_invariants": True, **more})


IDS = tuple(place % PUBLIC for place in range(70))


def suspend(driver: Driver, turn: str) -> Suspended | Failed:
    driver.engine.execute(Suspend("suspend", turn))
    answer = driver.events[-1]
    assert isinstance(answer, Suspended | Failed), answer
    return answer


# ------------------------------------------------------------------------------------------------ wherever a turn is


def test_a_turn_that_waits_for_a_lane_is_given_back_with_nothing_committed() -> None:
    driver = tiny()
    running = driver.submit(IDS, max_tokens=9, ignore_eos=True)
    driver.engine.step()
    waiting = driver.submit(IDS, max_tokens=9, ignore_eos=True, session="s")
    assert suspend(driver, waiting) == Suspended("suspend", waiting, "s", 0, 0)
    driver.steps()
    assert len(driver.finished(running).token_ids) == 9 and not driver.started_events(waiting)


def test_a_turn_in_its_prompt_is_given_back_with_what_was_prefilled_and_nothing_committed() -> None:
    driver = tiny(prefill_chunk=64)
    turn = driver.submit(IDS, max_tokens=9, ignore_eos=True, session="s")
    driver.engine.step()
    assert suspend(driver, turn) == Suspended("suspend", turn, "s", 64, 0)
    assert not driver.engine.memory.sequences and driver.engine.idle
    again = driver.submit(IDS, max_tokens=9, ignore_eos=True, session="s", resumed=Resumed(()))
    driver.steps()
    assert driver.started(again).reused == 64 and driver.finished(again).token_ids == plain().token_ids


@pytest.mark.parametrize("images", [2, 0], ids=["with its checkpoint", "with its ledger alone"])
def test_a_preempted_turn_is_given_back_with_all_that_it_had_committed(images: int) -> None:
    driver = tiny(images=images)
    turn = driver.submit(IDS, max_tokens=9, ignore_eos=True, session="s")
    driver.engine.step()
    driver.engine.execute(Preempt(turn))
    committed = resumed_after(rounds(driver.of(turn)))
    frontier = len(IDS) + len(committed.token_ids) - 1 if images else 0
    assert suspend(driver, turn) == Suspended("suspend", turn, "s", frontier, len(committed.token_ids))
    again = driver.submit(IDS, max_tokens=9, ignore_eos=True, session="s", resumed=committed)
    driver.steps()
    assert driver.started(again).reused == frontier and driver.finished(again).token_ids == plain().token_ids


def test_a_turn_without_a_session_is_given_back_without_its_state() -> None:
    driver = tiny()
    turn = driver.submit(IDS, max_tokens=9, ignore_eos=True)
    driver.engine.step()
    answer = suspend(driver, turn)
    assert isinstance(answer, Suspended) and (answer.session, answer.frontier) == (None, 0) and answer.committed
    assert not driver.engine.memory.checkpoints


def test_a_turn_that_has_ended_was_cancelled_or_never_came_cannot_be_suspended() -> None:
    driver = tiny()
    ended = driver.submit(IDS, max_tokens=2, ignore_eos=True)
    driver.steps()
    cancelled = driver.submit(IDS, max_tokens=9, ignore_eos=True)
    driver.engine.step()
    driver.engine.execute(Cancel(cancelled))
    for turn in (ended, cancelled, "nobody"):
        answer = suspend(driver, turn)
        assert isinstance(answer, Failed) and (answer.code, answer.param) == (errors.UNKNOWN_TURN, "turn")
        assert repr(turn) in answer.message
    assert driver.finished(cancelled).finish_reason == "cancelled"


def test_a_suspended_turn_keeps_an_image_that_its_end_would_not_have_been_worth_and_moves_leave_no_more() -> None:
    """As often as it moves, its session holds no more images than one that stayed."""
    here, there = tiny(images=6, image_min_tokens=100), tiny(images=6, image_min_tokens=100)
    submit = Submit("t", IDS, max_tokens=30, ignore_eos=True, session="s", tenant="t")
    told: list[Event] = []
    for _ in range(6):
        here.events.clear()
        answer = suspended(here, submit, 2)
        assert answer is not None and answer.frontier == len(IDS) + answer.committed - 1
        told += here.of("t")
        resumed = resumed_after(rounds(told))
        moved(here, there, IDS + resumed.token_ids)
        submit = replace(submit, resumed=resumed)
        here, there = there, here
    assert len(here.engine.memory.checkpoints) <= 4
    here.engine.execute(submit)
    here.steps()
    assert here.finished("t").token_ids == TinyDriver("dflash2").run(IDS, max_tokens=30, ignore_eos=True).token_ids


def plain() -> Finished:
    return tiny().run(IDS, max_tokens=9, ignore_eos=True)


# ------------------------------------------------------------------------------------------------ the demo model


@pytest.mark.parametrize("way", ["from its checkpoint", "by prefill"])
def test_a_stop_string_that_begins_before_a_cut_and_ends_after_it_ends_the_turn(way: str) -> None:
    """Text that is held back at the cut is told by whoever the turn goes on at, and only once."""
    whole = alone(prompt(3), 30, seeded(11), "dflash2").token_ids
    text = models("none").tokenizer.decode(whole)
    string = text[len(text) // 2 :][:12]
    submit = Submit(
        "t", prompt(3), seeded(11, logprobs=2), max_tokens=30, ignore_eos=True, session="s", stop_strings=(string,)
    )
    undisturbed = Driver("dflash2", images=4)
    undisturbed.engine.execute(submit)
    undisturbed.steps()
    every = rounds(undisturbed.of("t"))
    cut = next(at for at, event in enumerate(every, 1) if event.held_back and at < len(every))
    source, destination = Driver("dflash2", images=4), Driver("dflash2", images=4)
    if way == "from its checkpoint":
        answer = suspended(source, submit, cut)
        assert answer is not None
        cut = len(rounds(source.of("t")))
        moved(source, destination, submit.prompt_ids + resumed_after(every[:cut]).token_ids)
    assert every[cut - 1].held_back
    destination.engine.execute(replace(submit, resumed=resumed_after(every[:cut])))
    destination.steps()
    came, stayed = destination.finished("t"), undisturbed.finished("t")
    assert replace(came, seconds=0) == replace(stayed, seconds=0) and came.stop_string == string
    before = sum(len(event.token_ids) for event in every[:cut]) - every[cut - 1].held_back
    assert whole[:before] + destination.streamed("t") == came.token_ids
    assert [e.token for event in destination.of("t") if isinstance(event, Tokens) for e in event.logprobs] == list(
        destination.streamed("t")
    )


# ------------------------------------------------------------------------------------------------ coming in


def test_a_resumed_turn_comes_in_however_many_wait_and_never_waits_in_vain() -> None:
    clock, events = Clock(), []
    engine = hash_engine(clock, events, lanes=1, queue_turns=1, queue_seconds=1.0)
    submits = [Submit(name, tuple(range(20)), max_tokens=12) for name in "abc"]
    for submit in submits[:2]:
        engine.execute(submit)
        engine.step()
    expected = undisturbed(submits[2], 256)
    first = Resumed(expected[0][:1])
    engine.execute(replace(submits[2], resumed=first))
    clock.now = 2.0
    while engine.step():
        pass
    ends = {getattr(event, "turn", getattr(event, "ref", "")): event for event in events}
    assert isinstance(ends["b"], Failed) and ends["b"].code == errors.QUEUE_TIMEOUT
    last = ends["c"]
    assert isinstance(last, Finished) and (last.token_ids, last.rounds) == expected[:2]


def test_a_resumed_turn_that_is_cancelled_or_fails_before_its_lane_tells_what_was_committed() -> None:
    driver = tiny()
    driver.submit(IDS, max_tokens=20, ignore_eos=True)
    driver.engine.step()
    turn = driver.submit(IDS, max_tokens=20, ignore_eos=True, session="s", resumed=Resumed((1, 2, 3), (0, 0)))
    driver.engine.execute(Cancel(turn))
    driver.steps()
    finished = driver.finished(turn)
    assert (finished.finish_reason, finished.token_ids, finished.rounds) == ("cancelled", (1, 2, 3), (0, 0))
    assert finished.frontier == len(IDS) + 2


THINKING = ThinkingBudget(2, (5, 6), end=6, opened=True)


@pytest.mark.parametrize(
    ("resumed", "fields", "said"),
    [
        (Resumed((1, PUBLIC)), {}, f"token id {PUBLIC}"),
        (Resumed((1, 2, 3, 4)), {"max_tokens": 3}, "4 ids, more than the 3"),
        (Resumed((1, 2), (0, 0)), {}, "resumed.rounds"),
        (Resumed((1, 2), (-1,)), {}, "resumed.rounds"),
        (Resumed((1, 2)), {"sampling": Sampling(logprobs=1)}, "resumed.logprobs"),
        (Resumed((1, 2), (), (TokenLogprob(1, 0.0, ()),)), {"sampling": Sampling(logprobs=1)}, "resumed.logprobs"),
        (Resumed((1,), (), (TokenLogprob(1, 0.0, ()),)), {}, "must be none"),
        (Resumed((1, 7, 2)), {"stop_ids": (7,)}, "the turn ended with id 1, stop"),
        (Resumed((1, 2, 3, 6)), {"thinking": THINKING}, "id 2 must be 5"),
    ],
)
def test_ids_that_a_turn_could_not_have_committed_are_refused_by_name(
    resumed: Resumed, fields: dict[str, Any], said: str
) -> None:
    driver = tiny()
    failed = driver.failed(driver.submit(IDS, ignore_eos=True, resumed=resumed, **fields))
    assert (failed.code, failed.param) == (errors.INVALID_REQUEST, "resumed") and said in failed.message, failed
    assert driver.engine.idle


@pytest.mark.parametrize(
    ("ids", "fields", "reason"),
    [((1, 2, 7), {"stop_ids": (7,)}, "stop"), ((1, 2, 3), {"max_tokens": 3}, "length")],
)
def test_a_turn_that_has_ended_with_what_it_committed_is_finished_at_once(
    ids: tuple[int, ...], fields: dict[str, Any], reason: str
) -> None:
    driver = tiny()
    turn = driver.submit(IDS, ignore_eos=True, session="s", resumed=Resumed(ids, (0, 0)), **fields)
    (finished,) = driver.of(turn)
    assert isinstance(finished, Finished) and finished.finish_reason == reason and finished.rounds == (0, 0)
    assert finished.token_ids + finished.hidden_ids == ids and finished.frontier == len(IDS) + 2
    assert driver.engine.idle and not driver.engine.memory.sequences


# ------------------------------------------------------------------------------------------------ through the service


def test_whoever_reads_a_suspended_turn_and_whoever_asked_for_it_hear_the_same() -> None:
    async def scenario() -> None:
        service = EngineService(models("none"), options("none", lanes=1))
        events: list[Event] = []
        answer = None
        async for event in service.turn(Submit("t", prompt(0), max_tokens=200, ignore_eos=True, session="s")):
            events.append(event)
            if isinstance(event, Tokens) and answer is None:
                answer = await service.call(Suspend("c", "t"))
        assert isinstance(answer, Suspended) and events[-1] == answer
        assert answer.committed == sum(len(event.token_ids) for event in events if isinstance(event, Round))
        with pytest.raises(EngineError) as refused:
            await service.call(Suspend("c", "t"))
        assert refused.value.code == errors.UNKNOWN_TURN
        service.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_the_end_of_the_engines_thread_loses_nothing_that_was_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        service = EngineService(models("none"), options("none", lanes=1))
        whole = alone(prompt(0), 40).token_ids
        events: list[Event] = []
        submit = Submit(
            "t",
            prompt(0),
            max_tokens=200,
            ignore_eos=True,
            stop_strings=(models("none").tokenizer.decode(whole) + "\0",),
        )
        async for event in service.turn(submit):
            events.append(event)
            if isinstance(event, Round) and len(rounds(events)) == 3:
                engine = service._runner._engine  # pyright: ignore[reportAttributeAccessIssue]
                monkeypatch.setattr(engine, "step", lambda: 1 // 0)
        failed = events[-1]
        assert isinstance(failed, Failed) and failed.committed is not None and "ZeroDivisionError" not in failed.message
        committed = tuple(token for event in rounds(events) for token in event.token_ids)
        streamed = tuple(token for event in events if isinstance(event, Tokens) for token in event.token_ids)
        assert failed.committed.token_ids == committed == streamed == whole[: len(committed)]
        service.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))
