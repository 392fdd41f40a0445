"""The whole line against golden data made elsewhere: tokens and accepted drafts, round by round, in FP32."""

from __future__ import annotations

import pytest

from deployment.engine.messages import Finished
from tests.engine.driving import Driver, golden, prompt

NEAR_TIE = 1e-3
CONFIGURATIONS = [("none", None, None), ("dflash", 15, "v1_k15"), ("dflash", 7, "v1_k7"), ("dflash2", 7, "v2_k7")]


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


@pytest.fixture(scope="module", params=CONFIGURATIONS, ids=[f"{b}-{k}" for b, k, _ in CONFIGURATIONS])
def configured(request: pytest.FixtureRequest) -> tuple[list[Finished], str | None]:
    """All golden turns, six at a time. Their last round has all of its drafts, too: the budget shortens none."""
    backend, draft_tokens, key = request.param
    driver = Driver(backend, draft_tokens, lanes=6, images=0)
    tokens = len(golden()[0]["greedy"]) + (draft_tokens or 0)
    turns = [driver.submit(prompt(index), max_tokens=tokens, ignore_eos=True) for index in range(12)]
    driver.steps()
    return [driver.finished(turn) for turn in turns], key


@pytest.mark.parametrize("index", range(12))
def test_greedy_tokens_and_accepted_counts_are_the_golden_ones(configured, index):
    turns, key = configured
    case, finished = golden()[index], turns[index]
    tokens = compared_tokens(case["gaps"])
    assert list(finished.token_ids[:tokens]) == case["greedy"][:tokens]
    if key is None:
        assert set(finished.rounds) == {0}
        return
    # the golden rounds are those until 96 tokens exist, so the last one may reach beyond the compared positions
    limit = tokens if tokens < len(case["gaps"]) else len(case["gaps"]) + 16
    rounds = compared_rounds(case["accepted"][key], limit)
    assert rounds and list(finished.rounds[: len(rounds)]) == rounds
