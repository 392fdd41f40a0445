"""Refusals: which there are, what each looks like in both forms, and when a client is told to come again."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray.exceptions import RayActorError

from deployment.anthropic_messages.format import refusal as messages_refusal
from deployment.engine import errors as engine
from deployment.errors import STATUS_OF_CODE, Refused
from deployment.ingress import api
from deployment.refusal import refusal
from deployment.replica import EngineReplica
from tests.deployment.serving import serving

ROOT = Path(__file__).resolve().parents[2]
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
LONG: dict[str, Any] = {**HELLO, "max_tokens": 2000, "ignore_eos": True, "temperature": 1, "stream": True}

BETWEEN_REPLICAS = {"not_expected", engine.UNKNOWN_SESSION, engine.BAD_STATE}
"""Codes that no client is told, or not with the status that they have here."""

# ------------------------------------------------------------------------------------------------ the table


def documented() -> set[tuple[int, str]]:
    """Status and code of each row of the table in docs/http.md."""
    page = (ROOT / "docs" / "http.md").read_text(encoding="utf-8").partition("## Errors")[2].partition("\n## ")[0]
    rows: set[tuple[int, str]] = set()
    for statuses, codes in re.findall(r"^\| ([\d, ]+) \| (`.*?) \|", page, re.MULTILINE):
        groups = codes.split(";") if "," in statuses else [codes]
        for status, group in zip(statuses.split(","), groups, strict=True):
            rows |= {(int(status), code) for code in re.findall(r"`(\w+)`", group)}
    return rows


def raised() -> set[tuple[int, str]]:
    """Status and code of each refusal that the sources spell out, or make of the engine's."""
    found = {(status, code) for code, status in STATUS_OF_CODE.items()}
    for file in sorted((ROOT / "deployment").rglob("*.py")):
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("RequestError", "Refused"):
                status, code = (getattr(value, "value", None) for value in call.args[:2])
                if isinstance(status, int) and isinstance(code, str):
                    found.add((status, code))
    return {(status, code) for status, code in found if code not in BETWEEN_REPLICAS}


def test_each_refusal_is_in_the_table_of_the_documentation():
    rows = documented()
    assert len(rows) > 30 and raised() <= rows, raised() - rows


TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
         404: "invalid_request_error", 405: "invalid_request_error", 409: "conflict_error",
         410: "invalid_request_error", 413: "invalid_request_error", 422: "invalid_request_error",
         429: "rate_limit_error", 500: "server_error", 503: "unavailable_error"}  # fmt: skip
OF_MESSAGES = {400: (400, "invalid_request_error"), 401: (401, "authentication_error"),
               403: (403, "permission_error"), 404: (404, "not_found_error"),
               405: (405, "invalid_request_error"), 409: (400, "invalid_request_error"),
               410: (400, "invalid_request_error"), 413: (413, "request_too_large"),
               422: (400, "invalid_request_error"), 429: (429, "rate_limit_error"), 500: (500, "api_error"),
               503: (529, "overloaded_error")}  # fmt: skip


@pytest.mark.parametrize(("status", "code"), sorted(documented()))
def test_a_refusal_has_the_form_of_its_interface_and_says_when_to_come_again(status: int, code: str):
    refused = Refused(status, code, "why", "field")
    answer = refusal(refused)
    error = {"message": "why", "type": TYPES[status], "param": "field", "code": code}
    assert (answer.status_code, json.loads(bytes(answer.body))) == (status, {"error": error})
    assert answer.headers.get("retry-after") == ("1" if status in (429, 503) else None)

    told = messages_refusal(refused)
    document = json.loads(bytes(told.body))
    kind = {"type": OF_MESSAGES[status][1], "message": "why"}
    assert document == {"type": "error", "error": kind, "request_id": told.headers["request-id"]}
    assert told.status_code == OF_MESSAGES[status][0]
    assert told.headers.get("retry-after") == ("1" if told.status_code in (429, 529) else None)


