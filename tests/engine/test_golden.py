"""The whole line against golden data made elsewhere: tokens and accepted drafts, round by round, in FP32."""

from __future__ import annotations

import pytest

from deployment.engine.events import Finished
from tests.engine.driving import Driver, golden, prompt

NEAR_TIE = 1e-3
CONFIGURATIONS = [("none", None, None), ("dflash", 15, "v1_k15"), ("dflash", 7, "v1_k7"), ("dflash2", 7, "v2_k7")]
HALVES = [range(6), range(6, 12)]
LATER = [("v1_k15", HALVES[1]), ("v1_k7", HALVES[0])]
"""Each prompt once with DFlash is what CI has time for."""
CASES = [
    pytest.param(
        *(backend, draft_tokens, key, prompts),
        marks=[pytest.mark.soak] if (key, prompts) in LATER else [],
        id=f"{backend}-{draft_tokens}-from-{prompts.start}",
    )
    for backend, draft_tokens, key in CONFIGURATIONS
    for prompts in HALVES
]


def compared_tokens(gaps: list[float]) -> int:
    """Positions before the first near tie, where implementations may rightly differ."""
    return next((i for i, gap in enumerate(gaps) if gap < NEAR_TIE), len(gaps))


def compared_rounds(accepted: list[int], tokens: int) -> list[int]:
    """The golden rounds that end before position `tokens`; the prefill's token is position 0."""
    rounds, end = [], 1
    for count in accepted:
        end += count + 1
        if end > tokens:
            break
        rounds.append(count)
    return rounds


def generated(backend: str, draft_tokens: int | None, prompts: range) -> list[Finished]:
    """Golden turns, all at a time. Their last round has all of its drafts, too: the budget shortens none."""
    driver = Driver(backend, draft_tokens, lanes=len(prompts), images=0)
    tokens = len(golden()[0]["greedy"]) + (draft_tokens or 0)
    turns = [driver.submit(prompt(index), max_tokens=tokens, ignore_eos=True) for index in prompts]
    driver.steps()
    return [driver.finished(turn) for turn in turns]


@pytest.mark.parametrize("backend, draft_tokens, key, prompts", CASES)
def test_greedy_tokens_and_accepted_counts_are_the_golden_ones(backend, draft_tokens, key, prompts):
    for index, finished in zip(prompts, generated(backend, draft_tokens, prompts), strict=True):
        check(finished, index, key)


def check(finished: Finished, index: int, key: str | None) -> None:
    case = golden()[index]
    tokens = compared_tokens(case["gaps"])
    assert list(finished.token_ids[:tokens]) == case["greedy"][:tokens], f"prompt {index}"
    if key is None:
        assert set(finished.rounds) == {0}, f"prompt {index}"
        return
    # the golden rounds are those until 96 tokens exist, so the last one may reach beyond the compared positions
    limit = tokens if tokens < len(case["gaps"]) else len(case["gaps"]) + 16
    rounds = compared_rounds(case["accepted"][key], limit)
    assert rounds and list(finished.rounds[: len(rounds)]) == rounds, f"prompt {index}"
