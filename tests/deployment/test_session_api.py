"""What is answered of a tenant's sessions by a directory that does not know enough yet."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request

from deployment.errors import RequestError
from deployment.ownership.messages import Placed, Wait
from deployment.ownership.words import Epoch, SessionKey
from deployment.replica_calls import Replicas
from deployment.session_api import SessionApi

TENANT = "t" * 64
ONE, TWO = SessionKey(TENANT, "one"), SessionKey(TENANT, "two")


def placed(key: SessionKey) -> Placed:
    return Placed(key, Epoch(1, 1), "a", ())


class Directory:
    """One that hears of `one` at once, and after so many questions for it of all else."""

    def __init__(self, waits: int) -> None:
        self.waits = waits

    async def locate(self, key: SessionKey) -> Placed | Wait | None:
        if key == ONE:
            return placed(ONE)
        self.waits -= 1
        return Wait(key, 0.001) if self.waits >= 0 else None

    async def sessions(self, tenant: str) -> tuple[Placed, ...]:
        return (placed(ONE), placed(TWO)) if self.waits < 0 else (placed(ONE),)


def api_of(directory: Directory, engine: Any = None) -> SessionApi:
    cluster: Any = directory
    return SessionApi(Replicas(engine, cluster), cluster, 0)


def asked(body: bytes = b"") -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    return Request({"type": "http", "method": "GET", "path": "/", "headers": [], "state": {"tenant": TENANT}}, receive)


def test_sessions_are_listed_once_the_directory_knows_all_of_them():
    assert [one["id"] for one in asyncio.run(api_of(Directory(3)).list(asked()))["data"]] == ["one", "two"]


def test_names_that_begin_like_a_known_session_are_told_once_the_directory_knows_all_of_them():
    assert asyncio.run(api_of(Directory(3)).beginning(asked(), "one")) == ("one",)
    assert asyncio.run(api_of(directory := Directory(3)).beginning(asked(), "t")) == ("two",) and directory.waits < 0


def test_sessions_are_not_listed_while_nobody_knows_all_of_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("deployment.session_api.LOCATE_SECONDS", 0.02)
    with pytest.raises(RequestError) as caught:
        asyncio.run(api_of(Directory(1 << 30)).list(asked()))
    assert caught.value.refused.status == 503
