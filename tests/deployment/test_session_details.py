"""A session as the interface shows it, whatever an imported document had in it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from deployment import replica, session_api
from deployment.engine.commands import Call, Inspect
from deployment.engine.events import Event
from deployment.engine.service import EngineService
from deployment.ownership.messages import Placed
from deployment.ownership.words import Epoch, Member, SessionKey
from deployment.server_objects import session_details
from deployment.wire import SessionInfo
from tests.deployment.serving import serving
from tests.engine.driving import models, options

PLACEMENT = Placed(SessionKey("t" * 64, "one"), Epoch(1, 2), "a", (Member("node", "0" * 32),))


def test_bytes_in_an_imported_transcript_are_shown_as_hex():
    message = {"role": "user", "content": [{"type": b"\xff\x00"}], "x": {"y": [b"a"]}}
    known = SessionInfo("a", Epoch(1, 2), 3, 2, None, (message,), ({"request": {"stop": b"\xfe"}},))
    shown = session_details(PLACEMENT, known)
    assert json.loads(json.dumps(shown)) == shown
    assert shown["transcript"] == [{"role": "user", "content": [{"type": "ff00"}], "x": {"y": ["61"]}}]
    assert shown["turns"] == [{"request": {"stop": "fe"}}] and shown["tokens"] == 3


def test_a_session_whose_owner_does_not_answer_is_shown_as_the_directory_has_it():
    assert session_details(PLACEMENT, None) == {
        "id": "one", "object": "session", "replica": "a", "epoch": "1.2", "store": True, "copies": [{"node": "node"}],
    }  # fmt: skip


@contextmanager
def engine(*stuck: type[Call]) -> Iterator[EngineService]:
    """One that answers no command of these kinds once it has had a turn."""
    service = EngineService(models("dflash2"), options("dflash2", lanes=4, images=16))
    call = service.call

    async def answered(command: Call) -> Event:
        if isinstance(command, stuck) and had_turn:
            await asyncio.sleep(1e9)
        return await call(command)

    had_turn: list[Any] = []
    turn = service.turn
    service.call = answered
    service.turn = lambda submit: had_turn.append(submit) or turn(submit)
    try:
        yield service
    finally:
        service.close()


def chat(url: str, headers: dict[str, str]) -> None:
    body = {"messages": [{"role": "user", "content": "Count from 3."}], "max_tokens": 8, "temperature": 0}
    httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=30).raise_for_status()


def test_a_session_is_shown_in_bounded_time_whatever_its_engine_does(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replica, "MEASURED_SECONDS", 0.05)
    with engine(Inspect) as service, serving(service) as url, httpx.Client(base_url=url, timeout=8) as client:
        chat(url, {"x-session-id": "s"})
        shown = client.get("/v1/sessions/s").json()
        assert shown["replica"] == "a" and len(shown["turns"]) == 1 and shown["tokens"] > 8
        assert len(client.get("/v1/sessions/s/turns").json()["data"]) == 1
        places = [one["places"] for one in client.get("/v1/sessions/s/checkpoints").json()["data"]]
        assert places and all(one == ["host"] for one in places), "its copies are known without the engine"


def test_a_session_whose_owner_says_nothing_is_shown_as_the_directory_has_it(monkeypatch: pytest.MonkeyPatch):
    async def silent(self: Any, route: Any, key: SessionKey) -> None:
        await asyncio.sleep(1e9)

    monkeypatch.setattr(session_api, "SHOWN_SECONDS", 0.05)
    with engine() as service, serving(service) as url:
        chat(url, {"x-session-id": "s"})
        monkeypatch.setattr(replica.EngineReplica, "session_info", silent)
        shown = httpx.get(f"{url}/v1/sessions/s", timeout=8).json()
        assert shown["copies"] == [{"node": "x"}] and shown["replica"] == "a" and "turns" not in shown


def test_what_is_served_and_where_one_can_move_is_known_while_an_engine_says_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replica, "MEASURED_SECONDS", 0.05)
    with engine(Inspect) as service, serving(service) as url, httpx.Client(base_url=url, timeout=8) as client:
        chat(url, {"x-session-id": "s"})
        assert client.get("/health").json() == {"status": "ok", "replicas": 1}
        assert client.get("/v1/models").json()["data"][0]["max_model_len"] == service.context_limit
        moved = client.post("/v1/sessions/s/migrate", json={"to": "a"})
        assert (moved.status_code, moved.json()["to"]) == (200, "a")


def test_a_turn_that_has_a_key_alone_counts_as_no_session():
    with engine() as service, serving(service) as url:
        for headers in ({"idempotency-key": "k"}, {"x-session-id": "s"}):
            chat(url, headers)
        assert [one["sessions"] for one in httpx.get(f"{url}/v1/replicas").json()["data"]] == [1]
        assert 'dflash_sessions{replica="a"} 1.0' in httpx.get(f"{url}/metrics").text
