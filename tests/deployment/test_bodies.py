"""How much of a request is read."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from deployment import session_api
from deployment.body_reading import parse
from deployment.content_parts import parts_of
from deployment.errors import RequestError
from deployment.request_reading import SMALL_BYTES, beside, body_of
from deployment.server_objects import session_details
from deployment.session_api import located
from tests.deployment.serving import serving


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving() as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


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


def test_what_looks_at_a_large_body_works_beside_the_loop_and_at_a_small_one_at_once():
    async def scenario() -> tuple[int, int, int]:
        here = threading.get_ident()
        return here, await beside(SMALL_BYTES, threading.get_ident), await beside(SMALL_BYTES + 1, threading.get_ident)

    here, small, large = asyncio.run(scenario())
    assert small == here != large


MANY: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}, *[{"role": "assistant", "content": "y"}] * 2000],
                        "max_tokens": 1, "model": "demo"}  # fmt: skip
MODULES = ["turn_api", "anthropic_messages.api", "openai_responses.api", "token_api"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", MANY),
        ("/v1/completions", {"prompt": "x" * 70_000, "max_tokens": 1}),
        ("/v1/messages", {**MANY, "messages": [*MANY["messages"], {"role": "user", "content": "z"}]}),
        ("/v1/messages/count_tokens", {**MANY, "messages": [*MANY["messages"], {"role": "user", "content": "z"}]}),
        ("/v1/responses", {"input": MANY["messages"], "max_output_tokens": 1, "store": False}),
        ("/v1/responses/input_tokens", {"input": MANY["messages"]}),
        ("/tokenize", {"messages": MANY["messages"]}),
    ],
)
def test_no_stream_waits_for_a_large_body_to_be_read(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
):
    loops, readers = set[int](), set[int]()

    def read(kind: type[Any], document: Any) -> Any:
        readers.add(threading.get_ident())
        return parse(kind, document)

    def looked(*asked: Any) -> Any:
        readers.add(threading.get_ident())
        return parts_of(*asked)

    async def collected(*asked: Any) -> bytearray:
        loops.add(threading.get_ident())
        return await body_of(*asked)

    for module in MODULES:
        monkeypatch.setattr(f"deployment.{module}.parse", read)
    monkeypatch.setattr("deployment.media_intake.parts_of", looked)
    monkeypatch.setattr("deployment.turn_api.body_of", collected)
    assert client.post(path, json=body).status_code in (200, 400), "there may be too many tokens"
    assert readers and loops and not readers & loops


def test_a_long_session_is_shown_and_exported_beside_the_loop_and_in_pieces(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
):
    loops, writers = set[int](), set[int]()

    def shown(*asked: Any) -> Any:
        writers.add(threading.get_ident())
        return session_details(*asked)

    async def found(*asked: Any) -> Any:
        loops.add(threading.get_ident())
        return await located(*asked)

    said = {"messages": [{"role": "user", "content": "One."}], "max_tokens": 1}
    client.post("/v1/chat/completions", json=said, headers={"x-session-id": "long"}).raise_for_status()
    whole = client.get("/v1/sessions/long/export")
    assert int(whole.headers["content-length"]) == len(whole.content) > 1000
    monkeypatch.setattr(session_api, "PIECE_BYTES", 100)
    monkeypatch.setattr(session_api, "session_details", shown)
    monkeypatch.setattr(session_api, "located", found)
    with client.stream("GET", "/v1/sessions/long/export") as pieces:
        parts = list(pieces.iter_raw())
    assert b"".join(parts) == whole.content and len(parts) > 1
    assert client.get("/v1/sessions/long").json()["transcript"]
    assert writers and not writers & loops
