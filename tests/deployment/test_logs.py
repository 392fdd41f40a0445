"""What is logged of turns: who and how much, as JSON; and nothing that anybody said, unless that was asked for."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from deployment.engine.log_lines import ROOMS, SERVE, JsonLines, LogOptions, SpokenOf, log_through
from deployment.logs import serves_part, set_up
from deployment.settings import AppArgs
from deployment.turn_lines import TurnLines
from state.names import Epoch, Order, SessionKey
from tests.deployment import serving as harness
from tests.deployment.serving import serving

MARK = "zanzibar"
SAID = {"role": "user", "content": f"Repeat: {MARK}."}


@pytest.fixture
def loggers() -> Iterator[None]:
    """Our loggers are afterwards as they were."""
    ours = [logging.getLogger(name) for name in (*ROOMS, SERVE)]
    before = [(logger, logger.handlers[:], logger.level, logger.propagate) for logger in ours]
    yield
    for logger, handlers, level, propagate in before:
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate


@contextmanager
def listening() -> Iterator[list[dict[str, Any]]]:
    """All that any logger of this process says meanwhile, from DEBUG on, as lines of JSON."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(SpokenOf())
    handler.setFormatter(JsonLines())
    log_through([handler], "DEBUG", (*ROOMS, SERVE, "uvicorn", "starlette", "fastapi", "asyncio"))
    lines: list[dict[str, Any]] = []
    yield lines
    lines.extend(json.loads(line) for line in stream.getvalue().splitlines())


def ask(url: str) -> dict[str, Any]:
    """Turns of every kind that say the word, and requests that are refused for it. The answer of the first."""
    headers = {"x-session-id": "trip", "authorization": f"Bearer {MARK}"}
    with httpx.Client(base_url=url, headers=headers, timeout=30) as client:
        body: dict[str, Any] = {"messages": [SAID], "max_tokens": 24, "temperature": 0, "stop": [f"{MARK}!"]}
        answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
        more = {"messages": [SAID], "max_tokens": 4, "stream": True}
        client.post("/v1/sessions/trip/turns", json=more).raise_for_status()
        httpx.post(f"{url}/v1/completions", json={"prompt": MARK, "max_tokens": 4}, timeout=30).raise_for_status()
        tool = {"type": "function", "function": {"name": MARK, "parameters": {"type": "object"}}}
        client.post("/v1/messages", json={"messages": [SAID], "max_tokens": 4, "model": "demo"}).raise_for_status()
        for wrong in ({"model": MARK}, {"messages": [{**SAID, "role": MARK}]}, {"stop": [MARK] * 9},
                      {"response_format": {"type": MARK}}, {"tools": [tool], "tool_choice": MARK},
                      {"messages": [{**SAID, "content": MARK * 2000}]}):  # fmt: skip
            assert client.post("/v1/chat/completions", json={**body, **wrong}).status_code in (400, 404)
        assert client.post("/v1/chat/completions", content=MARK).status_code == 400
    return answer


def test_a_turn_is_one_line_with_its_session_and_epoch_and_no_log_holds_a_word_of_it(loggers: None):
    with serving() as url, listening() as lines:
        answer = ask(url)
    assert MARK in answer["choices"][0]["message"]["content"], "the model must say the word for this to mean anything"
    assert not [line for line in lines if MARK in json.dumps(line)]
    over = [line for line in lines if " is over: " in line["message"]]
    assert len(over) == 4
    line, meta = over[0], answer["meta_info"]
    assert (line["session"], line["turn"]) == ("trip", meta["turn"])
    assert line["epoch"] == answer["session"]["epoch"] and line["tenant"] and line["levelname"] == "INFO"
    assert line["completion_tokens"] == answer["usage"]["completion_tokens"] and line["finish_reason"] == "stop"
    assert (line["hit"], line["rounds"]) == ("none", len(meta["rounds"]))
    assert over[1]["hit"] == "device" and over[1]["reused"] > 0
    assert "session" not in over[2] and "asked" not in line


def test_texts_are_logged_where_that_was_asked_for(loggers: None, monkeypatch: pytest.MonkeyPatch):
    made = harness.TurnDesk
    monkeypatch.setattr(harness, "TurnDesk", lambda *args: made(*args, lines=TurnLines(texts=True)))
    with serving() as url, listening() as lines:
        body = {"messages": [SAID], "max_tokens": 24, "temperature": 0}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30).json()
    (line,) = [line for line in lines if " is over: " in line["message"]]
    assert line["asked"] == [SAID] and line["answer"] == answer["choices"][0]["message"]["content"]


def test_a_line_of_json_has_what_its_message_speaks_of_and_its_traceback(loggers: None):
    key, order = SessionKey("a" * 64, "trip"), Order(Epoch(5, 2), 9)
    with listening() as lines:
        log = logging.getLogger("deployment.engine.x")
        log.warning("session %s at %s: %s", key, order, "gone\nfor good", extra={"turns": ("a", "b")})
        try:
            raise KeyError("x")
        except KeyError:
            logging.getLogger(SERVE).exception("it failed")
    first, second = lines
    assert first["message"] == f"session {'a' * 16}/trip at 5.2.9: gone\nfor good"
    assert (first["session"], first["tenant"], first["epoch"]) == ("trip", "a" * 16, "5.2")
    assert first["turns"] == ["a", "b"] and first["levelname"] == "WARNING" and first["asctime"]
    assert second["exc_text"].startswith("Traceback") and "KeyError: 'x'" in second["exc_text"]


def test_what_serve_is_told_follows_the_options():
    assert serves_part(AppArgs().logs) is None, "it is left to Serve's own settings"
    told = serves_part(AppArgs(log_format="json", log_level="DEBUG").logs)
    assert told is not None and (told.encoding, told.log_level) == ("JSON", "DEBUG")
    with pytest.raises(ValueError, match=r"log_format: .*'text' or 'json', got 'yaml'"):
        AppArgs.of(log_format="yaml")


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_replicas_lines_go_where_serves_go_and_those_on_stderr_say_where_from(loggers: None, form: Any):
    serve, stream = logging.getLogger(SERVE), io.StringIO()
    serve.handlers[:] = [logging.StreamHandler(stream)]
    options = LogOptions(form, "WARNING")
    context: Any = SimpleNamespace(
        app_name="dflash", deployment="EngineReplica", replica_id=SimpleNamespace(unique_id="r1")
    )
    set_up(options, context)
    set_up(options, context)  # a second time changes nothing
    logging.getLogger("state.background").info("not told")
    logging.getLogger("state.background").warning("told")
    serve.warning("session %s", SessionKey("a" * 64, "trip"))
    lines = stream.getvalue().splitlines()
    if form == "text":
        assert lines == ["told", f"session {'a' * 16}/trip"]
    else:
        told, named = map(json.loads, lines)
        assert (told["message"], told["replica"], named["session"]) == ("told", "r1", "trip")
        assert (told["application"], told["deployment"]) == ("dflash", "dflash_EngineReplica")
