"""A tenant that has reached a limit of its own is told so before the first byte, and nobody else is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from tests.deployment.serving import serving

LONG: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Count from 3 in steps of 2, 12 numbers."}],
    "temperature": 0, "max_tokens": 2000, "ignore_eos": True, "stream": True,
}  # fmt: skip
SHORT: dict[str, Any] = {**LONG, "max_tokens": 4}


def keyed(url: str, name: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=60, headers={"authorization": f"Bearer {name}"})


@contextlib.asynccontextmanager
async def asked(client: httpx.AsyncClient, body: Any) -> AsyncIterator[asyncio.Task[httpx.Response]]:
    """A turn that waits or runs meanwhile, and is left at the end."""
    task = asyncio.create_task(client.post("/v1/chat/completions", json=body))
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, httpx.HTTPError):
            await task


@contextlib.asynccontextmanager
async def running(client: httpx.AsyncClient) -> AsyncIterator[None]:
    await until(client, lanes_running=1)
    yield


async def until(client: httpx.AsyncClient, **facts: int) -> None:
    """The engine says so of itself."""
    async with asyncio.timeout(20):
        while True:
            engine = (await client.get("/v1/replicas")).json()["data"][0]["engine"]
            if all(engine[name] == value for name, value in facts.items()):
                return
            await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(lanes=1, tenant_queued_tokens=20, preempt_seconds=None, kept=1000) as url:
        yield url


def test_queued_tokens_beyond_a_tenants_limit_are_a_429_by_name_and_others_are_served(url: str):
    async def scenario() -> None:
        async with keyed(url, "alice") as alice, keyed(url, "bob") as bob:
            async with asked(alice, LONG), running(bob), asked(alice, SHORT):
                await until(bob, lanes_running=1, turns_queued=1)
                message = {name: value for name, value in SHORT.items() if name != "ignore_eos"} | {"model": "demo"}
                for route, body in (("/v1/chat/completions", SHORT), ("/v1/messages", message)):
                    refused = await alice.post(route, json=body)
                    error = refused.json()["error"]
                    assert (refused.status_code, error["type"]) == (429, "rate_limit_error"), refused.text
                    assert "tenant_queued_tokens" in error["message"] and float(refused.headers["retry-after"]) >= 1
                answer = asyncio.create_task(bob.post("/v1/chat/completions", json=SHORT))
                await until(bob, lanes_running=1, turns_queued=2)
            served = await answer
            assert served.status_code == 200 and "[DONE]" in served.text

    asyncio.run(scenario())


def test_bytes_beyond_a_tenants_limit_are_a_429_for_whatever_would_make_them_more(url: str):
    with httpx.Client(base_url=url, timeout=60) as client:
        for path, body, headers in (
            ("/v1/chat/completions", SHORT, {"x-session-id": "one"}),
            ("/v1/responses", {"input": "Hello", "max_output_tokens": 4}, {}),
            ("/v1/sessions", {"id": "one"}, {}),
        ):
            refused = client.post(path, json=body, headers=headers)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"], error["param"]) == (429, "overloaded", "session"), refused.text
            assert "tenant_state_bytes" in error["message"] and float(refused.headers["retry-after"]) >= 1
        assert client.post("/v1/chat/completions", json=SHORT).status_code == 200, "without a session nothing is kept"
        assert client.get("/v1/sessions/one").status_code == 404
