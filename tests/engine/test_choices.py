"""Turns with one prompt: it is prefilled once, and each of them is what it would be alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deployment.engine import errors
from deployment.engine.commands import Cancel, Preempt, Submit
from deployment.turns import choices
from tests.engine import driving
from tests.engine.driving import Driver, prompt, seeded

LONG = prompt(3)
SUBMIT = Submit("t", LONG, seeded(5, temperature=1.5), max_tokens=14, ignore_eos=True)


def submitted(driver: Driver, n: int, **fields) -> list[str]:
    turns = choices(replace(SUBMIT, **fields), n)
    for submit in turns:
        driver.engine.execute(submit)
    return [submit.turn for submit in turns]


def alone(backend: str, sub: int) -> tuple[int, ...]:
    return driving.alone(LONG, 14, replace(SUBMIT.sampling, sub=sub), backend).token_ids


@pytest.mark.parametrize("backend", ["none", "dflash", "dflash2"])
@pytest.mark.parametrize("lanes", [2, 4])
def test_choices_share_one_prefill_and_draw_as_if_each_were_alone(backend, lanes):
    driver = Driver(backend, lanes=lanes, images=6, prefill_chunk=64)
    turns = submitted(driver, 4)
    driver.steps()
    assert [driver.started(turn).prefilled for turn in turns] == [len(LONG), 0, 0, 0]
    assert [driver.started(turn).reused for turn in turns[1:]] == [len(LONG)] * 3
    assert [driver.finished(turn).token_ids for turn in turns] == [alone(backend, sub) for sub in range(4)]
    assert len({driver.finished(turn).token_ids for turn in turns}) == 4
    assert not driver.engine.memory.checkpoints and not driver.engine.memory.sequences


def test_turns_that_come_after_the_prompt_is_in_find_its_state_all_the_same():
    driver = Driver("dflash2", lanes=4, images=4)
    first, *others = choices(replace(SUBMIT, max_tokens=1), 3)
    driver.engine.execute(first)
    driver.steps()
    assert driver.finished("t").finish_reason == "length"
    for submit in others:
        driver.engine.execute(submit)
    driver.steps()
    assert [driver.started(submit.turn).prefilled for submit in others] == [0, 0]
    assert not driver.engine.memory.checkpoints


def test_without_free_images_every_choice_prefills():
    driver = Driver("none", lanes=2, images=0, prefill_chunk=64)
    turns = submitted(driver, 3)
    driver.steps()
    assert [driver.finished(turn).token_ids for turn in turns] == [alone("none", sub) for sub in range(3)]
    assert sum(driver.started(turn).prefilled > 0 for turn in turns) >= 2


@pytest.mark.parametrize("when", ["queued", "prefilling", "later"])
def test_the_others_go_on_when_the_first_one_is_cancelled(when):
    driver = Driver("dflash2", lanes=2, images=4, prefill_chunk=64)
    turns = submitted(driver, 3)
    for _ in range({"queued": 0, "prefilling": 1, "later": 8}[when]):
        driver.engine.step()
    driver.engine.execute(Cancel("t"))
    driver.steps()
    assert driver.finished("t").finish_reason == "cancelled"
    assert [driver.finished(turn).token_ids for turn in turns[1:]] == [alone("dflash2", sub) for sub in (1, 2)]
    assert not driver.engine.memory.checkpoints


def test_a_follower_that_is_cancelled_while_it_waits_leaves_nothing_behind():
    driver = Driver("none", lanes=1, images=4, prefill_chunk=64)
    turns = submitted(driver, 3)
    while not driver.started_events("t"):
        driver.engine.step()
    assert len(driver.engine.memory.checkpoints) == 2
    driver.engine.execute(Cancel(turns[1]))
    driver.steps()
    assert driver.finished(turns[1]).finish_reason == "cancelled" and not driver.engine.memory.checkpoints
    assert driver.finished(turns[2]).token_ids == alone("none", 2)


def test_nothing_is_kept_for_a_follower_that_was_over_before_the_prompt_was_in():
    driver = Driver("none", lanes=1, images=4, prefill_chunk=64, queue_turns=2)
    turns = submitted(driver, 4)
    assert driver.failed(turns[3]).code == errors.OVERLOADED
    driver.engine.step()
    driver.engine.execute(Cancel(turns[1]))
    while not driver.started_events("t"):
        driver.engine.step()
    assert len(driver.engine.memory.checkpoints) == 1, "only the third one waits"
    driver.steps()
    assert not driver.engine.memory.checkpoints


def test_what_was_kept_for_a_follower_that_is_refused_when_it_comes_is_released():
    driver = Driver("none", lanes=1, images=4, queue_turns=1)
    first, follower = choices(replace(SUBMIT, max_tokens=1), 2)
    driver.engine.execute(first)
    driver.steps()
    assert len(driver.engine.memory.checkpoints) == 1
    driver.submit(LONG, turn="has the lane")
    driver.submit(LONG, turn="fills the queue")
    driver.engine.execute(follower)
    assert driver.failed(follower.turn).code == errors.OVERLOADED and not driver.engine.memory.checkpoints


def test_a_follower_can_be_preempted_before_its_first_token():
    driver = Driver("dflash2", lanes=3, images=4, prefill_chunk=64)
    turns = submitted(driver, 3)
    while not driver.started_events("t"):
        driver.engine.step()
    for turn in turns:
        driver.engine.execute(Preempt(turn))
        driver.engine.step()
        driver.engine.execute(Preempt(turn))
    driver.steps()
    assert [driver.finished(turn).token_ids for turn in turns] == [alone("dflash2", sub) for sub in range(3)]
    assert not driver.engine.memory.checkpoints


def test_turns_that_wait_for_each_other_or_for_themselves_run():
    driver = Driver("none", lanes=2, images=2)
    for turn, after in (("a", "b"), ("b", "a"), ("c", "c"), ("d", "nobody")):
        driver.engine.execute(replace(SUBMIT, turn=turn, after=after, max_tokens=2))
    driver.steps()
    assert all(len(driver.finished(turn).token_ids) == 2 for turn in "abcd")
