"""Named bytes are there whole or not at all, for us alone, and under no name but a plain one."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from state.byte_store import DirectoryStore, check_name
from state.errors import ExistsError, StateError, StoreError
from tests.state.model_files import ModelFiles


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "durable")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_bytes_come_back(store: DirectoryStore) -> None:
    store.put("v1/a/one", b"first")
    store.put("v1/a/one", memoryview(bytearray(b"second")))
    store.create("v1/b/two", b"")
    assert store.get("v1/a/one") == b"second"
    assert store.get("v1/b/two") == b""
    assert store.get("v1/b/three") is None
    assert store.get("v1/c/three") is None


def test_a_listing_is_by_prefix(store: DirectoryStore) -> None:
    for name in ("v1/a/one", "v1/a/other", "v1/b/one", "v1/ab/one"):
        store.put(name, name.encode())
    assert sorted(entry.name for entry in store.list("v1/a/o")) == ["v1/a/one", "v1/a/other"]
    assert sorted(entry.name for entry in store.list("v1/a")) == ["v1/a/one", "v1/a/other", "v1/ab/one"]
    assert {entry.name: entry.size for entry in store.list("v1/b/")} == {"v1/b/one": 8}
    assert len(list(store.list(""))) == 4
    assert list(store.list("v2/")) == []


def test_what_exists_is_not_overwritten_by_create(store: DirectoryStore, tmp_path: Path) -> None:
    store.create("v1/one", b"first")
    with pytest.raises(ExistsError, match="v1/one"):
        store.create("v1/one", b"second")
    assert store.get("v1/one") == b"first"
    assert [path.name for path in (tmp_path / "durable/v1").iterdir()] == ["one"]


def test_deleting_passes_over_what_is_not_there(store: DirectoryStore) -> None:
    store.put("v1/one", b"1")
    store.delete(["v1/none", "v1/one", "v9/none"])
    assert list(store.list("")) == []


def test_files_and_directories_are_ours_alone(store: DirectoryStore, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store.put("v1/aa/one", b"1")
    finally:
        os.umask(before)
    root = tmp_path / "durable"
    assert [mode(path) for path in (root, root / "v1", root / "v1/aa")] == [0o700] * 3
    assert mode(root / "v1/aa/one") == 0o600


def test_an_empty_directory_that_others_may_enter_is_closed(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    DirectoryStore(tmp_path)
    assert mode(tmp_path) == 0o700


def test_a_directory_with_content_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "homework").write_text("mine")
    tmp_path.chmod(0o755)
    with pytest.raises(StoreError, match=r"mode 0755 and is not empty, must be 0700"):
        DirectoryStore(tmp_path)
    assert mode(tmp_path) == 0o755


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StoreError, match=r"open .*file"):
        DirectoryStore(tmp_path / "file")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/etc/passwd",
        "../x",
        "a/../b",
        "a//b",
        "a/",
        ".hidden",
        "A",
        "a b",
        "a\0",
        "a\n",
        "x" * 241,
        "ü",
        "tmp-1-ab",
    ],
)
def test_a_name_that_could_point_elsewhere_is_refused(store: DirectoryStore, name: str) -> None:
    with pytest.raises(StateError, match="name of stored bytes"):
        check_name(name)
    for act in (lambda: store.put(name, b""), lambda: store.create(name, b""), lambda: store.get(name)):
        with pytest.raises(StateError, match="name of stored bytes"):
            act()


def test_symbolic_links_and_foreign_files_are_no_part_of_it(store: DirectoryStore, tmp_path: Path) -> None:
    store.put("v1/one", b"1")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "durable/v1/link").symlink_to(tmp_path / "secret")
    (tmp_path / "durable/v1/folder").symlink_to(tmp_path)
    (tmp_path / "durable/v1/.nfs0001").write_text("?")
    (tmp_path / "durable/lost+found").mkdir()
    assert [entry.name for entry in store.list("")] == ["v1/one"]
    with pytest.raises(StoreError):
        store.get("v1/link")


@pytest.mark.parametrize("place", ["v1", "v1/segments", "v1/segments/ab"])
@pytest.mark.parametrize("what", ["link", "file"])
def test_what_stands_in_a_directorys_place_is_refused_because_its_content_would_not_be_counted(
    store: DirectoryStore, tmp_path: Path, place: str, what: str
) -> None:
    elsewhere, stands = tmp_path / "elsewhere", tmp_path / "durable" / place
    elsewhere.mkdir()
    stands.parent.mkdir(parents=True, exist_ok=True)
    stands.symlink_to(elsewhere) if what == "link" else stands.write_bytes(b"")
    for write in (store.put, store.create):
        with pytest.raises(StoreError, match=f"open {place}: .* must be a directory"):
            write("v1/segments/ab/one", b"1")
    assert list(elsewhere.iterdir()) == []


def test_a_leftover_is_listed_and_can_be_deleted(store: DirectoryStore, tmp_path: Path) -> None:
    store.put("v1/one", b"1")
    (tmp_path / "durable/v1/tmp-1700000000-00ff").write_bytes(b"123")
    assert {entry.name: entry.size for entry in store.list("v1/")} == {"v1/one": 1, "v1/tmp-1700000000-00ff": 3}
    store.delete(["v1/tmp-1700000000-00ff"])
    assert [entry.name for entry in store.list("")] == ["v1/one"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("name, before", [("v1/one", b"old"), ("v1/two", None)])
def test_a_write_that_fails_at_any_call_leaves_what_was_there(name: str, before: bytes | None, code: int) -> None:
    failures = 0
    for fail_at in range(1, 12):
        files = ModelFiles()
        store = DirectoryStore(Path("/root"), files)
        store.put("v1/one", b"old")
        files.calls, files.fail_at, files.code = 0, fail_at, code
        write = store.put if before else store.create
        try:
            write(name, b"new bytes")
        except StoreError as error:
            failures += error.code == code and os.strerror(code) in str(error)
            assert store.get(name) in (before, b"new bytes")
        else:
            files.fail_at = 0
            assert store.get(name) == b"new bytes"
        assert len(files.paths()) == len(list(store.list("v1/")))
    assert failures >= 6


def test_a_create_that_failed_can_be_tried_again() -> None:
    for fail_at in range(1, 12):
        files = ModelFiles(fail_at=fail_at, code=errno.EIO)
        store = DirectoryStore(Path("/root"), files)
        try:
            store.create("v1/one", b"new")
        except StoreError:
            store.create("v1/one", b"new")
        files.fail_at = 0
        assert store.get("v1/one") == b"new"
