"""A host store's actor, without Ray: what it leaves on its node, and what it keeps in its process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployment.cluster import host_store_actor
from deployment.cluster.host_store_actor import HostStoreActor
from deployment.cluster.names import versioned
from deployment.engine.log_lines import LogOptions
from state.arena_file import arena_path
from tests.ownership.fake_storage import FakeValues
from tests.state.arenas import shared_directory

APP, NODE = "team/chat", "7" * 56


@pytest.fixture
def directory() -> Iterator[Path]:
    with shared_directory() as path:
        yield path


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """The cluster's named actors; there is no Ray."""
    listed: list[dict[str, str]] = []
    values = FakeValues()
    context = SimpleNamespace(
        get_node_id=lambda: NODE, current_actor=SimpleNamespace(beat=SimpleNamespace(remote=lambda: None))
    )
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    monkeypatch.setattr("ray.util.list_named_actors", lambda all_namespaces: listed)
    monkeypatch.setattr(host_store_actor, "GcsValues", lambda: values)
    monkeypatch.setattr(host_store_actor, "log_to_stderr", lambda form, level: None)
    return listed


def started(directory: Path, app: str = APP) -> Any:
    made: Any = HostStoreActor
    return made.__ray_metadata__.modified_class(app, 1 << 20, directory, LogOptions())


def test_an_application_that_is_taken_down_leaves_nothing_in_shared_memory(
    directory: Path, named: list[dict[str, str]]
):
    store = started(directory)
    assert list(directory.iterdir()) == [arena_path(directory, versioned(APP), NODE)]
    asyncio.run(store.end())
    assert list(directory.iterdir()) == []


def test_a_store_that_is_void_begins_again_with_a_fresh_arena(directory: Path, named: list[dict[str, str]]):
    store = started(directory)
    before = store._store.member
    store._begin_again()
    assert store._store.member != before
    assert list(directory.iterdir()) == [arena_path(directory, versioned(APP), NODE)]
    asyncio.run(store.end())
