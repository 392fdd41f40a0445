"""Bugs of other engines that no test of ours covered otherwise; `docs/known-bugs.md` lists all of them by number."""

from __future__ import annotations

import random

import pytest

from deployment.engine.commands import Sampling
from deployment.engine.events import Tokens
from tests.engine.tiny import PUBLIC, TinyDriver

PROMPT = tuple(random.Random(74).choices(range(PUBLIC), k=12))
BACKENDS = ["none", "dflash", "dflash2"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_min_p_of_one_leaves_the_best_token_alone_at_any_temperature(backend):
    driver = TinyDriver(backend, images=0)
    greedy, hot, filtered = (
        driver.run(PROMPT, sampling=sampling, max_tokens=40, ignore_eos=True).token_ids
        for sampling in (Sampling(), Sampling(temperature=2.0, seed=1), Sampling(temperature=2.0, seed=1, min_p=1.0))
    )
    assert filtered == greedy != hot


@pytest.mark.parametrize("backend", ["dflash", "dflash2"])
def test_drafts_that_were_rejected_count_in_no_penalty(backend):
    """A history that kept them would penalise tokens that were never generated."""
    sampling = Sampling(frequency_penalty=0.4, presence_penalty=0.6, repetition_penalty=1.3)
    plain, drafted = (TinyDriver(name, lanes=6, images=0) for name in ("none", backend))
    rounds: list[int] = []
    for driver in (plain, drafted):
        for first in range(PUBLIC):
            driver.submit((first, *PROMPT), turn=f"{first}", sampling=sampling, max_tokens=40, ignore_eos=True)
        driver.steps()
    for first in range(PUBLIC):
        finished = drafted.finished(f"{first}")
        assert finished.token_ids == plain.finished(f"{first}").token_ids
        rounds += finished.rounds
    assert rounds.count(0) > 50 and sum(rounds) > 10


@pytest.mark.parametrize("backend", ["dflash", "dflash2"])
def test_the_same_greedy_request_has_the_same_accepted_counts_every_time(backend):
    driver = TinyDriver(backend, lanes=1, images=0)
    traces = {driver.run(PROMPT, max_tokens=30, ignore_eos=True).rounds for _ in range(20)}
    assert len(traces) == 1 and any(traces.pop())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stop_string_leaves_as_many_logprobs_as_ids_and_none_of_what_it_took(backend):
    driver = TinyDriver(backend, images=0)
    whole = driver.run(PROMPT, max_tokens=30, ignore_eos=True, sampling=Sampling(temperature=1.2, seed=2))
    text = driver.engine.models.tokenizer.bytes_of
    string = text(whole.token_ids[4:7]).decode()
    turn = driver.submit(
        PROMPT,
        max_tokens=30,
        ignore_eos=True,
        sampling=Sampling(temperature=1.2, seed=2, logprobs=2),
        stop_strings=(string,),
    )
    driver.steps()
    finished = driver.finished(turn)
    told = [entry.token for event in driver.of(turn) if isinstance(event, Tokens) for entry in event.logprobs]
    assert finished.stop_string == string
    assert tuple(told) == finished.token_ids == driver.streamed(turn) == whole.token_ids[: len(told)]
    assert len(told) <= 4
