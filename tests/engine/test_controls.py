"""Sampling controls through the engine: a drafter changes no greedy or DFlash token, whatever the control; logprobs."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from deployment.engine import errors
from deployment.engine.commands import Sampling, TokenLogprob
from deployment.engine.events import Tokens
from tests.engine.driving import Driver, models, prompt, seeded

CONTROLS = {
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 1.0},
    "frequency": {"frequency_penalty": 0.7},
    "bias": {"logit_bias": ((290, 5.0), (198, -100.0))},
    "min_tokens": {"min_tokens": 25},
    "min_p": {"min_p": 0.1},
    "all": {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
        "min_p": 0.05,
        "min_tokens": 5,
    },
}
INDEX = 8  # a chat that ends by itself


@functools.cache
def engine(backend: str) -> Driver:
    return Driver(backend, lanes=3, images=4)


@functools.cache
def tokens(backend: str, sampling: Sampling, max_tokens: int = 40, **fields) -> tuple[int, ...]:
    return engine(backend).run(prompt(INDEX), sampling=sampling, max_tokens=max_tokens, **fields).token_ids


@pytest.mark.parametrize("name", CONTROLS)
def test_greedy_tokens_under_a_control_are_the_same_with_every_drafter(name):
    expected = tokens("none", Sampling(**CONTROLS[name]))
    assert tokens("dflash", Sampling(**CONTROLS[name])) == tokens("dflash2", Sampling(**CONTROLS[name])) == expected


@pytest.mark.parametrize("name", CONTROLS)
def test_a_seed_under_a_control_gives_the_same_tokens_with_dflash_and_without(name):
    assert tokens("dflash", seeded(3, **CONTROLS[name])) == tokens("none", seeded(3, **CONTROLS[name]))


@pytest.mark.parametrize("name", ["repetition", "presence", "frequency", "bias"])
def test_a_control_changes_what_is_generated(name):
    """On a text that repeats itself."""
    plain, controlled = (
        engine("none").run(prompt(0), sampling=sampling, max_tokens=60, ignore_eos=True).token_ids
        for sampling in (Sampling(), Sampling(**CONTROLS[name]))
    )
    assert plain != controlled


def test_no_end_token_comes_before_min_tokens_even_inside_an_accepted_run():
    plain = tokens("none", Sampling())
    longer = tokens("dflash2", Sampling(min_tokens=len(plain) + 3))
    assert len(longer) >= len(plain) + 3 and longer[: len(plain)] == plain


def test_a_strong_frequency_penalty_repeats_nothing_within_a_round():
    """Counting once a round would let a draft repeat itself inside it."""
    published = tokens("dflash2", Sampling(frequency_penalty=100.0), ignore_eos=True)
    assert len(set(published)) == len(published) == 40


@pytest.mark.parametrize("draft_tokens", [2, 7])
def test_reproducible_dflash2_gives_the_tokens_of_plain_decoding_for_a_seed(draft_tokens):
    drafted = Driver("dflash2", draft_tokens, images=2).run(
        prompt(4), sampling=seeded(5, reproducible=True), max_tokens=40, ignore_eos=True
    )
    plain = Driver("none", images=2).run(prompt(4), sampling=seeded(5), max_tokens=40, ignore_eos=True)
    assert drafted.token_ids == plain.token_ids
    assert sum(drafted.rounds) > 0


def test_controls_of_one_row_do_not_touch_the_others_of_its_batch():
    driver = Driver("dflash2", lanes=3, images=2)
    settings = [Sampling(), Sampling(frequency_penalty=2.0), seeded(3, **CONTROLS["all"])]
    turns = [driver.submit(prompt(i), sampling=s, max_tokens=25, ignore_eos=True) for i, s in enumerate(settings)]
    driver.steps()
    alone = Driver("dflash2", lanes=1, images=2)
    for i, (turn, sampling) in enumerate(zip(turns, settings, strict=True)):
        expected = alone.run(prompt(i), sampling=sampling, max_tokens=25, ignore_eos=True)
        assert (driver.finished(turn).token_ids, driver.finished(turn).rounds) == (expected.token_ids, expected.rounds)


# ------------------------------------------------------------------------------------------------ logprobs


def told(driver: Driver, turn: str) -> list[TokenLogprob]:
    return [entry for event in driver.of(turn) if isinstance(event, Tokens) for entry in event.logprobs]


@pytest.mark.parametrize("backend", ["none", "dflash", "dflash2"])
def test_logprobs_are_those_of_the_raw_target_for_every_published_token_and_no_other(backend):
    """With speculation, a temperature and a penalty: none of them shows in what is told."""
    driver = Driver(backend, images=2)
    sampling = seeded(6, logprobs=3, presence_penalty=0.5)
    turn = driver.submit(prompt(8), sampling=sampling, max_tokens=30)
    driver.steps()
    entries, published = told(driver, turn), driver.finished(turn).token_ids
    assert tuple(entry.token for entry in entries) == published
    theirs = reference_logprobs(prompt(8) + published)
    for position, entry in enumerate(entries, start=len(prompt(8)) - 1):
        exact = theirs[position]
        assert abs(entry.logprob - float(exact[entry.token])) < 2e-3
        best = exact.topk(3)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert torch.allclose(torch.tensor([p for _, p in entry.top]), best.values, atol=2e-3)


@pytest.mark.parametrize("backend", ["none", "dflash", "dflash2"])
def test_processed_logprobs_are_those_of_what_all_controls_leave_and_a_neighbours_stay_raw(backend):
    """By decision 12, written out in FP64 from the reference's raw logits: every position has its own history."""
    driver = Driver(backend, images=3, lanes=2)
    controls = {"presence_penalty": 1.5, "top_k": 4, "top_p": 1.0, "min_p": 0.02, "logit_bias": ((290, 3.0),)}
    sampling = seeded(6, temperature=1.5, logprobs=6, logprobs_mode="processed_logprobs", **controls)
    turn = driver.submit(prompt(8), sampling=sampling, max_tokens=24)
    raw = driver.submit(prompt(8), sampling=replace(sampling, logprobs_mode="raw_logprobs"), max_tokens=24)
    driver.steps()
    published = driver.finished(turn).token_ids
    assert tuple(entry.token for entry in told(driver, turn)) == published == driver.finished(raw).token_ids
    theirs = reference_logprobs(prompt(8) + published).double()
    alternatives: set[int] = set()
    for index, (entry, plain) in enumerate(zip(told(driver, turn), told(driver, raw), strict=True)):
        exact = theirs[len(prompt(8)) - 1 + index]
        assert abs(plain.logprob - float(exact[entry.token])) < 2e-3 and len(plain.top) == 6
        left = law(exact, published[:index], sampling)
        assert abs(entry.logprob - left[entry.token]) < 5e-3
        assert [token for token, _ in entry.top] == sorted(left, key=left.__getitem__, reverse=True)
        assert [p for _, p in entry.top] == pytest.approx(sorted(left.values(), reverse=True), abs=5e-3)
        alternatives.add(len(entry.top))
    assert max(alternatives) == 4 > min(alternatives), "no filter shows in what is told"


