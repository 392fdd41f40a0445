"""A device that was lost: every call of it fails from then on, so that its engine ends instead of its turns."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from deployment.engine import errors
from deployment.engine.commands import Export, Preempt, Submit
from deployment.engine.errors import EngineError
from deployment.engine.events import Failed, Finished
from deployment.engine.lost_device import device_is_lost
from deployment.engine.runners import ThreadRunner
from deployment.engine.service import EngineService
from deployment.engine_health import EngineHealth
from tests.engine.driving import Driver, models, options, prompt

CPU, CARD = torch.device("cpu"), torch.device("cuda")
LOST = torch.AcceleratorError("CUDA error: device-side assert triggered")
SHORT_OF_MEMORY = [torch.OutOfMemoryError("no memory"), torch.AcceleratorError("CUDA error: out of memory")]


def raising(error: Exception) -> Any:
    def raises(*_: Any, **__: Any) -> Any:
        raise error

    return raises


def decoding() -> Driver:
    driver = Driver("dflash2", images=4)
    driver.run(prompt(1), session="s", max_tokens=4, ignore_eos=True)
    driver.submit(prompt(0), turn="running", max_tokens=20, ignore_eos=True)
    while not driver.streamed("running"):
        driver.engine.step()
    return driver


PLACES = {
    "a round": ("_executor.run", lambda driver: driver.engine.step()),
    "a commit": ("_executor.commit", lambda driver: driver.engine.step()),
    "a prefill": ("_executor.prefill", lambda driver: (driver.submit(prompt(2)), driver.engine.step())),
    "an admission": ("memory.open", lambda driver: (driver.submit(prompt(2)), driver.engine.step())),
    "a lane that is caught up": ("_executor.catch_up", lambda driver: driver.engine.execute(Preempt("running"))),
    "a command": ("_exchange.export", lambda driver: driver.engine.execute(Export("e", "s"))),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_lost_device_leaves_the_engine_wherever_it_is_noticed(place, monkeypatch):
    driver, (name, work) = decoding(), PLACES[place]
    owner, _, method = name.rpartition(".")
    target = getattr(driver.engine, owner)
    monkeypatch.setattr(target, method, raising(LOST))
    with pytest.raises(torch.AcceleratorError, match="device-side assert"):
        work(driver)


@pytest.mark.parametrize("error", SHORT_OF_MEMORY, ids=["torch's allocator", "the driver"])
def test_an_engine_that_is_short_of_memory_lives_on(error, monkeypatch):
    driver = decoding()
    with monkeypatch.context() as patch:
        patch.setattr(driver.engine._executor, "run", raising(error))
        driver.steps()
    assert driver.failed("running").code == errors.INTERNAL_ERROR
    assert len(driver.run(prompt(0), max_tokens=5, ignore_eos=True).token_ids) == 5


def test_a_card_is_asked_where_an_error_does_not_say_whether_it_is_lost(monkeypatch):
    unclear = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    assert not device_is_lost(unclear, CPU)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert not device_is_lost(unclear, CARD)
    monkeypatch.setattr(torch.cuda, "synchronize", raising(LOST))
    assert device_is_lost(unclear, CARD)
    assert not any(device_is_lost(error, CARD) for error in SHORT_OF_MEMORY)


def test_an_engine_that_is_at_its_end_says_so_to_every_turn_also_to_those_that_wait_for_a_lane():
    driver = decoding()
    for name in ("waits", "waits too"):
        driver.submit(prompt(2), turn=name, max_tokens=3)
    driver.engine.abandon("lost")
    assert {driver.failed(turn).message for turn in ("running", "waits", "waits too")} == {"lost"}
    assert driver.failed("running").committed is not None


def test_nobody_waits_for_what_a_lost_engine_still_writes(monkeypatch):
    """New turns and calls hear of its end at once, while the durable tier takes what waits for it."""
    service = EngineService(models("dflash2"), options("dflash2", lanes=1, images=0))
    runner, written, draining = service._runner, threading.Event(), threading.Event()
    assert isinstance(runner, ThreadRunner)

    def drained() -> None:
        draining.set()
        assert written.wait(60)

    monkeypatch.setattr(runner._durability, "close", drained)
    monkeypatch.setattr(runner._engine._executor, "run", raising(LOST))

    async def scenario() -> tuple[list[Any], bool]:
        turn = Submit("t", prompt(0), max_tokens=3, ignore_eos=True)
        lost = [event async for event in service.turn(turn)]
        assert await asyncio.to_thread(draining.wait, 60)
        later = [event async for event in service.turn(replace(turn, turn="later"))]
        with pytest.raises(EngineError, match="the engine has ended: CUDA error: device-side assert"):
            await EngineHealth(service, 30.0).check()
        return [lost[-1], later[-1]], written.is_set()

    try:
        ends, waited = asyncio.run(asyncio.wait_for(scenario(), 60))
    finally:
        written.set()
    assert not waited and all(isinstance(end, Failed) and "device-side assert" in end.message for end in ends)
    service.close()
    with pytest.raises(EngineError, match="the engine has ended"):
        asyncio.run(EngineHealth(service, 30.0).check())


def test_a_replica_whose_engine_has_lost_its_device_is_not_healthy(monkeypatch):
    service = EngineService(models("dflash2"), options("dflash2", lanes=1, images=0))

    async def scenario() -> list[Any]:
        health = EngineHealth(service, 30.0)
        turn = Submit("t", prompt(0), max_tokens=3, ignore_eos=True)
        before = [event async for event in service.turn(turn)]
        await health.check()
        engine = service._runner._engine  # pyright: ignore[reportAttributeAccessIssue]
        monkeypatch.setattr(engine._executor, "run", raising(LOST))
        after = [event async for event in service.turn(turn)]
        with pytest.raises(EngineError, match="the engine has ended: CUDA error: device-side assert"):
            await health.check()
        return [before[-1], after[-1]]

    before, after = asyncio.run(scenario())
    service.close()
    assert isinstance(before, Finished)
    assert isinstance(after, Failed) and "the engine has ended: CUDA error" in after.message
    assert after.committed is not None and len(after.committed.token_ids) == 1
