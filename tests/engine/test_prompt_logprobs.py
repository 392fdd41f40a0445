"""Log-probabilities of a prompt: those of the raw target, once each, however it is cut and whoever interrupts."""

from __future__ import annotations

import functools

import pytest
import torch

from deployment.engine import errors, logprobs
from deployment.engine.commands import Preempt, Sampling, Submit, TokenLogprob
from deployment.engine.events import Finished, PromptLogprobs, Started
from deployment.turns import choices
from model.target import Columns, TargetState
from tests.engine.driving import Driver, models, prompt, seeded

LONG = (*prompt(0), *prompt(2), *prompt(8))
SCORED = Sampling(prompt_logprobs=3)


@functools.cache
def oracle(ids: tuple[int, ...]) -> torch.Tensor:
    """FP32 [T, V]: log-softmax of the target's logits of all positions, computed at once."""
    target = models("none").target
    config, pages = target.config, len(ids) // 64 + 1
    full, delta = len(config.full_layers), len(config.gdn_layers)
    state = TargetState(
        keys=torch.zeros(pages, full, 64, config.num_kv_heads, config.head_dim),
        values=torch.zeros(pages, full, 64, config.num_kv_heads, config.head_dim),
        recurrent=torch.zeros(1, delta, config.gdn_value_heads, config.gdn_key_dim, config.gdn_value_dim),
        history=torch.zeros(1, delta, config.conv_channels, config.conv_kernel - 1),
    )
    length, table = torch.tensor([len(ids)]), torch.arange(pages)[None]
    with torch.no_grad():
        columns = Columns(torch.tensor([ids]), torch.tensor([0]), length, table, torch.tensor([0]))
        return target.logits(target.prefill(columns, state).hidden[0]).log_softmax(-1)


def told(driver: Driver, turn: str) -> list[TokenLogprob]:
    """What was told of the prompt's tokens after the first, checked to be without gaps or repeats, before `Started`."""
    entries: list[TokenLogprob] = []
    for event in driver.of(turn):
        if isinstance(event, PromptLogprobs):
            assert event.start == len(entries) + 1, "a gap or a repeat"
            assert not driver.started_events(turn) or driver.of(turn).index(event) < driver.of(turn).index(
                driver.started(turn)
            )
            entries += event.logprobs
    return entries


def check(entries: list[TokenLogprob], ids: tuple[int, ...], alternatives: int = 3) -> None:
    assert tuple(entry.token for entry in entries) == ids[1:]
    for row, entry in zip(oracle(ids), entries, strict=False):
        assert abs(entry.logprob - float(row[entry.token])) < 1e-4
        best = row.topk(alternatives)
        assert torch.allclose(torch.tensor([p for _, p in entry.top]), best.values, atol=1e-4)
        assert all(abs(float(row[token]) - p) < 1e-4 for token, p in entry.top)