def law(logprobs: torch.Tensor, generated: tuple[int, ...], sampling: Sampling) -> dict[int, float]:
    """Log-probabilities of the tokens that are left; nothing here is near a tie or a boundary."""
    logits = logprobs.clone()
    for token, added in sampling.logit_bias:
        logits[token] += added
    for token in set(generated):
        logits[token] -= sampling.presence_penalty
    best, ids = (logits / sampling.temperature).topk(sampling.top_k)
    keep = (best - best[0]).exp() >= sampling.min_p
    left = best[keep].log_softmax(-1)
    return dict(zip(ids[keep].tolist(), left.tolist(), strict=True))


@pytest.mark.parametrize("backend", ["none", "dflash2"])
def test_processed_logprobs_of_a_greedy_turn_have_its_penalties_and_no_filters(backend):
    driver = Driver(backend, images=2)
    sampling = Sampling(logprobs=5, logprobs_mode="processed_logprobs", frequency_penalty=0.7, top_k=2)
    turn = driver.submit(prompt(0), sampling=sampling, max_tokens=40, ignore_eos=True)
    driver.steps()
    published = driver.finished(turn).token_ids
    theirs = reference_logprobs(prompt(0) + published)
    shows = False
    for index, entry in enumerate(told(driver, turn)):
        raw = theirs[len(prompt(0)) - 1 + index]
        exact = raw.clone()
        for token in published[:index]:
            exact[token] -= 0.7
        exact = exact.log_softmax(-1)
        assert abs(entry.logprob - float(exact[entry.token])) < 5e-3 and len(entry.top) == 5
        assert entry.top[0] == (entry.token, entry.logprob)
        shows |= abs(entry.logprob - float(raw[entry.token])) > 0.1
    assert shows, "no penalty shows in what is told"


@functools.cache
def reference_logprobs(ids: tuple[int, ...]) -> torch.Tensor:
    from transformers import Qwen3_5ForCausalLM

    from tests.engine.driving import TARGET

    theirs = Qwen3_5ForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    with torch.no_grad():
        return theirs(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)


def test_without_being_asked_nothing_is_told():
    driver = Driver("dflash2", images=2)
    turn = driver.submit(prompt(8), max_tokens=10)
    driver.steps()
    assert told(driver, turn) == []


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": float("nan")}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-39}, "repetition_penalty"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty"),
        ({"presence_penalty": float("inf")}, "presence_penalty"),
        ({"presence_penalty": 1e39}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"logit_bias": ((8192, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((1, float("inf")),)}, "logit_bias"),
        ({"logit_bias": ((1, -1e39),)}, "logit_bias"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"sub": 2**32}, "sub"),
    ],
)
def test_a_control_out_of_range_is_refused_by_name(fields, param):
    driver = engine("none")
    failed = driver.failed(driver.submit(prompt(0), sampling=Sampling(**fields)))
    assert (failed.code, failed.param) == (errors.INVALID_REQUEST, param)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(frequency_penalty=-1e4, presence_penalty=-1e4, repetition_penalty=0.01),
        Sampling(frequency_penalty=1e4, presence_penalty=1e4, repetition_penalty=100.0),
        Sampling(logit_bias=((290, 1e4), (290, 1e4), (291, -1e4))),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-30, 1e39])
def test_the_largest_controls_that_are_taken_still_choose_by_order(sampling, temperature):
    """Not by what numbers that are none compare to."""
    chosen = tokens("dflash2", replace(sampling, temperature=temperature, seed=3), 16)
    if temperature < 1:
        assert chosen == tokens("none", sampling, 16)
    assert set(chosen) != {0}


def test_a_top_k_beyond_every_integer_of_the_device_keeps_all_tokens():
    huge = tokens("none", seeded(3, top_k=2**70))
    assert huge == tokens("none", seeded(3, top_k=models("none").target.public_rows))
