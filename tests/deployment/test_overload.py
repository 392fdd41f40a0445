"""Far more streams than lanes: whom there is no room for is told so before the first byte, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from tests.deployment.serving import serving

STREAMS, LANES, QUEUE = 64, 4, 8
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Count from 3 in steps of 2, 12 numbers."}],
    "temperature": 0, "max_tokens": 12, "ignore_eos": True, "stream": True,
}  # fmt: skip


async def answer(client: httpx.AsyncClient, number: int, refused: list[httpx.Response]) -> str:
    """Of a client that comes again when it is told to, every other one with a session."""
    headers = {"x-session-id": f"one-of-many-{number}"} if number % 2 else {}
    while True:
        async with client.stream("POST", "/v1/chat/completions", json=ASKED, headers=headers) as response:
            if response.status_code == 200:
                return text([line async for line in response.aiter_lines()])
            await response.aread()
            refused.append(response)
        await asyncio.sleep(float(response.headers["retry-after"]))


def text(lines: list[str]) -> str:
    """Of a stream that is whole."""
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]" and not any('"error"' in entry for entry in data)
    choices = [choice for entry in data[:-1] for choice in json.loads(entry)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_of_sixty_four_streams_at_once_each_is_answered_or_told_before_its_first_byte_to_come_again():
    refused: list[httpx.Response] = []

    async def scenario(url: str) -> tuple[str, list[str], str]:
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=STREAMS)) as client:
            alone = await answer(client, 0, refused)
            assert not refused
            together = await asyncio.gather(*(answer(client, number, refused) for number in range(STREAMS)))
            return alone, together, (await client.get("/metrics")).text

    with serving(lanes=LANES, queue_turns=QUEUE) as url:
        alone, together, metrics = asyncio.run(scenario(url))
    assert alone and together == [alone] * STREAMS, "no stream that has begun notices the others"
    assert len(refused) >= STREAMS - 2 * (LANES + QUEUE), "while the first ones run, there is no room for most of them"
    assert {response.status_code for response in refused} == {429}
    assert {response.headers["retry-after"] for response in refused} == {"1"}
    assert {response.json()["error"]["code"] for response in refused} == {"overloaded"}
    samples = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    assert float(samples['dflash_refusals_total{reason="overloaded",when="before"}']) == len(refused)
    assert (
        float(samples['dflash_lanes_running{replica="a"}']) == float(samples['dflash_turns_queued{replica="a"}']) == 0
    )
