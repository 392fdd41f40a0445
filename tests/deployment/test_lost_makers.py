"""A replica makes what it was asked for, or takes it away, and is lost before it says so: who asked has it anyhow."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError
from starlette.requests import Request

from deployment.errors import Refused, RequestError, session_exists
from deployment.ownership.messages import Placed
from deployment.ownership.words import Epoch, SessionKey
from deployment.replica_calls import Replicas
from deployment.session_api import SessionApi
from deployment.wire import Adopted, SessionInfo
from state.session_record import ForkPoint

TENANT = "t" * 64


class Fleet:
    """An engine's handle and the directory: `dies` at its first call that changes something, once it has done so."""

    def __init__(self, dies: bool = True) -> None:
        self.sessions: set[str] = {"s"}
        self.points: list[ForkPoint] = []
        self.tokens = 20
        self._dies = dies

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda route, *args: getattr(self, f"_{method}")(*args))

    async def _done(self, answer: Any) -> Any:
        dies, self._dies = self._dies, False
        if dies:
            raise RayActorError
        return answer

    async def _create_session(self, key: SessionKey, *_: Any) -> Any:
        if key.session in self.sessions:
            return session_exists(key.session).refused
        self.sessions.add(key.session)
        return await self._done(Adopted("a", Epoch(1, 1), "none", 0))

    async def _fork(self, parent: SessionKey, child: SessionKey, at: Any) -> Any:
        return await self._create_session(child)

    async def _adopt(self, key: SessionKey) -> Any:
        return Adopted("b", Epoch(1, 2), "host", 0)

    async def _checkpoint(self, key: SessionKey, name: str) -> Any:
        if any(point.name == name for point in self.points):
            return Refused(409, "checkpoint_exists", "there is one")
        self.points.append(ForkPoint(None, self.tokens, 1, self.tokens - 1, 0, name))
        return await self._done(self.points[-1])

    async def _delete_checkpoint(self, key: SessionKey, name: str) -> Any:
        left = [point for point in self.points if point.name != name]
        if left == self.points:
            return Refused(404, "checkpoint_not_found", "there is none")
        self.points = left
        return await self._done(True)

    async def _session_info(self, key: SessionKey) -> Any:
        return SessionInfo("b", Epoch(1, 2), self.tokens, 0, None, (), (), fork_points=tuple(self.points))

    async def locate(self, key: SessionKey) -> Placed | None:
        return Placed(key, Epoch(1, 1), "a", ()) if key.session in self.sessions else None

    async def suspect(self, replica: str) -> None: ...

    async def is_lost(self, replica: str) -> bool:
        return False


def request(**body: Any) -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    return Request({"type": "http", "method": "POST", "path": "/", "headers": [], "state": {"tenant": TENANT}}, receive)


def told(fleet: Fleet, call: Callable[[SessionApi], Awaitable[Any]]) -> Any:
    both: Any = fleet
    return asyncio.run(_awaited(call(SessionApi(Replicas(both, both), both, 1))))


async def _awaited(coming: Awaitable[Any]) -> Any:
    return await coming


def test_who_makes_a_session_has_it_though_its_maker_is_gone():
    made = told(Fleet(), lambda api: api.create(request(id="new")))
    assert (made["id"], made["replica"], made["epoch"]) == ("new", "b", "1.2")
    forked = told(Fleet(), lambda api: api.fork(request(id="child"), "s"))
    assert (forked["id"], forked["parent"], forked["replica"]) == ("child", "s", "b")


def test_a_session_that_was_there_before_is_nobodys_new_one():
    for call in (lambda api: api.create(request(id="s")), lambda api: api.fork(request(id="s"), "s")):
        with pytest.raises(RequestError) as refused:
            told(Fleet(), call)
        assert refused.value.refused.code == "session_exists"


@pytest.mark.parametrize("body", [{"name": "here"}, {}])
def test_who_makes_a_checkpoint_has_one_though_its_maker_is_gone(body: dict[str, Any]):
    fleet = Fleet()
    made = told(fleet, lambda api: api.checkpoint(request(**body), "s"))
    assert [point.name for point in fleet.points] == [made["name"]] and made["frontier"] == 19


def test_a_checkpoint_of_an_older_place_is_not_the_one_that_was_asked_for():
    fleet = Fleet()
    fleet.points = [ForkPoint(None, 10, 1, 9, 0, "here"), ForkPoint(None, 20, 1, 19, 0, "end")]
    checkpoint = fleet._checkpoint

    async def dies_first(key: SessionKey, name: str) -> Any:
        fleet._checkpoint = checkpoint
        raise RayActorError

    fleet._checkpoint = dies_first
    with pytest.raises(RequestError) as refused:
        told(fleet, lambda api: api.checkpoint(request(name="here"), "s"))
    assert refused.value.refused.code == "checkpoint_exists"


def test_who_deletes_a_checkpoint_is_told_so_though_who_did_it_is_gone():
    fleet = Fleet()
    fleet.points = [ForkPoint(None, 10, 1, 9, 0, "here")]
    assert told(fleet, lambda api: api.delete_checkpoint(request(), "s", "here"))["deleted"] and not fleet.points
    with pytest.raises(RequestError) as refused:
        told(fleet, lambda api: api.delete_checkpoint(request(), "s", "here"))
    assert refused.value.refused.status == 404
