"""Turns with images and videos: the tokens are transformers', drafted or not, and drafts are right as often as an FP64
drafter's over transformers' features."""

from __future__ import annotations

import copy
import functools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from deployment.engine.commands import Preempt, Sampling, Submit
from deployment.engine.events import Failed, Finished
from deployment.engine.message_codec import decode, encode
from deployment.engine.options import Backend
from state.media import Placed, PlacedMedia
from tests.engine.seeing import (
    DRAFT_TOKENS,
    TAPS,
    SeeingDriver,
    draft_settings,
    draft_weights,
    placed_prompt,
    seeing_models,
    shown,
    theirs,
)
from tests.engine.tiny import TinyDriver
from tests.kernels import oracles
from tests.model.test_drafter import TOP, Oracle, Setup, Tables
from tests.model.test_vision import (
    IMAGE,
    PROMPTS,
    START,
    VOCABULARY,
    image,
    residuals_and_logits,
    their_inputs,
    video,
    words,
)

TOKENS = 12


@functools.cache
def undisturbed(name: str) -> tuple[int, ...]:
    """transformers' greedy continuation."""
    ids, items = PROMPTS[name]()
    inputs = their_inputs(ids, items) | {"attention_mask": torch.ones_like(ids)[None]}
    with torch.no_grad():
        out = theirs().generate(**inputs, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
    return tuple(out[0, len(ids) :].tolist())


def run(driver: SeeingDriver, name: str, **fields: object) -> Finished:
    ids, media = placed_prompt(*PROMPTS[name]())
    return driver.run(ids, media=media, max_tokens=TOKENS, ignore_eos=True, **fields)


# ------------------------------------------------------------------------------------------------ tokens


@pytest.mark.parametrize("name", PROMPTS)
def test_a_turn_with_media_continues_as_transformers_does_however_its_prompt_is_cut(name: str) -> None:
    for chunk in (7, 64, 512):
        driver = SeeingDriver(lanes=1, images=0, prefill_chunk=chunk)
        assert run(driver, name).token_ids == undisturbed(name), f"slices of {chunk}"


def test_lanes_with_and_without_media_decode_in_one_round_each_at_its_own_positions() -> None:
    driver = SeeingDriver("dflash2", lanes=4, images=0, prefill_chunk=13)
    names = ["several images of odd sizes", "a video of odd length", "one image"]
    turns = []
    for name in names:
        ids, media = placed_prompt(*PROMPTS[name]())
        turns.append(driver.submit(ids, media=media, max_tokens=TOKENS, ignore_eos=True))
    text = driver.submit(tuple(words(30)), max_tokens=TOKENS, ignore_eos=True)
    driver.steps()
    assert [driver.finished(turn).token_ids for turn in turns] == [undisturbed(name) for name in names]
    alone = SeeingDriver(lanes=1, images=0).run(tuple(words(30)), max_tokens=TOKENS, ignore_eos=True)
    assert driver.finished(text).token_ids == alone.token_ids


def test_the_tower_runs_once_for_the_slices_of_a_prompt_and_for_the_next_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SeeingDriver(lanes=1, images=0, prefill_chunk=7)
    cache = driver.engine._executor._media
    assert cache is not None
    encode_item, seen = cache._encode, []
    monkeypatch.setattr(cache, "_encode", lambda item: seen.append(item.digest) or encode_item(item))
    for _ in range(2):
        run(driver, "several images of odd sizes")
    assert len(seen) == len(set(seen)) == 4
    assert 0 < driver.encoded <= driver.engine._options.media_cache_bytes


@pytest.mark.parametrize("backend", ["none", "dflash2"])
def test_a_preempted_turn_with_media_goes_on_as_if_nothing_had_happened(backend: Backend) -> None:
    name = "images and a video"
    ids, media = placed_prompt(*PROMPTS[name]())
    for images in (0, 2):  # replayed from its ledger, or from an image
        for steps in (2, 6):  # inside the prompt, and in the answer
            driver = SeeingDriver(backend, lanes=1, images=images, prefill_chunk=20)
            turn = driver.submit(ids, media=media, max_tokens=TOKENS, ignore_eos=True)
            for _ in range(steps):
                driver.engine.step()
            driver.engine.execute(Preempt(turn))
            driver.steps()
            assert driver.finished(turn).token_ids == undisturbed(name), (images, steps)


# ------------------------------------------------------------------------------------------------ drafts


@functools.cache
def exact() -> Any:
    """transformers' model in FP64."""
    return copy.deepcopy(theirs()).double()


def oracle_of(backend: str) -> Oracle:
    models = seeing_models()
    tables = Tables(models.target.embedding, models.target.head, torch.arange(VOCABULARY))
    drafter = seeing_models(backend).drafter  # pyright: ignore[reportArgumentType]
    assert drafter is not None
    return Oracle(Setup(drafter, draft_weights(backend), tables, draft_settings(backend)), causal=False)


@functools.cache
def their_rounds(backend: str, name: str) -> tuple[int, ...]:
    """Accepted drafts, round by round, of an FP64 drafter that goes by transformers' residuals in FP64 and by scalar
    positions."""
    ids, items = PROMPTS[name]()
    answer = undisturbed(name)
    whole = torch.cat((ids, torch.tensor(answer)))
    inputs = {name: x.double() if x.is_floating_point() else x for name, x in their_inputs(whole, items).items()}
    _, residuals = residuals_and_logits(exact(), inputs)
    features = torch.cat([residuals.chunk(4, dim=-1)[tap] for tap in TAPS], dim=-1)
    oracle, rounds, published = oracle_of(backend), [], 1
    while published < len(answer):
        frontier, anchor = len(ids) + published - 1, answer[published - 1]
        extent = min(DRAFT_TOKENS, len(answer) - published - 1)
        drafts = oracle_drafts(oracle, backend, features[:frontier], anchor, extent)
        accepted = 0
        while accepted < extent and drafts[accepted] == answer[published + accepted]:
            accepted += 1
        rounds.append(accepted)
        published += accepted + 1
    return tuple(rounds)


def oracle_drafts(oracle: Oracle, backend: str, features: torch.Tensor, anchor: int, extent: int) -> list[int]:
    if backend == "dflash":
        if extent == 0:
            return []
        scores = oracle.scores(oracle.hidden(features, anchor, extent + 1))
        best = scores.sort(dim=-1, descending=True)
        assert float((best.values[:, 0] - best.values[:, 1]).min()) > 1e-4, "a near tie"
        return best.indices[:, 0].tolist()
    hidden = oracle.hidden(features, anchor, DRAFT_TOKENS + 1)
    order = oracle.scores(hidden).sort(dim=-1, descending=True)
    selector = "candidate_selector"
    path, _, margin = oracles.walk(
        order.indices[:, :TOP],
        order.values[:, :TOP],
        hidden @ oracle.weights[f"{selector}.hidden_projection.weight"].T,
        oracle.weights[f"{selector}.predecessor_codebook"],
        oracle.weights[f"{selector}.successor_codebook"],
        anchor,
        0.0,
        [0.0] * DRAFT_TOKENS,
    )
    assert margin > 1e-4, "a near tie"
    return path


DRAFTED = ("several images of odd sizes", "a video of odd length", "an image over a page's edge")


@pytest.mark.parametrize("name", DRAFTED)
@pytest.mark.parametrize("backend", ["dflash", "dflash2"])
def test_drafted_turns_with_media_say_the_same_and_accept_what_an_fp64_drafter_would(
    backend: Backend, name: str
) -> None:
    finished = run(SeeingDriver(backend, lanes=1, images=0, prefill_chunk=13), name)
    assert finished.token_ids == undisturbed(name)
    assert finished.rounds == their_rounds(backend, name)


@pytest.mark.parametrize("backend", ["dflash", "dflash2"])
def test_drafts_behind_media_are_accepted_now_and_then(backend: str) -> None:
    """Else what they are made of would not show in rounds."""
    rounds = [accepted for name in DRAFTED for accepted in their_rounds(backend, name)]
    assert sum(rounds) >= 7 and max(rounds) > 1 and rounds.count(0) >= 7


def test_sampled_turns_with_media_are_those_of_the_seed_with_and_without_drafts() -> None:
    sampling = Sampling(temperature=1.0, seed=5)
    plain, drafted = (
        run(SeeingDriver(backend, lanes=1, images=0), "one image", sampling=sampling) for backend in ("none", "dflash")
    )
    assert plain.token_ids == drafted.token_ids != undisturbed("one image")


# ------------------------------------------------------------------------------------------------ refusals


def changed(media: Placed, **facts: object) -> Placed:
    return (replace(media[0], media=replace(media[0].media, **facts)), *media[1:])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda media: (PlacedMedia(media[0].media, (4,)),),
            r"media\[0\] stands at 4, but token 4 is id 62",
        ),
        (lambda media: (PlacedMedia(media[0].media, (90,)),), r"media\[0\] stands at 90, but token 90 is the end"),
        (lambda media: (*media, *media), r"media\[1\].starts has 5, must be 25 or later"),
        (lambda media: (PlacedMedia(media[0].media, ()),), r"media\[0\].starts has 0 entries, must have 1 to 1"),
        (lambda media: changed(media, kind="video", times=(0.5,)), r"but token 5 is id 60, must be the video's 61"),
        (lambda media: changed(media, kind="sound"), r"media\[0\].kind is 'sound', must be image or video"),
        (lambda media: changed(media, rows=5), r"media\[0\].shape is \[1, 3, 32, 40\], must be \[n, 3, 40, 40\]"),
        (
            lambda media: changed(media, times=(1.0,)),
            r"media\[0\] has 1 frames of pixels, which is no image",
        ),
        (lambda media: changed(media, pixels=b"12"), r"media\[0\].pixels has 2 bytes, must have 3840 for its shape"),
    ],
)
def test_media_that_do_not_fit_their_prompt_or_the_model_are_refused_by_name(change, sentence: str) -> None:
    ids, media = shown(words(4), image(32, 40), words(3))
    driver = SeeingDriver(lanes=1, images=0)
    cut = driver.submit(ids[:20], media=media)
    assert driver.failed(cut).message == "media[0] ends at 25, but the prompt at 20"
    turn = driver.submit(ids, media=change(media))
    failed = driver.of(turn)[-1]
    assert isinstance(failed, Failed) and (failed.code, failed.param) == ("invalid_request", "media")
    assert re.search(sentence, failed.message), failed.message


def test_a_model_without_a_tower_refuses_media_and_takes_placeholders_as_text() -> None:
    _, media = shown(words(4), image(32, 40))
    driver = TinyDriver(lanes=1, images=0)
    turn = driver.submit((1, 2, 3), media=media)
    assert driver.failed(turn).message == "media holds 1 items, but the model has no vision tower"
    seeing = SeeingDriver(lanes=1, images=0)
    assert len(seeing.run((1, START, IMAGE, IMAGE, 2), max_tokens=3, ignore_eos=True).token_ids) == 3


def test_media_pass_the_engines_pipe() -> None:
    ids, media = shown(words(4), image(32, 40), words(3), video(5, 16, 24))
    submit = Submit("t", ids, media=media)
    assert decode(encode(submit)) == submit