# ------------------------------------------------------------------------------------------------ over HTTP


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving(lanes=1, queue_turns=1) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.mark.parametrize(
    ("method", "path", "asked", "status", "code", "param"),
    [
        ("POST", "/v1/chat/completions", {"content": b"{"}, 400, "invalid_request", None),
        ("POST", "/v1/chat/completions", {"content": b"[]"}, 400, "invalid_request", None),
        ("POST", "/v1/chat/completions", {"json": {**HELLO, "top_p": 2}}, 400, "invalid_request", "top_p"),
        ("POST", "/v1/chat/completions", {"json": {**HELLO, "model": "gpt"}}, 404, "model_not_found", "model"),
        (
            "POST", "/v1/chat/completions", {"json": {"messages": [{"role": "user", "content": "x " * 9000}]}},
            400, "context_length_exceeded", "messages",
        ),
        (
            "POST", "/v1/chat/completions",
            {"json": HELLO, "headers": {"x-session-id": "none", "x-session-require": "existing"}},
            404, "session_not_found", "session",
        ),
        ("POST", "/v1/completions", {"content": b" " * ((8 << 20) + 1)}, 413, "body_too_large", None),
        ("GET", "/v1/models/gpt", {}, 404, "model_not_found", "model"),
        ("GET", "/v1/sessions/none", {}, 404, "session_not_found", "session"),
        ("GET", "/v1/responses/none", {}, 404, "response_not_found", "response_id"),
        ("POST", "/v1/sessions/import", {"content": b"none"}, 400, "bad_state", "document"),
        ("GET", "/v1/sessions/none/turns/x/events?include_usage=perhaps", {}, 400, "invalid_request", "include_usage"),
        ("GET", "/v1/embeddings", {}, 404, "not_found", None),
        ("GET", "/v1/completions", {}, 405, "method_not_allowed", None),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_request_is_said(
    client: httpx.Client, method: str, path: str, asked: Any, status: int, code: str, param: str | None
):
    answer = client.request(method, path, **asked)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"], error["type"]) == (status, code, param, TYPES[status])


def test_a_prefix_of_the_application_changes_no_refusals_form(client: httpx.Client):
    """Serve leaves the prefix in the path, and names it beside."""

    async def refused(path: str) -> Any:
        transport = httpx.ASGITransport(api, root_path="/llm")
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as asking:
            return (await asking.post(f"/llm{path}", json={})).json()

    assert asyncio.run(refused("/v1/messages"))["type"] == "error"
    assert asyncio.run(refused("/v1/messages/count_tokens"))["type"] == "error"
    assert asyncio.run(refused("/v1/chat/completions"))["error"]["param"] == "messages"


def test_a_key_that_was_used_with_another_body_is_refused(client: httpx.Client):
    key = {"idempotency-key": "k"}
    assert client.post("/v1/chat/completions", json=HELLO, headers=key).status_code == 200
    other = client.post("/v1/chat/completions", json={**HELLO, "max_tokens": 5}, headers=key)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_mismatch")


def test_who_finds_no_room_is_told_when_to_come_again(client: httpx.Client):
    """One turn has the lane and another one the queue's only place."""
    waiting = threading.Thread(target=lambda: client.post("/v1/chat/completions", json=HELLO))
    with client.stream("POST", "/v1/chat/completions", json=LONG) as running:
        lines = running.iter_lines()  # whose end would be the stream's
        next(lines)
        late = client.post("/v1/chat/completions", json={**HELLO, "queue_seconds": 0})
        waiting.start()
        while client.get("/v1/replicas").json()["data"][0]["engine"]["turns_queued"] < 1:
            assert waiting.is_alive(), "it waits until the stream is left"
        full = client.post("/v1/chat/completions", json=HELLO)
        message = client.post("/v1/messages", json={"model": "demo", **HELLO})
    waiting.join(30)
    assert (late.status_code, late.json()["error"]["code"], late.headers["retry-after"]) == (503, "queue_timeout", "1")
    assert (full.status_code, full.json()["error"]["code"], full.headers["retry-after"]) == (429, "overloaded", "1")
    error = message.json()["error"]
    assert (message.status_code, error["type"], message.headers["retry-after"]) == (529, "overloaded_error", "1")


@pytest.mark.parametrize(
    ("fault", "status", "message_status"), [(RuntimeError("a secret"), 500, 500), (RayActorError(), 503, 529)]
)
def test_a_fault_is_told_without_its_inside_and_in_the_form_of_the_interface(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, fault: Exception, status: int, message_status: int
):
    async def fail(*_: Any) -> Any:
        raise fault

    monkeypatch.setattr(EngineReplica, "encode", fail)
    # Each on a connection of its own: after a fault the test's server closes it.
    answer = httpx.post(client.base_url.join("/tokenize"), json={"prompt": "x"})
    message = httpx.post(client.base_url.join("/v1/messages/count_tokens"), json={"model": "demo", **HELLO})
    assert (answer.status_code, message.status_code) == (status, message_status)
    assert answer.json()["error"]["type"] == TYPES[status]
    assert message.json()["request_id"] == message.headers["request-id"]
    for one in (answer, message):
        assert "secret" not in one.text and "Traceback" not in one.text
        assert one.headers.get("retry-after") == (None if status == 500 else "1")
