"""A replica's way to the others, without Ray."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from deployment.cluster import transport
from deployment.cluster.fleet import Load
from deployment.cluster.names import store_name, versioned
from deployment.cluster.transport import Cluster, RayTransport
from deployment.ownership.messages import Look
from deployment.ownership.registry import Registry
from deployment.ownership.words import Epoch, Member, SessionKey
from tests.ownership.fake_storage import FakeValues

APP, NODE = "team/chat", "7" * 56
STORE = Member(NODE, "0" * 32)


async def answered(member: Member, messages: tuple[Look, ...]) -> tuple[Look, ...]:
    return messages


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> RayTransport:
    """Of a cluster with one store."""
    context = SimpleNamespace(get_node_id=lambda: NODE, current_actor=None)
    actors = {store_name(APP, NODE): SimpleNamespace(answer=SimpleNamespace(remote=answered))}
    values = FakeValues()
    Registry(values, versioned(APP)).register(STORE)
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    monkeypatch.setattr(transport, "start_directory", lambda *args: None)
    monkeypatch.setattr(transport, "GcsValues", lambda: values)
    monkeypatch.setattr(transport, "named_actor", lambda name: actors[name])
    return RayTransport(Cluster(APP), APP, "a", lambda: Load(1, 0))


def test_requests_that_keep_all_threads_busy_keep_no_owner_from_its_stores(link: RayTransport):
    over = threading.Event()
    asked = (Look(SessionKey("t" * 64, "one"), Epoch(1, 1)),)

    async def steps() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        busy = [asyncio.create_task(asyncio.to_thread(over.wait)) for _ in range(3)]
        try:
            async with asyncio.timeout(5):
                assert await link.stores() == (STORE,)
                assert await link.ask_store(STORE, asked) == asked
        finally:
            over.set()
            await asyncio.gather(*busy)

    asyncio.run(steps())
