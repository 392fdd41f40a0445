"""Requests with images at the HTTP interface: how large they may be, and what becomes of them before a turn begins."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from starlette.requests import Request

from deployment.errors import Refused, RequestError
from deployment.media_limits import MediaLimits
from deployment.metrics.turns import TurnMetrics
from deployment.ownership.words import SessionKey
from deployment.request_reading import MAX_BODY_BYTES
from deployment.turn_api import TurnApi
from deployment.wire import MediaSource, Told, TurnRequest
from tests.deployment.media_files import noise, picture

REFUSED = Refused(503, "unavailable", "asked for, but not served here")


class Stream:
    """In the place of the replicas: keeps the turn that is asked for."""

    def __init__(self) -> None:
        self.turns: list[TurnRequest] = []

    async def taken(self, turn: TurnRequest) -> AsyncIterator[Told]:
        self.turns.append(turn)
        yield Told("", REFUSED)

    def bounded(self, events: AsyncIterator[Told]) -> AsyncIterator[Told]:
        return events


def asked(body: dict[str, Any], *, append: bool = False, **limits: Any) -> TurnRequest:
    """The turn that a request leads to. Raises RequestError."""
    stream = Stream()
    api = TurnApi(cast(Any, None), cast(Any, None), ("m",), cast(Any, stream), MediaLimits(**limits), TurnMetrics())
    api._stream = cast(Any, stream)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "state": {"tenant": "0" * 64}}
    request = Request(scope, receive)
    with pytest.raises(RequestError) as caught:
        asyncio.run(api.append(request, SessionKey("", "s")) if append else api.chat(request))
    if caught.value.refused != REFUSED:
        raise caught.value
    (turn,) = stream.turns
    return turn


def looking(*files: bytes, text: str = "What is it?", **fields: Any) -> dict[str, Any]:
    urls = [f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in files]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}], **fields}


@pytest.mark.parametrize("append", [False, True])
def test_an_image_larger_than_a_body_without_one_may_be_leaves_only_its_digest_in_the_messages(append: bool) -> None:
    data = picture(kind="PNG") + bytes(MAX_BODY_BYTES)  # what follows the end of a PNG is nothing to it
    turn = asked(looking(data), append=append)
    (source,) = turn.media
    assert isinstance(source, MediaSource) and source.data == data and turn.mode == ("append" if append else "history")
    assert turn.messages[0]["content"][0] == {"type": "image", "sha256": source.sha256}


def test_bodies_have_a_limit_with_images_too_and_text_has_its_own() -> None:
    for body, code in (
        (looking(picture(400, 400)), "media_too_large"),
        (looking(text="x" * MAX_BODY_BYTES), "body_too_large"),
    ):
        with pytest.raises(RequestError) as caught:
            asked(body, total_bytes=1000)
        assert (caught.value.refused.status, caught.value.refused.code) == (413, code)


def test_another_model_is_refused_before_any_image_is_looked_at() -> None:
    with pytest.raises(RequestError, match="'other' is not served"):
        asked(looking(noise(10).tobytes(), model="other"))
