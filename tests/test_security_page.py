"""docs/security.md: what it names is there. Its commands run in `tests/pages`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.requests import Request

from deployment.anthropic_messages.schema import MessagesBody
from deployment.body_reading import parse
from deployment.completion_schema import CompletionBody
from deployment.errors import RequestError
from deployment.request_reading import asking_of, session_name
from deployment.schemas import TurnBody
from deployment.settings import AppArgs

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")


def test_every_setting_that_it_names_is_there():
    names = {name for name in re.findall(r"`([a-z]+(?:_[a-z]+)+)`", PAGE) if not name.startswith(("ssl_", "api_key"))}
    of_requests = {"tool_use", "foreign_page", "foreign_host"}
    assert of_requests < names
    assert names - {"http_options"} - of_requests <= AppArgs.model_fields.keys()


def test_every_file_that_it_names_is_there():
    named = [*re.findall(r"`((?:state|tests|deployment)/[\w./]+)`", PAGE), "docs/media.md", "cluster.yaml"]
    assert len(named) > 4 and not [name for name in named if not (ROOT / name).exists()]


def most(accepts: Callable[[int], Any]) -> int:
    """The largest number that is not refused."""
    for number in range(2048, 0, -1):
        with contextlib.suppress(RequestError):
            accepts(number)
            return number
    raise AssertionError("none is accepted")


def chat(**more: Any) -> TurnBody:
    return parse(TurnBody, {"messages": [{"role": "user", "content": "x"}], **more})


def message(**more: Any) -> MessagesBody:
    asked = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}], **more}
    return parse(MessagesBody, asked)


def keyed(length: int) -> None:
    headers = [(b"idempotency-key", b"a" * length)]
    asking_of(Request({"type": "http", "headers": headers, "state": {"tenant": "t"}}), {})


def test_its_limits_of_a_request_are_those_of_the_code():
    names, keys = most(lambda length: session_name("a" * length, "id")), most(keyed)
    stops, stop = most(lambda count: chat(stop=["x"] * count)), most(lambda length: chat(stop=["x" * length]))
    message_stops = most(lambda count: message(stop_sequences=["x"] * count))
    choices, prompts = most(lambda n: chat(n=n)), most(lambda count: parse(CompletionBody, {"prompt": ["x"] * count}))
    limits = (
        f"{names} and {keys} characters, {stops} of {stop} ({message_stops} for `/v1/messages`), {choices}, {prompts}"
    )
    assert f"| names, keys, stop strings, choices, prompts of one request | {limits} |" in PAGE
