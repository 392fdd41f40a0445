"""What a seed promises (decision 16): the same tokens whatever happens to the turn, and for DFlash2 the same rounds.

On the tiny model, whose rings wrap after 16 tokens. Everything is compared with the request alone, in FP32.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest

from deployment.engine.commands import Export, Import, Preempt, Sampling
from deployment.engine.events import Finished, Tokens
from deployment.engine.options import Backend
from tests.engine.tiny import PUBLIC, TinyDriver

PROMPT = tuple(random.Random(61).choices(range(PUBLIC), k=30))
TOKENS, CUT = 40, 17
SAMPLING = Sampling(temperature=0.9, top_k=7, top_p=0.97, seed=62)
REPRODUCIBLE = Sampling(temperature=0.9, top_k=7, top_p=0.97, seed=62, reproducible=True)
INDEPENDENT: list[tuple[Backend, int | None, Sampling]] = [
    ("none", None, SAMPLING),
    *(("dflash", k, SAMPLING) for k in (1, 4, 9)),
    *(("dflash2", k, REPRODUCIBLE) for k in (1, 7)),
]
"""Whose tokens depend on the seed alone."""
TURN: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True}


@functools.cache
def alone(backend: Backend, draft_tokens: int | None, sampling: Sampling) -> Finished:
    return TinyDriver(backend, draft_tokens, lanes=1, images=0).run(PROMPT, sampling=sampling, **TURN)


def in_a_batch(backend: Backend, draft_tokens: int | None, sampling: Sampling, place: int) -> Finished:
    """The request as number `place` of eight, whose others have prompts, controls and lengths of their own."""
    rng = random.Random(place)
    driver = TinyDriver(backend, draft_tokens, lanes=8, images=0)
    turn = ""
    for other in range(8):
        if other == place:
            turn = driver.submit(PROMPT, sampling=sampling, **TURN)
            continue
        controls = Sampling(temperature=rng.choice([0.0, 0.7, 1.5]), frequency_penalty=rng.choice([0.0, 0.5]), seed=9)
        prompt = rng.choices(range(PUBLIC), k=rng.randrange(1, 60))
        driver.submit(tuple(prompt), sampling=controls, max_tokens=rng.randrange(1, 50), ignore_eos=True)
    driver.steps()
    return driver.finished(turn)


def preempted(backend: Backend, draft_tokens: int | None, sampling: Sampling, images: int) -> Finished:
    """The request, whose lane is taken away inside its prompt, and after every fourth of its rounds."""
    driver = TinyDriver(backend, draft_tokens, lanes=1, images=images, prefill_chunk=16)
    turn = driver.submit(PROMPT, sampling=sampling, **TURN)
    place, times = 0, 0
    while driver.engine.step():
        if place <= sum(isinstance(event, Tokens) for event in driver.of(turn)):
            place, times = place + 4, times + 1
            driver.engine.execute(Preempt(turn))
    assert times > 3
    return driver.finished(turn)


def restored(
    backend: Backend, draft_tokens: int | None, sampling: Sampling, moved: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens of the request when its budget cuts it and another turn goes on from its state, in this engine or in
    another one; and the rounds of the other turn."""
    driver = TinyDriver(backend, draft_tokens, lanes=1, images=4)
    first = driver.run(PROMPT, session="s", sampling=sampling, max_tokens=CUT, ignore_eos=True).token_ids
    if moved:
        exported = driver.call(Export("e", "s"))
        driver = TinyDriver(backend, draft_tokens, lanes=1, images=4)
        driver.call(Import("i", "s", exported.document))
    turn = driver.submit(PROMPT + first, session="s", sampling=sampling, max_tokens=TOKENS - CUT, ignore_eos=True)
    driver.steps()
    assert driver.started(turn).prefilled == 1
    return first + driver.finished(turn).token_ids, driver.finished(turn).rounds


def facts(finished: Finished) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return finished.token_ids, finished.rounds


@pytest.mark.parametrize("backend, draft_tokens, sampling", INDEPENDENT)
def test_a_seeds_tokens_are_those_of_plain_decoding_whatever_happens_to_the_turn(backend, draft_tokens, sampling):
    expected = alone("none", None, SAMPLING).token_ids
    assert len(set(expected)) > 4
    assert alone(backend, draft_tokens, sampling).token_ids == expected
    assert any(alone(backend, draft_tokens, sampling).rounds) == (backend != "none")
    assert in_a_batch(backend, draft_tokens, sampling, place=3).token_ids == expected
    for images in (2, 0):
        assert preempted(backend, draft_tokens, sampling, images).token_ids == expected
    for moved in (False, True):
        assert restored(backend, draft_tokens, sampling, moved)[0] == expected


@pytest.mark.parametrize("backend", ["dflash", "dflash2"])
def test_a_request_that_turns_drafting_off_has_the_tokens_of_plain_decoding(backend):
    finished = TinyDriver(backend, 7, images=0).run(PROMPT, sampling=SAMPLING, drafting=False, **TURN)
    assert finished.token_ids == alone("none", None, SAMPLING).token_ids and not any(finished.rounds)


@pytest.mark.parametrize("draft_tokens", [2, 7])
def test_dflash2_has_the_same_rounds_for_a_seed_and_k_whatever_happens_to_the_turn(draft_tokens):
    expected = alone("dflash2", draft_tokens, SAMPLING)
    assert sum(expected.rounds) > 0
    assert facts(in_a_batch("dflash2", draft_tokens, SAMPLING, place=5)) == facts(expected)
    for images in (2, 0):
        assert facts(preempted("dflash2", draft_tokens, SAMPLING, images)) == facts(expected)
    stayed = restored("dflash2", draft_tokens, SAMPLING, moved=False)
    assert restored("dflash2", draft_tokens, SAMPLING, moved=True) == stayed


@pytest.mark.parametrize("place", [0, 2, 7])
@pytest.mark.parametrize("backend", ["dflash", "dflash2"])
def test_the_row_of_a_batch_changes_neither_tokens_nor_rounds(backend, place):
    assert facts(in_a_batch(backend, 3, SAMPLING, place)) == facts(alone(backend, 3, SAMPLING))
