"""The description of the interface is that of the server, and its answers are as it says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import BaseModel
from typer.testing import CliRunner

from deployment.cli import app
from deployment.ingress import VERSION
from deployment.openapi.document import document, written
from deployment.openapi.operations import OPERATIONS
from tests.deployment.serving import serving

COMMITTED = Path(__file__).resolve().parents[2] / "docs" / "openapi.json"

SAID: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALLING = {**SAID, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 60}
ADD: Any = [{"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}]
CALLED: dict[str, Any] = {
    "input": [
        {"role": "user", "content": "Add."},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "7"},
    ],
    "max_output_tokens": 4,
}
MESSAGE: dict[str, Any] = {"model": "demo", **SAID}

REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("GET /version", {}),
    ("GET /health", {}),
    ("GET /metrics", {}),
    ("GET /v1/models", {}),
    ("GET /v1/models/{name}", {"name": "demo"}),
    ("GET /v1/replicas", {}),
    ("POST /tokenize", {"json": {"prompt": "Hello", "return_token_strs": True}}),
    ("POST /tokenize", {"json": SAID}),
    ("POST /detokenize", {"json": {"tokens": [22, 15]}}),
    ("POST /v1/completions", {"json": {"prompt": "One", "max_tokens": 2, "logprobs": 1, "echo": True, "n": 2}}),
    ("POST /v1/chat/completions", {"json": {**SAID, "logprobs": True, "top_logprobs": 1, "n": 2}}),
    ("POST /v1/chat/completions", {"json": CALLING}),
    ("POST /v1/chat/completions", {"json": {**SAID, "chat_template_kwargs": {"enable_thinking": True}}}),
    ("POST /v1/sessions", {"json": {"id": "door"}}),
    ("POST /v1/sessions/{name}/turns", {"name": "door", "json": SAID}),
    ("GET /v1/sessions", {}),
    ("GET /v1/sessions/{name}", {"name": "door"}),
    ("GET /v1/sessions/{name}/turns", {"name": "door"}),
    ("GET /v1/sessions/{name}/turns/{turn}/events", {"name": "door", "turn": "its"}),
    ("POST /v1/sessions/{name}/checkpoints", {"name": "door", "json": {"name": "here"}}),
    ("GET /v1/sessions/{name}/checkpoints", {"name": "door"}),
    ("POST /v1/sessions/{name}/fork", {"name": "door", "json": {"checkpoint": "here", "id": "window"}}),
    ("DELETE /v1/sessions/{name}/checkpoints/{checkpoint}", {"name": "door", "checkpoint": "here"}),
    ("POST /v1/sessions/{name}/migrate", {"name": "door", "json": {"to": "a"}}),
    ("GET /v1/sessions/{name}/export", {"name": "door"}),
    ("DELETE /v1/sessions/{name}", {"name": "door"}),
    ("POST /v1/sessions/import", {"content": "exported"}),
    ("POST /v1/responses", {"json": {**CALLED, "tools": ADD, "tool_choice": "required", "max_output_tokens": 60}}),
    ("POST /v1/responses", {"json": {"input": "Hm.", "reasoning": {"effort": "high"}, "max_output_tokens": 4}}),
    ("POST /v1/responses", {"json": CALLED}),
    ("GET /v1/responses/{name}", {"name": "newest"}),
    ("GET /v1/responses/{name}/input_items", {"name": "newest"}),
    ("DELETE /v1/responses/{name}", {"name": "newest"}),
    ("POST /v1/responses/input_tokens", {"json": {"input": "Hello"}}),
    ("POST /v1/messages", {"json": {**MESSAGE, "thinking": {"type": "adaptive"}, "max_tokens": 6}}),
    ("POST /v1/messages", {"json": {**MESSAGE, "tools": [{"name": "add", "input_schema": {"type": "object"}}],
                                    "tool_choice": {"type": "any"}, "max_tokens": 60}}),
    ("POST /v1/messages/count_tokens", {"json": MESSAGE}),
]  # fmt: skip
"""In an order in which each one finds what it needs."""

ELSEWHERE = {"POST /v1/responses/{name}/cancel"}
"""Needs a turn that runs; `test_responses.py`."""


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving() as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def test_the_committed_description_is_that_of_the_server(client: httpx.Client):
    told = written(client.get("/openapi.json").json())
    why = "the interface has changed: dflash-serve openapi > docs/openapi.json"
    assert told == COMMITTED.read_text(encoding="utf-8"), why
    assert CliRunner().invoke(app, ["openapi"]).stdout == told


def test_a_route_that_nobody_describes_is_named():
    with pytest.raises(ValueError, match=r"differ in .*GET /v1/replicas"):
        document(FastAPI(), VERSION)


def test_answers_have_the_form_that_is_described(client: httpx.Client):
    """Each model takes no field that it does not have."""
    known: dict[str, Any] = {}
    for name, asked in REQUESTS:
        method, path = name.split()
        parts = {key: known.get(value, value) for key, value in asked.items() if key in ("name", "turn", "checkpoint")}
        content = known.get(asked.get("content", ""))
        answer = client.request(method, path.format(**parts), json=asked.get("json"), content=content)
        assert answer.status_code == 200, (name, answer.text)
        kind = OPERATIONS[name].answer
        if isinstance(kind, str):
            assert answer.headers["content-type"].partition(";")[0] == kind
        else:
            kind.model_validate(answer.json())
        known |= _to_be_asked_for(name, answer)
    assert {name for name, _ in REQUESTS} | ELSEWHERE == OPERATIONS.keys()


def _to_be_asked_for(name: str, answer: httpx.Response) -> dict[str, Any]:
    match name:
        case "POST /v1/sessions/{name}/turns":
            return {"its": answer.headers["x-turn-id"]}
        case "GET /v1/sessions/{name}/export":
            return {"exported": answer.content}
        case "POST /v1/responses":
            return {"newest": answer.json()["id"]}
        case _:
            return {}


def test_refusals_have_the_form_that_is_described(client: httpx.Client):
    refused = client.post("/v1/chat/completions", json={"messages": [], "max_tokens": 4})
    described = json.loads(COMMITTED.read_text(encoding="utf-8"))["paths"]
    for path, name in (("/v1/chat/completions", "Error"), ("/v1/messages", "MessageError")):
        refused = client.post(path, json={"model": "demo", "messages": [], "max_tokens": 4})
        said = described[path]["post"]["responses"][str(refused.status_code)]
        assert said == {"$ref": f"#/components/responses/{name}"}
        error: type[BaseModel] = OPERATIONS[f"POST {path}"].error
        assert error.__name__ == name and error.model_validate(refused.json())


def test_who_uses_another_method_hears_which_ones_there_are(client: httpx.Client):
    refused = client.put("/v1/completions")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert refused.json()["error"]["code"] == "method_not_allowed"