@pytest.mark.parametrize("prefill_chunk", [1000, 64, 37])
@pytest.mark.parametrize("backend", ["none", "dflash2"])
def test_scores_are_the_raw_targets_however_the_prompt_is_cut(backend, prefill_chunk):
    driver = Driver(backend, images=2, prefill_chunk=prefill_chunk)
    controls = seeded(3, prompt_logprobs=3, frequency_penalty=1.0, logit_bias=((290, 50.0),))
    turn = driver.submit(LONG, sampling=controls, max_tokens=2, ignore_eos=True)
    driver.steps()
    check(told(driver, turn), LONG)
    slices = [event for event in driver.of(turn) if isinstance(event, PromptLogprobs)]
    assert len(slices) == -(-len(LONG) // prefill_chunk)


def test_no_more_rows_than_stated_have_logits_at_the_same_time(monkeypatch):
    driver = Driver("none", images=2)
    rows, logits = [], driver.engine.models.target.logits
    monkeypatch.setattr(
        driver.engine.models.target, "logits", lambda h: rows.append(h.numel() // h.shape[-1]) or logits(h)
    )
    driver.run(LONG, sampling=SCORED, max_tokens=1)
    assert max(rows) == logprobs.PROMPT_ROWS < len(LONG) // 2 and sum(rows) == len(LONG)


def test_a_prompt_of_one_token_has_none_and_zero_alternatives_are_an_answer():
    driver = Driver("none", images=2)
    single = driver.submit(LONG[:1], sampling=SCORED, max_tokens=1, ignore_eos=True)
    bare = driver.submit(LONG[:9], sampling=Sampling(prompt_logprobs=0), max_tokens=1, ignore_eos=True)
    driver.steps()
    assert told(driver, single) == [] and driver.started(single).prefilled == 1
    assert [entry.top for entry in told(driver, bare)] == [()] * 8


def test_asking_changes_no_token_and_who_does_not_ask_is_told_nothing():
    driver = Driver("dflash2", lanes=2, images=4, prefill_chunk=32)
    asking = driver.submit(LONG, sampling=seeded(4, prompt_logprobs=1), max_tokens=20, ignore_eos=True)
    silent = driver.submit(LONG, sampling=seeded(4), max_tokens=20, ignore_eos=True)
    driver.steps()
    assert told(driver, silent) == [] and len(told(driver, asking)) == len(LONG) - 1
    ids = driver.finished(asking).token_ids
    assert ids == driver.finished(silent).token_ids and driver.finished(asking).rounds == driver.finished(silent).rounds


# ------------------------------------------------------------------------------------------------ states of others


def test_a_turn_that_asks_takes_nothing_from_its_session_but_gives_its_state_to_it():
    driver = Driver("dflash2", images=8)
    first = driver.run(prompt(0), session="s", stable_boundary=10, max_tokens=5, ignore_eos=True)
    longer = (*prompt(0), *first.token_ids, *prompt(1))
    asking = driver.submit(longer, session="s", sampling=SCORED, max_tokens=5, ignore_eos=True)
    driver.steps()
    assert (driver.started(asking).hit, driver.started(asking).reused) == ("none", 0)
    check(told(driver, asking), longer)
    after = (*longer, *driver.finished(asking).token_ids)
    again = driver.submit((*after, 290), session="s", max_tokens=2, ignore_eos=True)
    driver.steps()
    assert driver.started(again).reused == len(after) - 1


def test_a_follower_that_asks_does_not_begin_behind_the_prompt_that_it_shares():
    driver = Driver("none", lanes=2, images=4)
    leader = driver.submit(prompt(0), turn="a", followers=("b",), max_tokens=3, ignore_eos=True)
    follower = driver.submit(prompt(0), turn="b", after="a", sampling=SCORED, max_tokens=3, ignore_eos=True)
    driver.steps()
    check(told(driver, follower), prompt(0))
    assert driver.finished(follower).token_ids == driver.finished(leader).token_ids


def test_choices_score_their_prompt_once():
    driver = Driver("none", lanes=2, images=4)
    turns = choices(Submit("c", prompt(0), sampling=seeded(3, prompt_logprobs=3), max_tokens=2, ignore_eos=True), 2)
    for turn in turns:
        driver.engine.execute(turn)
    driver.steps()
    check(told(driver, "c"), prompt(0))
    assert told(driver, "c.1") == [] and driver.started("c.1").prefilled == 0


@pytest.mark.parametrize(
    "images, session",
    [(6, None), (0, None), (6, "s"), (2, "s")],
    ids=["from its checkpoint", "by replay", "from its checkpoint beside others", "by replay beside others"],
)
def test_preemption_repeats_and_loses_no_score(images, session):
    driver = Driver("dflash2", lanes=1, images=images, prefill_chunk=32)
    alone = Driver("dflash2", lanes=1, images=2).run(LONG, sampling=SCORED, max_tokens=12, ignore_eos=True)
    if session:  # what it must not go on from, though it lies at hand
        driver.run(LONG, session=session, stable_boundary=len(LONG) - 1, max_tokens=2, ignore_eos=True)
    turn = driver.submit(LONG, session=session, sampling=SCORED, max_tokens=12, ignore_eos=True)
    for step in range(400):
        if not driver.engine.step():
            break
        if step in (0, 1, 3, 6, 20, 30):
            driver.engine.execute(Preempt(turn))
        driver.engine.memory.check_invariants()
    check(told(driver, turn), LONG)
    finished = driver.of(turn)[-1]
    assert isinstance(finished, Finished) and finished.token_ids == alone.token_ids
    assert sum(isinstance(event, Started) for event in driver.of(turn)) == 1


@pytest.mark.parametrize("asked", [-1, 21])
def test_a_number_of_alternatives_out_of_range_is_refused_by_name(asked):
    driver = Driver("none", images=2)
    failed = driver.failed(driver.submit(prompt(0), sampling=Sampling(prompt_logprobs=asked)))
    assert (failed.code, failed.param) == (errors.INVALID_REQUEST, "prompt_logprobs")
