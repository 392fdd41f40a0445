"""Streams of turns: asked for, read in part, followed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.cluster import COUNT, GREEDY, chat, keyed, text

SAMPLED: dict[str, Any] = {
    "temperature": 0.9,
    "top_k": 0,
    "top_p": 1.0,
    "seed": 11,
    "max_tokens": 40,
    "ignore_eos": True,
}
LONG: dict[str, Any] = {**GREEDY, "max_tokens": 3000, "ignore_eos": True}


@dataclass
class Read:
    """What a reader has of a stream."""

    ids: list[str] = field(default_factory=list)
    chunks: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False

    @property
    def text(self) -> str:
        return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in self.chunks if chunk["choices"])

    @property
    def turn(self) -> str:
        return self.ids[0].partition(".")[0]


def read(lines: Iterator[str], events: int | None = None) -> Read:
    """Reads a stream to its end, or so many events; the connection stays open as long as `lines` are held."""
    got = Read()
    for line in lines:
        if line.startswith("id: "):
            got.ids.append(line.removeprefix("id: "))
        elif line == "data: [DONE]":
            got.done = True
        elif line.startswith("data: "):
            got.chunks.append(json.loads(line.removeprefix("data: ")))
            if len(got.chunks) == events:
                break
    return got


@contextmanager
def streaming(client: httpx.Client, method: str, path: str, **how: Any) -> Iterator[Iterator[str]]:
    """The lines of a stream."""
    with client.stream(method, path, **how) as response:
        if response.status_code != 200:
            response.read()
        assert response.status_code == 200, response.text
        yield response.iter_lines()


@contextmanager
def asking(client: httpx.Client, session: str | None, **how: Any) -> Iterator[Iterator[str]]:
    headers = {**({"x-session-id": session} if session else {}), **how.pop("headers", {})}
    body = {"messages": [COUNT], "stream": True, **how}
    with streaming(client, "POST", "/v1/chat/completions", json=body, headers=headers) as lines:
        yield lines


def following(client: httpx.Client, session: str, turn: str, **how: Any) -> Read:
    with streaming(client, "GET", f"/v1/sessions/{session}/turns/{turn}/events", **how) as lines:
        return read(lines)


def alone(client: httpx.Client, **how: Any) -> str:
    """The answer that nobody disturbs."""
    with keyed(client.base_url) as other:
        return text(chat(other, [COUNT], **how))


def until_idle(client: httpx.Client, session: str) -> dict[str, Any]:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        known = client.get(f"/v1/sessions/{session}").json()
        if known.get("turns") and known["running"] is None:
            return known
        time.sleep(0.1)
    raise TimeoutError(f"session {session} still runs after 20 s")
