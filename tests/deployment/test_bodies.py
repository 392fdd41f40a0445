"""How much of a request is read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request

from deployment.errors import RequestError
from deployment.request_reading import body_of


def request(parts: list[bytes], stated: str | None = None) -> tuple[Request, list[bytes]]:
    """A request, and the parts of its body that nobody has asked for yet."""
    left = list(parts)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    headers = [] if stated is None else [(b"content-length", stated.encode())]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive), left


def test_a_body_that_says_it_is_too_large_is_refused_before_anything_is_read():
    asked, left = request([b"x" * 50, b"x" * 51], stated="101")
    with pytest.raises(RequestError) as caught:
        asyncio.run(body_of(asked, 100))
    assert caught.value.refused.status == 413 and "100 bytes" in caught.value.refused.message and len(left) == 2


@pytest.mark.parametrize("stated", [None, "5", "many"])
def test_a_body_that_lies_about_its_size_is_read_no_further_than_the_limit(stated: str | None):
    asked, left = request([b"x" * 50, b"x" * 51, b"x" * 50], stated)
    with pytest.raises(RequestError):
        asyncio.run(body_of(asked, 100))
    assert len(left) == 1


def test_a_body_of_exactly_the_limit_is_read():
    asked, _ = request([b"x" * 50, b"y" * 50], stated="100")
    assert asyncio.run(body_of(asked, 100)) == b"x" * 50 + b"y" * 50
