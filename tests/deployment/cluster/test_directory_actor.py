"""The directory's actor, without Ray: whom it takes for gone."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError

from deployment.cluster import directory_actor
from deployment.cluster.directory_actor import DirectoryActor
from deployment.cluster.fleet import Load
from deployment.engine.log_lines import LogOptions
from tests.ownership.fake_storage import FakeValues


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Any:
    context = SimpleNamespace(current_actor=SimpleNamespace(watch=SimpleNamespace(remote=lambda: None)))
    values = FakeValues()
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    monkeypatch.setattr(directory_actor, "GcsValues", lambda: values)
    monkeypatch.setattr(directory_actor, "log_to_stderr", lambda form, level: None)
    monkeypatch.setattr(directory_actor, "MAIL_SECONDS", 0.01)
    made: Any = DirectoryActor
    return made.__ray_metadata__.modified_class("app", None, None, LogOptions())


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
