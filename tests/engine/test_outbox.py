"""On a card, what a round publishes leaves while the next round runs, and never out of order."""

from __future__ import annotations

import pytest

from deployment.engine.commands import Cancel, Inspect
from deployment.engine.events import Failed, Finished, Round, Tokens
from deployment.engine.outbox import Outbox
from tests.engine.driving import Driver, prompt, seeded


def driver_beside() -> Driver:
    """An engine that takes its device for one that works while the host does."""
    return Driver("dflash2", 7, beside=True, lanes=2, context=512)


def rounds_told(driver: Driver) -> int:
    return sum(isinstance(event, Round) and event.accepted is not None for event in driver.events)


def until_decoding(driver: Driver) -> None:
    while not driver.engine._lanes or driver.engine._lanes[0].prefilling:
        driver.engine.step()


def test_what_is_held_leaves_before_anything_that_is_said_later():
    seen: list[int] = []
    outbox = Outbox(seen.append)  # pyright: ignore[reportArgumentType]
    outbox.send(1)  # pyright: ignore[reportArgumentType]
    with outbox.holding():
        outbox.send(2)  # pyright: ignore[reportArgumentType]
        assert seen == [1]
    outbox.send(3)  # pyright: ignore[reportArgumentType]
    assert seen == [1, 2, 3]
    outbox.release()
    assert seen == [1, 2, 3]


def test_a_round_is_told_when_the_next_one_is_launched():
    driver = driver_beside()
    executor = driver.engine._executor
    told_at_launch: list[int] = []
    run = executor.run

    def watched(lanes, meanwhile):
        before = rounds_told(driver)

        def then():
            meanwhile()
            told_at_launch.append(rounds_told(driver) - before)

        return run(lanes, then)

    executor.run = watched  # pyright: ignore[reportAttributeAccessIssue]
    driver.submit(prompt(0)[-40:], max_tokens=30, ignore_eos=True)
    until_decoding(driver)
    driver.steps()
    assert told_at_launch[1:] and set(told_at_launch[1:]) == {1}, "each launch but the first tells of one round"


@pytest.mark.parametrize("sampling", [seeded(1, temperature=0.0), seeded(2)], ids=["greedy", "drawn"])
def test_events_are_those_of_an_engine_that_holds_nothing(sampling):
    def lived(driver: Driver) -> list[object]:
        turns = [driver.submit(prompt(i)[-30:], turn=f"t{i}", max_tokens=20, sampling=sampling) for i in range(3)]
        driver.steps()
        kinds = (Round, Tokens, Finished)
        events = [event for turn in turns for event in driver.of(turn) if isinstance(event, kinds)]
        return [event if not isinstance(event, Finished) else event.token_ids for event in events]

    assert lived(driver_beside()) == lived(Driver("dflash2", 7, lanes=2, context=512))


def test_a_commands_answer_comes_behind_what_was_committed_before_it():
    driver = driver_beside()
    driver.submit(prompt(0)[-40:], max_tokens=60, ignore_eos=True)
    until_decoding(driver)
    driver.engine.step()
    held = rounds_told(driver)
    driver.engine.execute(Inspect("i"))
    assert rounds_told(driver) == held + 1 and not isinstance(driver.events[-1], Round | Tokens)


def test_a_cancelled_and_a_failed_turn_tell_all_that_they_had_committed():
    driver = driver_beside()
    turn = driver.submit(prompt(0)[-40:], max_tokens=200, ignore_eos=True)
    until_decoding(driver)
    driver.engine.step()
    driver.engine.execute(Cancel(turn))
    driver.steps()
    finished = driver.of(turn)[-1]
    assert isinstance(finished, Finished) and finished.token_ids == driver.streamed(turn) != ()

    def lost(lanes, meanwhile):
        raise RuntimeError("device lost")

    turn = driver.submit(prompt(1)[-40:], max_tokens=200, ignore_eos=True)
    until_decoding(driver)
    driver.engine.step()
    driver.engine._executor.run = lost  # pyright: ignore[reportAttributeAccessIssue]
    driver.steps()
    failed = driver.of(turn)[-1]
    assert isinstance(failed, Failed) and failed.committed is not None
    assert failed.committed.token_ids == driver.streamed(turn) != ()


def test_an_engine_at_its_end_holds_nothing_back():
    driver = driver_beside()
    turn = driver.submit(prompt(0)[-40:], max_tokens=200, ignore_eos=True)
    until_decoding(driver)
    driver.engine.step()
    driver.engine.abandon("it was closed")
    failed = driver.of(turn)[-1]
    assert isinstance(failed, Failed) and failed.committed is not None
    assert failed.committed.token_ids == driver.streamed(turn) != ()
