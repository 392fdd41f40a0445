"""What is answered of a tenant's sessions by a directory that does not know enough yet, or of replicas that go."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from starlette.requests import Request

from deployment.errors import RequestError
from deployment.ownership.messages import Placed, Wait
from deployment.ownership.words import Epoch, SessionKey
from deployment.replica_calls import Replicas
from deployment.session_api import SessionApi
from deployment.wire import Adopted, ExportedSession, Movement, Route

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
    [([("a", "b", "c")], "c"), ([("a", "b")], "b"), ([(), ("a",), ("a", "b")], "b")],
    ids=["all", "some", "one that has just come"],
)
def test_a_session_that_is_moved_to_no_replica_by_name_goes_to_the_emptiest_that_stays(
    stays: list[tuple[str, ...]], to: str
):
    api, moved = moving(stays, "abc")
    assert asyncio.run(api.migrate(asked(), "one"))["to"] == to and moved == [to]


@pytest.mark.parametrize(
    ("stays", "there", "refused"),
    [
        ((), "abc", (503, "session_unavailable")),
        (("a",), "abc", (409, "no_other_replica")),
        ((), "a", (409, "no_other_replica")),
    ],
    ids=["the directory names nobody", "it names the owner", "there is no other"],
)
def test_that_there_is_no_other_replica_is_said_only_if_it_is_known(
    stays: tuple[str, ...], there: str, refused: tuple[int, str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("deployment.session_api.STAYING_SECONDS", 0.0)
    api, moved = moving([stays], there)
    with pytest.raises(RequestError) as caught:
        asyncio.run(api.migrate(asked(), "one"))
    assert (caught.value.refused.status, caught.value.refused.code) == refused and not moved


def moving(stays: list[tuple[str, ...]], there: str) -> tuple[SessionApi, list[str]]:
    """Of a fleet whose replicas answer, and to which of them sessions are moved. `stays`: what the directory says, one
    after the other."""
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
        return [SimpleNamespace(replica=name, sessions={"a": 0, "b": 5, "c": 2}[name]) for name in there]

    api._replicas.all = everybody  # pyright: ignore[reportAttributeAccessIssue]
    return api, moved


def test_a_document_that_goes_out_without_waiting_lets_others_run_between_its_pieces(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("deployment.session_api.PIECE_BYTES", 4)
    document = np.arange(37, dtype=np.uint8)
    sent: list[bytes] = []
    ran: list[int] = []

    async def export(route: Route, key: SessionKey) -> ExportedSession:
        return ExportedSession(document)

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def another() -> None:
        while True:
            ran.append(len(sent))
            await asyncio.sleep(0)

    async def scenario() -> None:
        api = api_of(Directory(0), SimpleNamespace(export_session=SimpleNamespace(remote=export)))
        answer = await api.export(asked(), "one")
        other = asyncio.create_task(another())
        scope = {"type": "http", "asgi": {"spec_version": "2.4"}}
        await answer(scope, cast(Any, None), send)
        other.cancel()

    asyncio.run(scenario())
    assert b"".join(sent) == document.tobytes() and {*range(1, 11)} <= {*ran}
