"""Thinking budgets: an open block is closed in time, and nothing but its length changes."""

from __future__ import annotations

import pytest

from deployment.engine.commands import Sampling, ThinkingBudget
from deployment.engine.events import Tokens
from tests.engine.driving import Driver, models, prompt, seeded

OPEN, END = 8189, 8190
CLOSE = (198, END, 271)


def budget(tokens: int, **more) -> ThinkingBudget:
    return ThinkingBudget(tokens, CLOSE, END, OPEN, **more)


def plain(prompt_ids: tuple[int, ...], tokens: int, **more) -> tuple[int, ...]:
    return Driver("none", images=2).run(prompt_ids, max_tokens=tokens, ignore_eos=True, **more).token_ids


DRAFTERS = [("none", None), ("dflash", 3), ("dflash", 15), ("dflash2", 7)]


@pytest.mark.parametrize("backend, draft_tokens", DRAFTERS)
@pytest.mark.parametrize("tokens", [0, 1, 4, 9])
def test_a_spent_budget_closes_the_block_and_the_answer_goes_on_from_there(backend, draft_tokens, tokens):
    """What follows is what a fresh turn says whose prompt ends with the closing ids."""
    driver = Driver(backend, draft_tokens, images=4)
    turn = driver.submit(
        prompt(11), session="s", max_tokens=tokens + 15, ignore_eos=True, thinking=budget(tokens, opened=True)
    )
    driver.steps()
    finished = driver.finished(turn)
    thought = plain(prompt(11), 20)[:tokens]
    assert END not in thought
    closed = (*prompt(11), *thought, *CLOSE)
    assert finished.token_ids == driver.streamed(turn) == (*thought, *CLOSE, *plain(closed, 12))
    assert finished.finish_reason == "length" and finished.frontier == len(prompt(11)) + tokens + 14
    assert driver.engine.memory.checkpoints[-1].ledger == prompt(11) + finished.token_ids


@pytest.mark.parametrize("backend, draft_tokens", [("dflash", 3), ("dflash", 15)])
def test_seeded_turns_draw_the_same_after_forced_ids_with_and_without_drafting(backend, draft_tokens):
    fields = {"sampling": seeded(5), "max_tokens": 30, "ignore_eos": True, "thinking": budget(6, opened=True)}
    expected = Driver("none", images=2).run(prompt(11), **fields)
    drafted = Driver(backend, draft_tokens, images=2).run(prompt(11), **fields)
    assert drafted.token_ids == expected.token_ids and expected.token_ids[6:9] == CLOSE
    assert sum(drafted.rounds) > 0


@pytest.mark.parametrize("backend", ["none", "dflash2"])
def test_a_block_that_ends_in_time_or_never_opens_is_left_alone(backend):
    whole = plain(prompt(11), 30)
    used = whole.index(END)
    driver = Driver(backend, images=2)
    fields = {"max_tokens": 30, "ignore_eos": True}
    assert driver.run(prompt(11), thinking=budget(used + 1, opened=True), **fields).token_ids == whole
    assert driver.run(prompt(11), thinking=budget(0), **fields).token_ids == whole


@pytest.mark.parametrize("backend", ["none", "dflash2"])
def test_a_block_that_the_model_opens_counts_too(backend):
    bias = ((OPEN, 100.0),)
    finished = Driver(backend, images=2).run(
        prompt(0), sampling=Sampling(logit_bias=bias), max_tokens=9, ignore_eos=True, thinking=budget(2)
    )
    # opened, two more tokens inside, closed; the budget is spent, so that a second block is closed at once
    assert finished.token_ids == (OPEN, OPEN, OPEN, *CLOSE, OPEN, *CLOSE[:2])


def test_forced_ids_end_the_turn_like_others_and_were_certain():
    driver = Driver("dflash2", images=2)
    turn = driver.submit(
        prompt(11), sampling=Sampling(logprobs=1), max_tokens=30, ignore_eos=True, stop_ids=(END,),
        thinking=budget(3, opened=True),
    )  # fmt: skip
    driver.steps()
    finished = driver.finished(turn)
    assert (finished.finish_reason, finished.stop_id, len(finished.token_ids)) == ("stop", END, 4)
    logprobs = [entry for event in driver.of(turn) if isinstance(event, Tokens) for entry in event.logprobs]
    assert [entry.token for entry in logprobs] == list(finished.token_ids)
    assert logprobs[3].logprob == 0.0 and logprobs[3].top == () and all(entry.top for entry in logprobs[:3])
    text = models("none").tokenizer.decode(finished.token_ids[1:4])
    stopped = driver.run(
        prompt(11), max_tokens=30, ignore_eos=True, stop_strings=(text,), thinking=budget(3, opened=True)
    )
    assert stopped.stop_string == text and len(stopped.token_ids + stopped.hidden_ids) == 4


@pytest.mark.parametrize("thinking", [budget(-1), ThinkingBudget(1, (), END), ThinkingBudget(1, (END, 8192), END)])
def test_budgets_that_make_no_sense_are_refused(thinking):
    driver = Driver("none", images=2)
    assert driver.failed(driver.submit(prompt(0), thinking=thinking)).param == "thinking_budget"
