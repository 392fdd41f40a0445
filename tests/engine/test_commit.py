"""A commit adopts what the preview kept, and nothing where it kept nothing."""

from __future__ import annotations

import pytest
import torch

from deployment.engine.lane import Lane
from state.geometry import PAGE_TOKENS, pages_for
from tests.engine.driving import Driver, alone, prompt, seeded


@pytest.mark.parametrize("backend", ["none", "dflash", "dflash2"])
def test_a_lane_of_which_a_round_keeps_nothing_is_bit_by_bit_what_it_was(backend):
    """N = 0: neither its image and pages nor its draft context change, and its next round is the one that it would have
    had; the lane beside it goes on as ever."""
    sampling = seeded(3)
    undisturbed = [alone(prompt(i)[-30:], 40, sampling, backend).token_ids for i in (0, 1)]
    driver = Driver(backend, lanes=2, images=0)
    turns = [driver.submit(prompt(i)[-30:], sampling=sampling, max_tokens=40, ignore_eos=True) for i in (0, 1)]
    while len(driver.started_events(turns[1])) == 0:
        driver.engine.step()
    first, second = driver.engine._lanes
    executor = driver.engine._executor
    executor.catch_up([first, second])
    before, frontier = planes_of(driver, first), first.frontier
    done = executor.run([first, second])
    kept = done.licensed[1][:1]
    executor.commit(done, [0, len(kept)])
    second.ledger += kept
    second.published += kept
    executor.catch_up([first, second])
    assert first.frontier == frontier == first.memory.context_frontier and not first.pending
    assert all(torch.equal(old, new) for old, new in zip(before, planes_of(driver, first), strict=True))
    driver.steps()
    assert driver.finished(turns[0]).token_ids == undisturbed[0]
    if backend != "dflash2":  # whose tokens depend on where its rounds begin
        assert driver.finished(turns[1]).token_ids == undisturbed[1]


def planes_of(driver: Driver, lane: Lane) -> list[torch.Tensor]:
    """Copies of all that a lane's state consists of, up to its frontier."""
    memory, images = driver.engine.memory, driver.engine.memory.images
    planes = [images.gdn, images.conv, images.hidden, images.rings.keys, images.rings.values]
    state = [plane[lane.memory.slot].clone() for plane in planes]
    last = lane.frontier % PAGE_TOKENS or PAGE_TOKENS
    for pool, pages in ((memory.target, lane.memory.pages), (memory.draft, lane.memory.draft_pages)):
        held = pages[: pages_for(lane.frontier)]
        for plane in (pool.keys, pool.values) if pool else ():
            state += [plane[held[:-1]].clone(), plane[held[-1], :, :last].clone()]
    return state
