"""What all replicas are asked is told by those that answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import RayActorError

from deployment import replica, replica_calls
from deployment.engine.errors import EngineError
from deployment.errors import RequestError, unknown_session
from deployment.ownership.messages import Placed
from deployment.ownership.words import Epoch, SessionKey
from deployment.replica_calls import Replicas
from deployment.session_api import SessionApi
from deployment.wire import NotHere, Route


def fleet(*replicas: Callable[[], Awaitable[Any]]) -> Any:
    """What Serve gives to who asks all replicas: each of them answers as it does."""

    async def sent() -> list[Any]:
        return [SimpleNamespace(get_async=replica) for replica in replicas]

    return SimpleNamespace(broadcast=lambda method: SimpleNamespace(_fetch_replica_results_async=sent))


def told(answer: Any) -> Callable[[], Awaitable[Any]]:
    async def get() -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return get


async def stuck() -> None:
    await asyncio.sleep(1e9)


def test_a_replica_whose_engine_is_in_a_long_step_is_left_out_and_the_others_are_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replica, "MEASURED_SECONDS", 0.01)
    busy: Any = replica.EngineReplica.__new__(replica.EngineReplica)
    busy._service = SimpleNamespace(call=lambda command: asyncio.sleep(20))

    assert asyncio.run(Replicas(fleet(busy.measured, told("another")), cast(Any, None)).measured()) == ["another"]


@pytest.mark.parametrize("lost", [told(RayActorError()), told(EngineError("internal_error", "gone")), stuck])
def test_a_replica_that_is_dead_or_cut_off_keeps_no_others_answer_back(
    lost: Callable[[], Awaitable[Any]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(replica_calls, "MEASURED_SECONDS", 0.05)
    replicas = Replicas(fleet(told("a"), lost, told("b")), cast(Any, None))
    assert {*asyncio.run(replicas.measured())} == {"a", "b"}
    with pytest.raises(RequestError) as caught:
        asyncio.run(Replicas(fleet(lost), cast(Any, None)).measured())
    assert caught.value.refused.status == 503


@pytest.mark.parametrize("lost", [True, False])
def test_a_replica_that_says_nothing_is_waited_for_until_its_lease_is_over(lost: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("deployment.replica_watch.SILENT_SECONDS", 0.02)
    asked: list[str | None] = []

    async def show(route: Route) -> str:
        asked.append(route.replica)
        await asyncio.sleep(0.1 if route.replica == "b" or not lost else 1e9)
        return f"of {route.replica}"

    async def is_lost(replica: str) -> bool:
        return replica == "a" and lost

    async def staying(beside: str) -> tuple[str, ...]:
        return ("b",)

    engine: Any = SimpleNamespace(show=SimpleNamespace(remote=show))
    replicas = Replicas(engine, cast(Any, SimpleNamespace(is_lost=is_lost, staying=staying)))
    assert asyncio.run(replicas.ask("show", Route("x", "a"))) == ("of b" if lost else "of a")
    assert asked == (["a", "b"] if lost else ["a"])


@pytest.mark.parametrize("first", ["dies", "is cut off", "is not the owner", "knows of none"])
def test_a_delete_whose_replica_was_lost_and_that_another_finds_done_has_deleted(
    first: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("deployment.replica_watch.SILENT_SECONDS", 0.02)
    monkeypatch.setattr(replica_calls, "AGAIN_SECONDS", 0.0)
    key = SessionKey("t" * 64, "one")
    asked: list[str | None] = []

    async def delete(route: Route, key: SessionKey) -> Any:
        asked.append(route.replica)
        if len(asked) == 1 and first != "knows of none":
            await asyncio.sleep(1e9 if first == "is cut off" else 0)
            if first == "dies":
                raise RayActorError
            return NotHere("a", "b")
        return unknown_session(key.session).refused

    async def none(*_: Any, **how: Any) -> tuple[()]:
        return ()

    cluster = SimpleNamespace(locate=lambda key: told(Placed(key, Epoch(1, 1), "a", ()))(), suspect=none, staying=none)
    cluster.is_lost = lambda replica: told(first == "is cut off")()
    engine: Any = SimpleNamespace(delete=SimpleNamespace(remote=delete))
    sessions = SessionApi(Replicas(engine, cast(Any, cluster)), cast(Any, cluster), 0)
    deleting = sessions.delete(cast(Any, SimpleNamespace(state=SimpleNamespace(tenant=key.tenant))), key.session)
    if first in ("dies", "is cut off"):
        assert asyncio.run(deleting)["deleted"]
    else:
        with pytest.raises(RequestError) as caught:
            asyncio.run(deleting)
        assert caught.value.refused.status == 404, "nobody has deleted it for who asks"
    assert len(asked) == (1 if first == "knows of none" else 2)
