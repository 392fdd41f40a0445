"""A stuck engine is seen, a busy or idle one is left alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from deployment import engine_health
from deployment.engine.commands import Submit
from deployment.engine.errors import EngineError
from deployment.engine.events import Finished
from deployment.engine.service import EngineService
from deployment.engine_health import EngineHealth, EngineStuck
from tests.engine.driving import models, options, prompt

PATIENCE = 30.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def running() -> Iterator[tuple[EngineService, Any]]:
    """A real engine on its thread, and the engine itself."""
    service = EngineService(models("dflash2"), options("dflash2", lanes=1, images=0))
    try:
        yield service, service._runner._engine  # pyright: ignore
    finally:
        service.close()


async def busy(service: EngineService, tokens: int = 3000) -> list[Any]:
    submit = Submit("t", prompt(0), max_tokens=tokens, ignore_eos=True)
    return [event async for event in service.turn(submit)]


def test_an_engine_whose_step_does_not_end_is_stuck_and_is_well_again_when_it_does(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_health, "ANSWER_SECONDS", 0.05)

    async def steps() -> None:
        with running() as (service, engine):
            clock, entered, leave = Clock(), threading.Event(), threading.Event()
            run = engine._executor.run

            def stalled(lanes: Any, meanwhile: Any) -> Any:
                entered.set()
                leave.wait(20)
                return run(lanes, meanwhile)

            engine._executor.run = stalled
            health = EngineHealth(service, PATIENCE, clock)
            turn = asyncio.create_task(busy(service, 8))
            await asyncio.to_thread(entered.wait, 20)
            await health.check()
            clock.now += PATIENCE - 1
            await health.check()
            clock.now += 2
            with pytest.raises(EngineStuck, match=r"not answered for 31 s.*stuck_seconds is 30"):
                await health.check()
            leave.set()
            assert isinstance((await turn)[-1], Finished)
            await health.check()

    asyncio.run(steps())


def test_an_engine_that_steps_and_does_nothing_of_its_work_is_stuck():
    async def steps() -> None:
        with running() as (service, engine):
            clock = Clock()
            health = EngineHealth(service, PATIENCE, clock)
            engine._step = lambda: None
            turn = asyncio.create_task(busy(service))
            await asyncio.sleep(0)
            await health.check()
            clock.now += PATIENCE + 1
            with pytest.raises(EngineStuck, match="has 0 turns in lanes and 1 that wait, and has finished nothing"):
                await health.check()
            turn.cancel()

    asyncio.run(steps())


def test_an_engine_that_works_or_has_nothing_to_do_is_well_however_long():
    async def steps() -> None:
        with running() as (service, _):
            clock = Clock()
            health = EngineHealth(service, PATIENCE, clock)
            await health.check()
            clock.now += 10 * PATIENCE
            await health.check()
            turn = asyncio.create_task(busy(service))
            for _ in range(3):
                while (await health._facts()).work == health._work:
                    await asyncio.sleep(0.01)
                clock.now += PATIENCE + 1
                await health.check()
            turn.cancel()

    asyncio.run(steps())


def test_an_engine_that_has_ended_says_so():
    async def steps() -> None:
        with running() as (service, _):
            health = EngineHealth(service, PATIENCE)
            await asyncio.to_thread(service.close)
            with pytest.raises(EngineError, match="the engine has ended: it was closed"):
                await health.check()

    asyncio.run(steps())
