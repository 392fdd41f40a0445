"""Where the server is, and whose requests they are: what both clients are made with."""

from __future__ import annotations

import os
from dataclasses import dataclass

import httpx

from deployment.client.calls import Call, is_visible

SILENT_SECONDS = 45.0
"""A stream that has begun and sends nothing for so long is dead: the server sends a comment every 5 seconds."""

CALL_SECONDS = 300.0
"""Until an answer begins: a turn waits for a lane and for its prompt before anything is said of it, and a large session
takes a while to move or to export."""

CONNECT_SECONDS = 10.0

API_KEY_VARIABLE = "DFLASH_API_KEY"


def timeout_of(call: Call) -> httpx.Timeout:
    """Who has had an event of a turn waits for no lane any more: of what comes after it, silence is no good sign."""
    return httpx.Timeout(SILENT_SECONDS if call.has_begun else CALL_SECONDS, connect=CONNECT_SECONDS)


def has_begun(request: httpx.Request) -> None:
    """The answer's headers are there: what comes of the stream from now on is never silent for long."""
    request.extensions["timeout"]["read"] = SILENT_SECONDS  # httpx looks there again for the body


@dataclass(frozen=True)
class Server:
    """`url` without `/v1`; `headers` of every request. ValueError for what no request could be made of."""

    url: str
    headers: dict[str, str]

    @classmethod
    def of(cls, url: str, api_key: str | None) -> Server:
        """Without an `api_key` the environment's DFLASH_API_KEY is sent, if there is one."""
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ValueError(f"url: {url!r} is none: {error}") from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ValueError(f"url: must be http://HOST:PORT or https://HOST, got {url!r}")
        key = (os.environ.get(API_KEY_VARIABLE) or None) if api_key is None else api_key
        if key is not None and not is_visible(key):
            raise ValueError("api_key: has visible ASCII characters and at least one")  # and is not to be shown
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return cls(url.rstrip("/").removesuffix("/v1"), headers)
