"""The durable tier under a URL: the same store, whoever keeps the bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from deployment.stores import FsspecStore, open_store
from state.byte_store import ByteStore, DirectoryStore
from state.errors import ExistsError, StateError, StoreError
from state.names import Epoch, Order
from tests.state.stores import KEY, Clock, data_of, document, open_tier, publish, segment


@pytest.fixture
def store() -> Iterator[ByteStore]:
    yield open_store("memory://sessions/durable")
    files = fsspec.filesystem("memory")
    if files.exists("/sessions"):
        files.rm("/sessions", recursive=True)


def test_bytes_come_back_under_a_url(store: ByteStore) -> None:
    store.put("v1/a/one", b"first")
    store.put("v1/a/one", memoryview(b"second"))
    assert store.get("v1/a/one") == b"second"
    assert store.get("v1/a/two") is None
    assert [(entry.name, entry.size) for entry in store.list("v1/a/o")] == [("v1/a/one", 6)]
    assert list(store.list("v1/b/")) == []
    store.delete(["v1/a/one", "v1/a/none"])
    assert list(store.list("v1/")) == []


def test_what_exists_is_not_overwritten_by_create(store: ByteStore) -> None:
    store.create("v1/one", b"first")
    with pytest.raises(ExistsError, match="v1/one"):
        store.create("v1/one", b"second")
    assert store.get("v1/one") == b"first"


def test_a_name_that_could_point_elsewhere_is_refused(store: ByteStore) -> None:
    for name in ("../x", "/x", "a/../b"):
        with pytest.raises(StateError, match="name of stored bytes"):
            store.put(name, b"")


def test_a_listing_never_comes_from_a_cache(store: ByteStore) -> None:
    other = open_store("memory://sessions/durable")
    assert list(store.list("v1/")) == []
    other.put("v1/one", b"1")
    assert len(list(store.list("v1/"))) == 1


def test_the_durable_tier_works_on_a_url(store: ByteStore) -> None:
    clock = Clock()
    contents = [data_of(letter) for letter in "abc"]
    tier = open_tier(store, clock)
    publish(tier, "one", contents[:2])
    publish(tier, "two", contents[1:], sequence=2)
    assert tier.sweep().segments == 1
    again = open_tier(open_store("memory://sessions/durable"), clock)
    assert again.latest(KEY) == (Order(Epoch(1, 1), 2), document("two"))
    assert [again.segment(segment(data).sha256) for data in contents] == [None, *contents[1:]]
    again.delete(KEY, Epoch(1, 1))
    assert tier.latest(KEY) is None


def test_errors_of_the_file_system_are_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    store = open_store("memory://sessions/durable")
    assert isinstance(store, FsspecStore)
    for name in ("pipe_file", "cat_file", "find", "rm_file"):
        monkeypatch.setattr(type(fsspec.filesystem("memory")), name, refuse)
    acts = {
        "put": lambda: store.put("v1/one", b""),
        "create": lambda: store.create("v1/one", b""),
        "get": lambda: store.get("v1/one"),
        "list": lambda: list(store.list("v1/")),
        "delete": lambda: store.delete(["v1/one"]),
    }
    for operation, act in acts.items():
        with pytest.raises(StoreError, match=f"{operation} v1.*Permission denied") as refused:
            act()
        assert refused.value.code == 13


@pytest.mark.parametrize("place", ["{}", "file://{}"])
def test_a_path_is_a_directory_store(tmp_path: Path, place: str) -> None:
    store = open_store(place.format(tmp_path / "durable"))
    assert isinstance(store, DirectoryStore)
    store.put("v1/one", b"1")
    assert (tmp_path / "durable/v1/one").read_bytes() == b"1"


@pytest.mark.parametrize("place", ["durable", "./durable", "nosuchscheme://bucket/x", ""])
def test_a_place_that_cannot_be_is_refused_by_name(place: str) -> None:
    with pytest.raises(StateError, match=f"durable store: '{place}'"):
        open_store(place)


@pytest.mark.parametrize(
    "place",
    ["local:///tmp/sessions", "C:\\sessions", "simplecache::memory://sessions", "dir::file:///tmp", "zip://", "s4://b"],
)
def test_a_place_that_is_no_store_of_its_own_is_refused_by_name(place: str) -> None:
    with pytest.raises(StateError, match=r"durable store: ") as caught:
        open_store(place)
    assert repr(place) in str(caught.value)
