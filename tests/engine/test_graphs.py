"""Captured rounds on a card: what a graph replays is what the segment does, bit for bit. Run with `-m gpu`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deployment.engine.commands import Export, Submit
from deployment.engine.events import Exported
from state.document import open_document
from tests.engine.driving import Driver, prompt, seeded

pytestmark = pytest.mark.gpu

LANES = 32
"""More than have a row each: from 17 on there are rounds with padding."""
BACKENDS = [("none", None), ("dflash", 15), ("dflash2", 7)]


def ramp(count: int) -> list[Submit]:
    """Turns that end after different numbers of rounds, greedy and drawn, some with controls of their own."""
    ways = [
        {"sampling": seeded(3, temperature=0.0)},
        {"sampling": seeded(5)},
        {"sampling": seeded(7, reproducible=True, logprobs=3)},
        {
            "sampling": seeded(9, repetition_penalty=1.2, min_tokens=6, logprobs=2, logprobs_mode="processed_logprobs"),
            "stop_ids": (11, 12, 13),
        },
    ]
    return [
        Submit(
            f"turn-{i}",
            prompt(i % 12)[-(20 + 5 * i) :],
            max_tokens=4 * LANES + 5 * (i % 7),
            ignore_eos=True,
            session=f"s{i}",
            **ways[i % len(ways)],  # pyright: ignore[reportArgumentType]
        )
        for i in range(count)
    ]


def lived(capture: str, backend: str, draft_tokens: int | None, poison: bool = False) -> dict[str, Any]:
    """Each turn's tokens and the digests of its session's state, of turns that join a step apart and leave as they end.
    No clock decides how prompts are cut."""
    sizes = {"lanes": LANES, "images": 60, "context": 512, "max_stall_ms": 1e6}
    driver = Driver(backend, draft_tokens, device="cuda", dtype="bfloat16", capture=capture, **sizes)
    if poison:
        images = driver.engine.memory.images
        for plane in (images.gdn, images.conv, images.hidden, images.rings.keys, images.rings.values):
            plane[images.dead] = float("nan")
        driver.engine._executor._buffers.pending[LANES] = float("nan")
    submits, together = ramp(LANES + 12), set[int]()
    for submit in submits:
        driver.engine.execute(submit)
        driver.engine.step()
        together.add(len(driver.engine._lanes))
    assert together == set(range(1, LANES + 1))
    driver.steps()
    graphs = driver.engine._executor._graphs
    assert (graphs is None) == (capture == "never") and (graphs is None or graphs.count > 0)
    return {submit.turn: (driver.finished(submit.turn).token_ids, state_of(driver, submit)) for submit in submits}


def state_of(driver: Driver, submit: Submit) -> list[tuple[int, list[str]]]:
    """Frontier and digests of every checkpoint that a turn's session has."""
    assert submit.session is not None
    answer = driver.call(Export("e", submit.session))
    assert isinstance(answer, Exported), answer
    manifest = open_document(answer.document).manifest
    digests = [segment.sha256.hex() for segment in manifest.segments]
    return [(entry.frontier, [digests[index] for index in entry.segments]) for entry in manifest.checkpoints]


@pytest.mark.parametrize("backend, draft_tokens", BACKENDS)
def test_replayed_rounds_leave_the_tokens_and_the_state_of_eager_ones_bit_for_bit(backend, draft_tokens):
    """One lane after the other joins, up to 32 of them, and they leave as they end; in one of the runs padding is full
    of NaN."""
    eager = lived("never", backend, draft_tokens)
    assert lived("start", backend, draft_tokens, poison=True) == eager
    assert lived("lazily", backend, draft_tokens) == eager


def test_what_is_captured_at_the_start_is_all_that_ordinary_rounds_need():
    driver = Driver("dflash2", 7, device="cuda", dtype="bfloat16", lanes=4, images=4, context=512)
    graphs = driver.engine._executor._graphs
    assert graphs is not None
    before = graphs.count
    for i in range(4):
        sampling = seeded(i) if i % 2 else seeded(i, temperature=0.0)
        driver.submit(prompt(i)[-40:], max_tokens=33, ignore_eos=True, sampling=sampling)
    for _ in range(6):
        driver.engine.step()
    assert graphs.count == before and None not in graphs._captured.values()


def test_a_round_asks_the_card_for_nothing_but_its_verdict():
    """What would wait for the card raises while rounds of one kind run, but for the copy at their end."""
    driver = Driver("dflash2", 7, device="cuda", dtype="bfloat16", lanes=2, images=2, context=512)
    for i in range(2):
        driver.submit(prompt(i)[-40:], max_tokens=60, ignore_eos=True, sampling=seeded(i))
    for _ in range(4):
        driver.engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            driver.engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
