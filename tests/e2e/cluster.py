"""A Ray cluster with two replicas of the demo model, and the requests that its tests make."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployment.local import running
from deployment.settings import AppArgs
from deployment.tls import Tls

FACT = {"role": "user", "content": "My locker code is 4172."}
QUESTION = {"role": "user", "content": "What is my locker code?"}
COUNT = {"role": "user", "content": "Count from 3 in steps of 2, 12 numbers."}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 48}


@contextlib.contextmanager
def two_replicas(args: AppArgs, state: Path | None = None, tls: Tls | None = None) -> Iterator[str]:
    """The application on a Ray of its own, at the URL that this yields. `state`: the directory of the user's state, if
    it is to be there afterwards."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as passing:
        patch.setenv("XDG_STATE_HOME", str(state or passing))
        # Replicas run what they run in production, not Triton's interpreter, and leave no token in the home directory.
        patch.delenv("TRITON_INTERPRET", raising=False)
        patch.setenv("RAY_AUTH_MODE", "disabled")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        mask = os.umask(0o077)
        try:
            with running(args, host="127.0.0.1", port=port, quiet=True, tls=tls) as url:
                yield url
        finally:
            os.umask(mask)


def keyed(url: str | httpx.URL) -> httpx.Client:
    """A client with an API key of its own: state is shared among the sessions of one key."""
    return httpx.Client(base_url=url, timeout=60, headers={"authorization": f"Bearer {secrets.token_hex(8)}"})


def chat(client: httpx.Client, messages: list[dict[str, Any]], session: str | None = None, **extra: Any) -> Any:
    headers = {"x-session-id": session} if session else {}
    response = client.post("/v1/chat/completions", json={"messages": messages, **GREEDY, **extra}, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


def turn(client: httpx.Client, session: str, message: dict[str, Any], **extra: Any) -> Any:
    response = client.post(f"/v1/sessions/{session}/turns", json={"messages": [message], **GREEDY, **extra})
    assert response.status_code == 200, response.text
    return response.json()


def text(answer: Any) -> str:
    return answer["choices"][0]["message"]["content"]


def replicas(client: httpx.Client) -> dict[str, int]:
    return {entry["id"]: entry["pid"] for entry in client.get("/v1/replicas").json()["data"]}


def epoch(document: dict[str, Any]) -> tuple[int, ...]:
    return tuple(int(part) for part in document["epoch"].split("."))


def wait_for_two(client: httpx.Client, without: str | None = None, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        response = client.get("/v1/replicas")
        if response.status_code == 200:
            names = {entry["id"] for entry in response.json()["data"]}
            if len(names) == 2 and without not in names:
                return
        time.sleep(0.3)
    raise TimeoutError(f"the killed replica was not replaced within {seconds:g} s")
