"""Whose an arena is, and what is no arena: refused in one sentence, never guessed."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from state import arena_file
from state.arena import open_arena
from state.arena_file import arena_path, open_user, sweep
from state.arena_view import ArenaView
from state.errors import ArenaError
from tests.state.arenas import APPLICATION, HEAP, KEY, NODE, SIZE, open_image, open_small, order, shared_directory


@pytest.fixture
def directory() -> Iterator[Path]:
    with shared_directory() as path:
        yield path


@pytest.fixture
def path(directory: Path) -> Path:
    """An arena that nobody has open, with one record."""
    arena = open_small(directory)
    arena.append(KEY, [b"record"])
    arena.close()
    return arena_path(directory, APPLICATION, NODE)


def test_a_fresh_arena_has_a_fresh_incarnation_and_one_that_is_opened_again_keeps_its_own(directory: Path) -> None:
    incarnations: list[str] = []
    for _ in range(2):
        for _ in range(2):
            arena = open_small(directory)
            incarnations.append(arena.incarnation)
            arena.close()
        arena_path(directory, APPLICATION, NODE).unlink()
    first, again, second, _ = incarnations
    assert first == again != second
    assert len(bytes.fromhex(first)) == 16


def test_it_is_closed_to_others_whatever_the_umask_and_all_of_it_is_there(directory: Path) -> None:
    before = os.umask(0)
    try:
        open_small(directory, SIZE + 100).close()
    finally:
        os.umask(before)
    facts = arena_path(directory, APPLICATION, NODE).stat()
    assert stat.S_IMODE(facts.st_mode) == 0o600
    assert facts.st_size == SIZE
    assert facts.st_blocks * 512 >= SIZE


def test_an_arena_that_is_there_keeps_its_size(path: Path) -> None:
    arena = open_small(path.parent, 2 * SIZE)
    assert (arena.size, arena.records(KEY)) == (SIZE, (b"record",))
    arena.close()


# ---------------------------------------------------------------------------------------------------- refused


def check_refused(directory: Path, problem: str) -> None:
    """By the store and by who maps it beside the store; and it stays as it is."""
    path = arena_path(directory, APPLICATION, NODE)
    content = path.read_bytes()
    with pytest.raises(ArenaError, match=problem):
        open_small(directory)
    with pytest.raises(ArenaError, match=problem):
        open_user(directory, APPLICATION, NODE, "0" * 32, writable=False)
    assert path.read_bytes() == content


def test_a_header_with_any_byte_changed_is_refused(path: Path) -> None:
    content = path.read_bytes()
    header_bytes = 1024
    for at in range(header_bytes):
        with pytest.raises(ArenaError, match=r"header: (magic|version|its CRC-32) is"):
            open_image(path.parent, content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])


@pytest.mark.parametrize(
    "length, problem",
    [
        (SIZE - 4096, f"header: size is {SIZE} bytes, but the file has {SIZE - 4096}"),
        (100, "has 100 bytes"),
        (0, "has 0"),
    ],
)
def test_a_file_of_another_size_is_refused(path: Path, length: int, problem: str) -> None:
    os.truncate(path, length)
    check_refused(path.parent, problem)


def test_an_arena_of_another_name_is_refused(path: Path) -> None:
    other = arena_path(path.parent, "other", NODE)
    path.rename(other)
    with pytest.raises(ArenaError, match="belongs to application 'default' on node 'ab12', asked for were 'other'"):
        open_arena("other", NODE, SIZE, path.parent)


def test_a_file_that_others_may_read_is_refused(path: Path) -> None:
    path.chmod(0o640)
    check_refused(path.parent, "has mode 0640, must have 0600")


def test_a_file_of_another_user_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    us = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: us + 1)
    check_refused(path.parent, f"belongs to user {us}, must belong to user {us + 1}")


def test_a_link_and_a_directory_are_refused(path: Path) -> None:
    path.rename(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")
    with pytest.raises(ArenaError, match="cannot be opened: Too many levels of symbolic links"):
        open_small(path.parent)
    path.unlink()
    path.mkdir()
    with pytest.raises(ArenaError, match="cannot be opened: Is a directory"):
        open_small(path.parent)


@pytest.mark.parametrize("at", [4096, 4096 + 8, 4096 + 16, 4096 + 64])
def test_a_damaged_extent_is_refused(path: Path, at: int) -> None:
    content = path.read_bytes()
    with pytest.raises(ArenaError, match="extent"):
        open_image(path.parent, content[:at] + b"\xff" + content[at + 1 :])
    with pytest.raises(ArenaError, match="no extent begins at 4096: the span word there is 0x0"):
        open_image(path.parent, content[:4096] + bytes(HEAP))


@pytest.mark.parametrize("application, node", [("", "ab"), ("a", ""), ("a", "a/b"), ("a", "a.b"), ("ä" * 60, "ab")])
def test_names_that_no_file_can_carry_are_refused(directory: Path, application: str, node: str) -> None:
    with pytest.raises(ArenaError, match="must make a file name of at most 200 characters"):
        open_arena(application, node, SIZE, directory)


# ---------------------------------------------------------------------------------------------------- no room


def test_more_than_there_is_is_refused_with_both_numbers_and_leaves_nothing(directory: Path) -> None:
    with pytest.raises(ArenaError, match=rf"{1 << 60} bytes asked for, \d+ are free in {directory}"):
        open_small(directory, 1 << 60)
    with pytest.raises(ArenaError, match="size is 4096 bytes, must be at least 8192"):
        open_small(directory, 4096)
    assert not list(directory.iterdir())


def test_a_reservation_that_fails_on_the_way_leaves_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ArenaError, match=r"32768 bytes asked for, \d+ are free in .* \(No space left on device\)"):
        open_small(directory)
    assert not list(directory.iterdir())


def test_shared_memory_does_not_count_for_more_than_the_machine_has(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_file, "_available_memory", lambda: 1000)
    with pytest.raises(ArenaError, match="32768 bytes asked for, 1000 are free"):
        open_small(directory)


def test_a_directory_that_is_not_there_is_refused(directory: Path) -> None:
    with pytest.raises(ArenaError, match=r"cannot be made in .*/missing: No such file or directory"):
        open_small(directory / "missing")


# ---------------------------------------------------------------------------------------------------- who uses it


def test_a_second_store_is_refused_while_the_first_has_it(path: Path) -> None:
    arena = open_small(path.parent)
    with pytest.raises(ArenaError, match="is in use by another host store process"):
        open_small(path.parent)
    document = arena.put(KEY, order(1), (), b"document")
    held = arena.document(document)
    arena.close()
    open_small(path.parent).close()  # though someone still looks at what was there
    assert held == b"document"


def test_a_view_is_of_the_arena_that_was_meant(path: Path) -> None:
    with pytest.raises(ArenaError, match=r"asked for was 0{32}: it was made anew"):
        ArenaView(APPLICATION, NODE, "0" * 32, directory=path.parent)
    path.unlink()
    with pytest.raises(ArenaError, match="is not there"):
        ArenaView(APPLICATION, NODE, "0" * 32, directory=path.parent)


def test_a_sweep_takes_arenas_of_nobody_that_nobody_has_open(directory: Path) -> None:
    names = [("default", "live"), ("my app/ä.b", "live"), ("default", "dead"), ("my app/ä.b", "dead")]
    for application, node in names:
        open_arena(application, node, SIZE, directory).close()
    served = open_arena("served", "dead", SIZE, directory)
    mapped = open_arena("mapped", "dead", SIZE, directory)
    view = ArenaView("mapped", "dead", mapped.incarnation, directory=directory)
    mapped.close()
    arena_path(directory, "open", "dead").touch(mode=0o644)
    (directory / "something.arena").touch()
    live = names[:2]
    removed = sweep(directory, live)
    assert removed == tuple(sorted(arena_path(directory, *name) for name in names[2:]))
    assert len(list(directory.iterdir())) == 6
    served.close()
    view.close()
    assert len(sweep(directory, live)) == 2
    assert sweep(directory, live) == ()


def test_an_arena_that_is_swept_while_it_is_opened_is_made_anew(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = arena_file._open_ours

    def swept(path: Path, *, writable: bool) -> int:
        descriptor = opened(path, writable=writable)
        path.unlink()
        return descriptor

    monkeypatch.setattr(arena_file, "_open_ours", swept)
    arena = open_small(path.parent)
    assert arena.keys() == ()
    assert path.exists()
    arena.close()
