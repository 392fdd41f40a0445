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
from deployment.cluster.names import NAMESPACE, store_name, versioned
from deployment.engine.log_lines import LogOptions
from deployment.ownership.messages import Bring, Gap, Image, Put, Seal
from deployment.ownership.words import NOTHING, Epoch, Member, SessionKey
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


@pytest.mark.parametrize("other", ["chat", "team/vision", "a/v4"])
def test_a_new_store_leaves_the_arenas_of_other_applications_whose_stores_are_being_restarted(
    directory: Path, named: list[dict[str, str]], other: str
):
    store = started(directory, other)
    store._arena.close()  # its process is gone, and its actor is there
    named.append({"name": store_name(other, NODE), "namespace": NAMESPACE})
    asyncio.run(started(directory).end())
    assert list(directory.iterdir()) == [arena_path(directory, versioned(other), NODE)]
    named.clear()
    asyncio.run(started(directory).end())
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("what", ["reach the directory", "forget what was deleted"])
def test_a_store_that_fails_once_to_do_what_it_does_at_each_beat_is_heard_of_all_the_same(
    directory: Path, named: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch, what: str
):
    monkeypatch.setattr(host_store_actor, "BEAT_SECONDS", 0.001)
    monkeypatch.setattr(host_store_actor, "FORGET_SECONDS", 0.0)
    store = started(directory)
    beats: list[str] = []

    async def known() -> None:
        beats.append("reach the directory")
        fails("reach the directory")

    def forgotten(unix: float) -> None:
        beats.append("forget what was deleted")
        fails("forget what was deleted")

    def fails(name: str) -> None:
        if name == what and beats.count(name) == 1:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(store, "_be_known", known)
    monkeypatch.setattr(store._store, "forget_tombstones", forgotten)

    async def scenario() -> None:
        await store.beat()
        async with asyncio.timeout(5):
            while min(map(beats.count, ("reach the directory", "forget what was deleted"))) < 3:
                await asyncio.sleep(0.001)
        await store.end()

    asyncio.run(scenario())


def test_a_store_that_is_void_begins_again_with_a_fresh_arena(directory: Path, named: list[dict[str, str]]):
    store = started(directory)
    before = store._store.member
    store._begin_again()
    assert store._store.member != before
    assert list(directory.iterdir()) == [arena_path(directory, versioned(APP), NODE)]
    asyncio.run(store.end())


def test_a_sessions_images_are_those_that_agree_with_its_log(directory: Path, named: list[dict[str, str]]):
    async def steps() -> None:
        store = started(directory)
        key, epoch = SessionKey("t", "a"), Epoch(1, 1)
        await store.answer(store._store.member, [Seal(key, epoch), Put(key, epoch, NOTHING, (), b"x")])
        assert await store.images(key) == (Image(NOTHING, ()),)
        assert await store.images(SessionKey("t", "b")) == ()
        await store.end()

    asyncio.run(steps())


@pytest.mark.parametrize("whole", [True, False])
def test_an_image_that_nobody_asks_for_again_is_let_go_of(
    directory: Path, named: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch, whole: bool
):
    async def fetch_image(*_: object) -> tuple[tuple[int, ...], bytes]:
        if not whole:
            raise TimeoutError
        return (), bytes(1000)

    async def steps() -> None:
        store = started(directory)
        asked, left = (Bring(SessionKey("t", name), Epoch(0, 0), NOTHING, Member("n", "0" * 32)) for name in "ab")
        assert await store.answer(store._store.member, [asked, left]) == []
        await asyncio.wait(store._bringing.values())
        (answer,) = await store.answer(store._store.member, [asked])
        assert isinstance(answer, Gap) != whole
        assert list(store._bringing) == [(left.key, left.order)], "it may still be asked for"
        async with asyncio.timeout(5):
            while store._bringing:
                await asyncio.sleep(0.01)
        await store.end()

    monkeypatch.setattr(host_store_actor, "fetch_image", fetch_image)
    monkeypatch.setattr(host_store_actor, "BRING_SECONDS", 0.2)
    asyncio.run(steps())
