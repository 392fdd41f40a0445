"""What a request does not say comes from the model's `generation_config.json` (decision 12), whoever asks how."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from deployment.engine.service import EngineService
from model.generation_defaults import GenerationDefaults
from tests.deployment.serving import serving
from tests.engine.driving import models, options

GIVEN: Any = {"min_p": 0.4, "repetition_penalty": 1.5, "presence_penalty": 1.25, "frequency_penalty": 0.75}
NEUTRAL = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
SEEDED: Any = {
    "messages": [{"role": "user", "content": "Count from 3 in steps of 2, 12 numbers."}],
    "seed": 5, "temperature": 2.0, "max_tokens": 48, "ignore_eos": True,
}  # fmt: skip
"""An answer that repeats itself, and says much that is unlikely."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    loaded = models("dflash2")
    eos_ids = loaded.defaults.eos_ids
    service = EngineService(
        replace(loaded, defaults=GenerationDefaults(eos_ids=eos_ids, **GIVEN)), options("dflash2", lanes=4, images=16)
    )
    with serving(service) as url:
        yield url
    service.close()


def said(url: str, **controls: float) -> str:
    answer = httpx.post(f"{url}/v1/chat/completions", json={**SEEDED, **controls}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("name", GIVEN)
def test_a_control_that_is_not_given_is_the_models_and_one_that_is_given_counts(url: str, name: str):
    others = {other: value for other, value in NEUTRAL.items() if other != name}
    unset = said(url, **others)
    assert unset == said(url, **others, **{name: GIVEN[name]})
    assert unset != said(url, **NEUTRAL), "this control changes nothing about this answer"


def test_a_response_says_which_penalties_it_was_made_with(url: str):
    asked = {"model": "demo", "input": "One day", "max_output_tokens": 4, "store": False}
    answer = httpx.post(f"{url}/v1/responses", json=asked, timeout=60).json()
    assert (answer["presence_penalty"], answer["frequency_penalty"]) == (1.25, 0.75)
