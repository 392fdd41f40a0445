"""The directory's actor, without Ray: whom it takes for gone, what it writes into its log, which sessions of an older
version it finds."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError

from deployment.cluster import directory_actor, strangers
from deployment.cluster.directory_actor import DirectoryActor
from deployment.cluster.fleet import Load
from deployment.cluster.serve_states import ServeReplica
from deployment.engine.log_lines import LogOptions
from deployment.ownership.messages import Placed
from deployment.ownership.words import Epoch, Order, SessionKey
from tests.ownership.fake_storage import FakeValues


def made(patch: pytest.MonkeyPatch, values: FakeValues, durable: str | None = None) -> Any:
    """A directory of the cluster that has these values."""
    context = SimpleNamespace(current_actor=SimpleNamespace(watch=SimpleNamespace(remote=lambda: None)))
    patch.setattr("ray.get_runtime_context", lambda: context)
    patch.setattr(directory_actor, "GcsValues", lambda: values)
    patch.setattr(directory_actor, "log_to_stderr", lambda form, level: None)
    patch.setattr(directory_actor, "MAIL_SECONDS", 0.01)
    actor: Any = DirectoryActor
    return actor.__ray_metadata__.modified_class("app", durable, None, LogOptions())


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Any:
    return made(monkeypatch, FakeValues())


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


@pytest.mark.parametrize(
    ("mode", "addresses", "warns"),
    [
        ("disabled", ["127.0.0.1", "192.0.2.10"], True),
        ("disabled", ["head.example.org"], True),
        ("disabled", ["127.0.0.1", "::1", "localhost"], False),
        ("token", ["192.0.2.10"], False),
    ],
)
def test_a_cluster_that_lets_strangers_run_code_is_said_to_once(
    directory: Any, monkeypatch: pytest.MonkeyPatch, serve_log: pytest.LogCaptureFixture,
    mode: str, addresses: list[str], warns: bool,
):  # fmt: skip
    monkeypatch.setattr(strangers, "is_token_auth_enabled", lambda: mode == "token")
    nodes = [{"NodeID": name, "NodeManagerAddress": name, "Alive": True} for name in addresses]
    left = {"NodeID": "left", "NodeManagerAddress": "192.0.2.99", "Alive": False}
    monkeypatch.setattr("ray.nodes", lambda: [*nodes, left])

    async def steps() -> None:
        for _ in range(3):
            await directory._look_around()

    with serve_log.at_level(logging.WARNING, "ray.serve"):
        asyncio.run(steps())
    told = [record.getMessage() for record in serve_log.records]
    assert len(told) == warns and all("RAY_AUTH_MODE=token" in one and addresses[-1] in one for one in told)


def test_whether_ray_has_a_token_is_what_its_environment_says(monkeypatch: pytest.MonkeyPatch):
    """Ray reads it once; so in a process of its own."""
    asks = "from deployment.cluster.strangers import let_in; "
    asks += "print(let_in([{'NodeManagerAddress': '192.0.2.1', 'Alive': True}]))"

    def told(mode: str) -> str:
        environment = os.environ | {"RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": "0" * 64}
        return subprocess.run(
            [sys.executable, "-c", asks], env=environment, capture_output=True, text=True, check=True
        ).stdout

    assert told("token") == "None\n" and "192.0.2.1 can run code" in told("disabled")


@pytest.mark.parametrize("count", [12, 0])
def test_how_many_sessions_a_new_cluster_goes_on_with_is_in_the_log_and_told_and_only_there(
    monkeypatch: pytest.MonkeyPatch, serve_log: pytest.LogCaptureFixture, count: int
):
    kept = [(SessionKey("t" * 64, f"s{number}"), Order(Epoch(5, 1), 1)) for number in range(count)]
    monkeypatch.setattr(directory_actor, "_durable_sessions", lambda place, key_env: kept)

    async def scanned(directory: Any) -> Any:
        scanning = asyncio.create_task(directory._scan_durable())
        resumed = await directory.resumed()
        scanning.cancel()
        return resumed

    with serve_log.at_level(logging.INFO, "ray.serve"):
        values = FakeValues()
        assert asyncio.run(scanned(made(monkeypatch, values, "/kept/here"))) == (count, "/kept/here")
        said = [record.getMessage() for record in serve_log.records]
        assert said == ([f"resumed {count} sessions from /kept/here"] if count else [])
        assert asyncio.run(scanned(made(monkeypatch, values, "/kept/here"))) is None, "it was only started again"
    assert [record.getMessage() for record in serve_log.records] == said


def test_what_an_older_version_made_durable_before_its_end_is_found(
    monkeypatch: pytest.MonkeyPatch,
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
        directory = made(monkeypatch, FakeValues(), "/somewhere")
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


def test_many_questions_for_who_stays_make_one_look_and_one_that_goes_makes_its_own(
    directory: Any, monkeypatch: pytest.MonkeyPatch
):
    looks: list[str] = []
    there = [ServeReplica(name, "EngineReplica", "RUNNING") for name in ("r1", "r2")]

    async def serve_replicas(app: str) -> list[ServeReplica]:
        looks.append(app)
        await asyncio.sleep(0.01)
        return list(there)

    monkeypatch.setattr(directory_actor, "serve_replicas", serve_replicas)
    monkeypatch.setattr(directory_actor, "WATCH_SECONDS", 1e9)

    async def steps() -> None:
        for name in ("r1", "r2"):
            await directory.renew(name, "n1", Handle(TimeoutError()), [], Load(4, 0))
        directory._alone = True
        assert await asyncio.gather(*[directory.staying("") for _ in range(50)]) == [("r1", "r2")] * 50
        assert await directory.staying("") == ("r1", "r2") and len(looks) == 1
        there[:] = [ServeReplica(name, "EngineReplica", "STOPPING") for name in ("r1", "r2")]
        assert await directory.staying("r1") == () and len(looks) == 2, "the application ends as a whole"
        monkeypatch.setattr(directory_actor, "WATCH_SECONDS", 0.0)
        assert await directory.staying("") == () and len(looks) == 3

    asyncio.run(steps())
