"""The directory's actor, without Ray: whom it takes for gone, and which sessions of an older version it finds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError

from deployment.cluster import directory_actor
from deployment.cluster.directory_actor import DirectoryActor
from deployment.cluster.fleet import Load
from deployment.cluster.serve_states import ServeReplica
from deployment.engine.log_lines import LogOptions
from deployment.ownership.messages import Placed
from deployment.ownership.words import Epoch, Order, SessionKey
from tests.ownership.fake_storage import FakeValues


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], Any]:
    """A directory with this durable tier."""
    context = SimpleNamespace(current_actor=SimpleNamespace(watch=SimpleNamespace(remote=lambda: None)))
    values = FakeValues()
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    monkeypatch.setattr(directory_actor, "GcsValues", lambda: values)
    monkeypatch.setattr(directory_actor, "log_to_stderr", lambda form, level: None)
    monkeypatch.setattr(directory_actor, "MAIL_SECONDS", 0.01)
    made: Any = DirectoryActor
    return lambda durable: made.__ray_metadata__.modified_class("app", durable, None, LogOptions())


@pytest.fixture
def directory(make: Callable[[str | None], Any]) -> Any:
    return make(None)


class Handle:
    """An actor whose calls end with `error`."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.__ray_ready__ = SimpleNamespace(remote=self._ready)

    async def _ready(self) -> None:
        raise self._error


@pytest.mark.parametrize(
    "error, gone",
    [
        (ActorUnavailableError("its node cannot be reached", None), False),
        (TimeoutError(), False),
        (ActorDiedError(), True),
        (RayActorError(), True),
    ],
)
def test_a_replica_that_is_unreachable_for_a_moment_is_not_gone(directory: Any, error: Exception, gone: bool):
    async def steps() -> None:
        await directory.renew("r1", "n1", Handle(error), [], Load(0, 0))
        assert await directory.suspect("r1") == gone
        assert await directory.is_lost("r1") == gone

    asyncio.run(steps())


def test_what_an_older_version_made_durable_before_its_end_is_found(
    make: Callable[[str | None], Any], monkeypatch: pytest.MonkeyPatch
):
    durable = [(SessionKey("t" * 64, "early"), Order(Epoch(5, 1), 3))]
    ours = ServeReplica("r1", "EngineReplica", "RUNNING")
    older = ServeReplica("r0", "EngineReplica", "STOPPING")
    there = [ours, older]

    async def serve_replicas(app: str) -> list[ServeReplica]:
        return there

    monkeypatch.setattr(directory_actor, "_durable_sessions", lambda place, key: list(durable))
    monkeypatch.setattr(directory_actor, "serve_replicas", serve_replicas)
    monkeypatch.setattr(directory_actor, "remove_other_versions", lambda app: 2)

    async def steps() -> None:
        directory = make("/somewhere")
        directory._scanning = asyncio.create_task(directory._scan_durable())
        assert await directory.resumed() == (1, "/somewhere")
        await directory.renew("r1", "n1", Handle(TimeoutError()), [], Load(4, 0))
        await directory._look_at_serve()
        durable.append((late := SessionKey("t" * 64, "late"), Order(Epoch(5, 2), 8)))
        assert await directory.locate(late) is None
        there.remove(older)
        await directory._look_at_serve()
        async with asyncio.timeout(10):
            while not isinstance(await directory.locate(late), Placed):
                await asyncio.sleep(0.01)
        directory._scanning.cancel()

    asyncio.run(steps())
