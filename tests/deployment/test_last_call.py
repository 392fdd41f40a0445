"""An ingress that is being replaced lets its streams run on for a while, and then says where they go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from deployment import last_call
from deployment.last_call import Departing, LastCall
from deployment.wire import Delta, Told


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_call, "ASK_SECONDS", 0.01)


async def three(pause: float, ended: list[str]) -> AsyncGenerator[Told, None]:
    try:
        for number in range(3):
            await asyncio.sleep(pause)
            yield Told(str(number), Delta("", "x"))
    finally:
        ended.append("closed")


def heard(grace: float, pause: float, stopping: bool, ended: list[str]) -> list[str]:
    async def collect() -> list[Told | Departing]:
        async def is_stopping() -> bool:
            return stopping

        return [told async for told in LastCall(is_stopping, grace).bounded(three(pause, ended))]

    return [told.id if isinstance(told, Told) else "departing" for told in asyncio.run(collect())]


def test_streams_of_an_ingress_that_stays_are_as_they_come():
    ended: list[str] = []
    assert heard(0.0, 0.02, False, ended) == ["0", "1", "2"] and ended == ["closed"]


def test_a_stream_that_ends_within_the_grace_hears_nothing_of_the_last_call():
    assert heard(5.0, 0.01, True, []) == ["0", "1", "2"]


def test_a_stream_that_goes_on_ends_with_the_departure_and_its_source_is_closed():
    ended: list[str] = []
    assert heard(0.3, 0.2, True, ended) == ["0", "departing"] and ended == ["closed"]


def test_nobody_is_asked_while_no_stream_is_open():
    asked: list[int] = []

    async def is_stopping() -> bool:
        asked.append(1)
        return False

    async def run() -> int:
        async for _ in LastCall(is_stopping, 1.0).bounded(three(0.0, [])):
            pass
        await asyncio.sleep(0.03)
        so_far = len(asked)
        await asyncio.sleep(0.1)
        return len(asked) - so_far

    assert asyncio.run(run()) == 0
