"""What an engine tells of its work is what its events say, and what it did."""

from __future__ import annotations

from typing import Any

from deployment.engine.commands import Cancel, Inspect, Preempt
from deployment.engine.counts import Counts, Flow
from deployment.engine.errors import CONTEXT_LENGTH_EXCEEDED
from deployment.engine.events import Captured, Finished, Round, Started
from deployment.engine.message_codec import decode, encode
from deployment.engine.tally import Laps, Recorder
from tests.engine.driving import Driver, prompt


def counts(driver: Driver) -> Counts:
    return driver.call(Inspect("i")).counts


def test_counts_are_those_of_all_events():
    driver = Driver("dflash2", lanes=2, images=4)
    for index in (0, 1):
        driver.submit(prompt(index), max_tokens=24 - 12 * index, ignore_eos=True, session=f"s{index}")
    third = driver.submit(prompt(0), max_tokens=12, session="s0")
    driver.engine.step()
    driver.engine.execute(Cancel(third))
    driver.submit((5,) * 10_000, max_tokens=1)
    driver.steps()
    told = counts(driver)

    rounds = [event for event in driver.events if isinstance(event, Round)]
    drawn = [event.accepted for event in rounds if event.accepted is not None]
    assert told.tokens == sum(len(event.token_ids) for event in rounds)
    assert sum(told.accepted) == sum(told.drafted) == len(drawn)
    assert sum(number * rows for number, rows in enumerate(told.accepted)) == sum(drawn) > 0
    assert all(told.accepted[number] == drawn.count(number) for number in range(len(told.accepted)))
    assert max(drawn) < len(told.drafted) == len(told.accepted) == driver.engine.models.draft_tokens + 1
    assert len(drawn) / 2 <= told.rounds < len(drawn), "lanes decode together"
    started = [event for event in driver.events if isinstance(event, Started)]
    assert told.started == {"none": len(started)} and told.reused == {"none": 0}
    assert told.prefilled == sum(event.prefilled for event in started) and told.slices >= len(started)
    assert told.ended == {"length": 2, "cancelled": 1} and told.failed == {CONTEXT_LENGTH_EXCEEDED: 1}
    assert sum(told.captured.values()) == sum(isinstance(event, Captured) for event in driver.events) > 0
    assert sum(told.waits.counts) == 2, "the third turn never had a lane"
    assert (told.durable_written, told.durable_read) == (Flow(), Flow())


def test_a_round_that_a_stop_cuts_counts_with_all_that_it_licensed_and_in_its_answer_with_what_was_published():
    whole = Driver("dflash2", lanes=1, images=0).run(prompt(0), max_tokens=24, ignore_eos=True).token_ids
    longer: list[float] = []
    for stop in dict.fromkeys(token for token in whole if token not in whole[:2]):
        driver = Driver("dflash2", lanes=1, images=0)
        finished = driver.run(prompt(0), max_tokens=24, ignore_eos=True, stop_ids=(stop,))
        rows = counts(driver).accepted
        longer.append(
            sum((number + 1) * row for number, row in enumerate(rows)) / sum(rows) - finished.acceptance_length
        )
        if longer[-1] > 0.5:
            break
    assert min(longer) >= 0 and longer[-1] > 0.5, longer


def test_what_a_turn_reuses_and_a_lane_that_is_taken_away_are_counted():
    driver = Driver("dflash2", lanes=1, images=4)
    turn: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True, "session": "s", "stable_boundary": 64}
    first = driver.submit(prompt(0), **turn)
    driver.engine.step()
    driver.engine.execute(Preempt(first))
    driver.steps()
    again = driver.run(prompt(0), **turn)
    told = counts(driver)
    assert told.preempted == 1 and sum(told.waits.counts) == 3, "the lane that was given back counts as a wait"
    last = driver.started(again.turn)
    assert (last.hit, last.reused) == ("device", 64) and told.reused == {"none": 0, "device": 64}


def test_a_rounds_time_is_that_of_its_parts():
    now = iter(range(100))
    laps = Laps(lambda: float(next(now)))
    for _ in range(2):
        laps.begin()
        for part in ("append", "accept", "append"):
            laps.lap(part)
    assert laps.seconds == {"append": 4.0, "accept": 2.0}

    driver = Driver("dflash2", lanes=1, images=0)
    driver.run(prompt(0), max_tokens=8, ignore_eos=True)
    seconds = counts(driver).part_seconds
    assert set(seconds) == {"append", "propose", "verify", "accept", "preview", "commit", "publish"}
    assert all(value > 0 for value in seconds.values())


def test_a_distribution_counts_each_value_once_and_a_bound_belongs_below():
    recorder = Recorder((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        recorder.add(value)
    assert recorder.so_far.counts == (2, 2, 1) and recorder.so_far.total == 14.0


def test_counts_cross_the_pipe_as_they_are():
    driver = Driver("dflash2", lanes=1, images=2)
    assert isinstance(driver.run(prompt(0), max_tokens=8, session="s"), Finished)
    facts = driver.call(Inspect("i"))
    assert decode(encode(facts, []), []) == facts
