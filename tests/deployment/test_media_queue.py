"""Whose media are decoded next, and who is told to come again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from deployment.errors import RequestError
from deployment.media_queue import MOST_BYTES, MOST_REQUESTS, MediaQueue

PLACES = 2


class Work:
    """Functions that wait until they are let go, and the order in which they began."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.go = threading.Event()

    def of(self, name: str) -> str:
        self.began.append(name)
        assert self.go.wait(10)
        return name

    async def begins(self, count: int) -> None:
        while len(self.began) < count:
            await asyncio.sleep(0.001)


def run(scenario: Callable[[MediaQueue, Work], Awaitable[None]]) -> None:
    async def within() -> None:
        work = Work()
        with ThreadPoolExecutor(2 * PLACES) as threads:  # more than may be at work
            async with asyncio.timeout(20):
                try:
                    await scenario(MediaQueue(threads, PLACES), work)
                finally:
                    work.go.set()

    asyncio.run(within())


def test_tenants_take_turns_however_much_one_of_them_asks_for():
    async def scenario(queue: MediaQueue, work: Work) -> None:
        many = [asyncio.create_task(queue.run("a", 1, work.of, f"a{i}")) for i in range(20)]
        await work.begins(PLACES)
        one = [asyncio.create_task(queue.run(tenant, 1, work.of, tenant)) for tenant in ("b", "c")]
        await asyncio.sleep(0)
        work.go.set()
        assert await asyncio.gather(*many) == [f"a{i}" for i in range(20)]
        await asyncio.gather(*one)
        assert max(work.began.index("b"), work.began.index("c")) < PLACES + 5

    run(scenario)


def test_a_tenant_may_have_half_of_what_waits_and_all_together_have_an_end():
    async def scenario(queue: MediaQueue, work: Work) -> None:
        async def filled(tenant: str) -> RequestError:
            while True:
                one = asyncio.create_task(queue.run(tenant, 1, work.of, tenant))
                done, _ = await asyncio.wait({one}, timeout=0.001)
                if done:
                    error = one.exception()
                    assert isinstance(error, RequestError)
                    return error
                waiting.append(one)

        waiting: list[asyncio.Task[str]] = []
        first = (await filled("a")).refused
        assert len(waiting) == MOST_REQUESTS // 2
        assert (first.status, first.code, first.param) == (429, "overloaded", "messages")
        await filled("b")
        third = (await filled("c")).refused
        assert len(waiting) == MOST_REQUESTS and (third.status, third.param) == (429, None)
        work.go.set()
        await asyncio.gather(*waiting)
        assert await queue.run("c", 1, work.of, "c") == "c", "there is room again"

    run(scenario)


def test_bytes_that_wait_have_an_end_too_and_one_request_alone_is_always_taken():
    async def scenario(queue: MediaQueue, work: Work) -> None:
        one = asyncio.create_task(queue.run("a", MOST_BYTES, work.of, "a"))
        await work.begins(1)
        for tenant in ("a", "b"):
            with pytest.raises(RequestError) as told:
                await queue.run(tenant, 1, work.of, tenant)
            assert told.value.refused.status == 429
        work.go.set()
        assert await one == "a"

    run(scenario)


def test_who_leaves_gives_back_a_place_only_when_its_thread_is_free():
    async def scenario(queue: MediaQueue, work: Work) -> None:
        running = [asyncio.create_task(queue.run("a", 1, work.of, f"a{i}")) for i in range(PLACES)]
        await work.begins(PLACES)
        waiting = [asyncio.create_task(queue.run("a", 1, work.of, f"w{i}")) for i in range(3)]
        await asyncio.sleep(0.01)
        for one in (*running, waiting[0]):
            one.cancel()
        await asyncio.wait({*running, waiting[0]})
        await asyncio.sleep(0.02)
        assert len(work.began) == PLACES, "both threads are still at work"
        work.go.set()
        assert await asyncio.gather(*waiting[1:]) == ["w1", "w2"]
        assert await asyncio.gather(*(queue.run("b", 1, work.of, "b") for _ in range(5))) == ["b"] * 5
        assert "w0" not in work.began

    run(scenario)


def test_a_fault_of_the_work_is_told_and_frees_its_place():
    def fail() -> None:
        raise ValueError("broken")

    async def scenario(queue: MediaQueue, work: Work) -> None:
        work.go.set()
        for _ in range(PLACES + 1):
            with pytest.raises(ValueError, match="broken"):
                await queue.run("a", 1, fail)
        assert await queue.run("a", 1, work.of, "a") == "a"

    run(scenario)
