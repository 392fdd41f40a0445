"""What is answered of a tenant's sessions by a directory that does not know enough yet, or of replicas that go."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from deployment.errors import RequestError
from deployment.ownership.messages import Placed, Wait
from deployment.ownership.words import Epoch, SessionKey
from deployment.replica_calls import Replicas
from deployment.session_api import SessionApi
from deployment.wire import Adopted, Movement, Route

TENANT = "t" * 64
ONE, TWO = SessionKey(TENANT, "one"), SessionKey(TENANT, "two")


def placed(key: SessionKey) -> Placed:
    return Placed(key, Epoch(1, 1), "a", ())


class Directory:
    """One that hears of `one` at once, and after so many questions for it of all else."""

    def __init__(self, waits: int) -> None:
        self.waits = waits
        self.stays: list[tuple[str, ...]] = []

    async def locate(self, key: SessionKey) -> Placed | Wait | None:
        if key == ONE:
            return placed(ONE)
        self.waits -= 1
        return Wait(key, 0.001) if self.waits >= 0 else None

    async def sessions(self, tenant: str) -> tuple[Placed, ...]:
        return (placed(ONE), placed(TWO)) if self.waits < 0 else (placed(ONE),)

    async def staying(self, beside: str) -> tuple[str, ...]:
        stays = self.stays.pop(0) if len(self.stays) > 1 else self.stays[0]
        return tuple(replica for replica in stays if replica != beside)


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


@pytest.mark.parametrize(
    ("stays", "to"),
    [([("a", "b", "c")], "c"), ([("a", "b")], "b"), ([(), ("a",), ("a", "b")], "b"), ([("a",)], None), ([()], None)],
    ids=["all", "some", "one that has just come", "its owner", "unknown"],
)
def test_a_session_that_is_moved_to_no_replica_by_name_goes_to_the_emptiest_that_stays(
    stays: list[tuple[str, ...]], to: str | None, monkeypatch: pytest.MonkeyPatch
):
    if to is None:
        monkeypatch.setattr("deployment.session_api.STAYING_SECONDS", 0.0)
    moved: list[str] = []

    async def move(route: Route, key: SessionKey, destination: str) -> Movement:
        moved.append(destination)
        return Movement()

    async def adopt(route: Route, key: SessionKey) -> Adopted:
        assert route.replica is not None
        return Adopted(route.replica, Epoch(1, 2), "peer", 3)

    engine = SimpleNamespace(move=SimpleNamespace(remote=move), adopt=SimpleNamespace(remote=adopt))
    directory = Directory(0)
    directory.stays = stays
    api = api_of(directory, engine)

    async def everybody() -> Sequence[Any]:
        return [SimpleNamespace(replica=name, sessions=count) for name, count in (("a", 0), ("b", 5), ("c", 2))]

    api._replicas.all = everybody  # pyright: ignore[reportAttributeAccessIssue]
    if to is None:
        with pytest.raises(RequestError) as caught:
            asyncio.run(api.migrate(asked(), "one"))
        assert (caught.value.refused.status, caught.value.refused.code) == (409, "no_other_replica") and not moved
    else:
        assert asyncio.run(api.migrate(asked(), "one"))["to"] == to and moved == [to]
