"""Where do named bytes lie, whole or not at all? The seam under the durable tier, and its directory implementation."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from state.errors import ExistsError, StateError, StoreError
from state.files import Files, OsFiles

Bytes = bytes | bytearray | memoryview

MAX_NAME = 240
"""Characters of a name; its parts between slashes are lower-case letters, digits, dot, dash and underscore."""
_NAME = re.compile(r"[0-9a-z][0-9a-z._-]*(/[0-9a-z][0-9a-z._-]*)*")
_LEFTOVER = re.compile(r"tmp-(\d{1,16})-[0-9a-f]+")


@dataclass(frozen=True)
class Entry:
    """A stored name and its size in bytes."""

    name: str
    size: int


class ByteStore(Protocol):
    """Named bytes. A name is there with all of its bytes, durably, or not at all. Thread safe.

    All methods raise `StoreError` when the store fails, and `StateError` for a name that breaks the rules of
    `check_name`. Listings may hold leftovers (`leftover_time`) of writers that died.
    """

    def put(self, name: str, data: Bytes) -> None:
        """Stores the bytes, in place of what had the name."""
        ...

    def create(self, name: str, data: Bytes) -> None:
        """Stores the bytes under a name that is free, else raises `ExistsError`."""
        ...

    def get(self, name: str) -> bytes | None:
        """The bytes, None if the name is not there."""
        ...

    def list(self, prefix: str) -> Iterator[Entry]:
        """All names that start with `prefix`, in no particular order."""
        ...

    def delete(self, names: Collection[str]) -> None:
        """Removes the names, durably; those that are not there are passed over."""
        ...


def check_name(name: str) -> None:
    if len(name) > MAX_NAME or not _NAME.fullmatch(name) or leftover_time(name) is not None:
        raise StateError(
            f"name of stored bytes: {name[:MAX_NAME]!r} must be at most {MAX_NAME} characters of a-z, 0-9, '.', '-', "
            "'_' and '/', each part beginning with a letter or digit and none with 'tmp-'"
        )


def leftover_time(name: str) -> int | None:
    """When a file that was never finished was begun, seconds since 1970; None for a finished one."""
    found = _LEFTOVER.fullmatch(name.rpartition("/")[2])
    return int(found.group(1)) if found else None


class DirectoryStore:
    """Files under a directory: 0600 under 0700. A file is written beside its place, synced and then moved there.

    The file system must have hard links (`create` uses one, so that of two writers one fails). A directory that exists
    must be ours: an empty one is closed to others, one with content that others may enter is refused.
    """

    def __init__(self, root: Path, files: Files | None = None, clock: Callable[[], float] = time.time) -> None:
        self._root = root
        self._clock = clock
        self._files = files or OsFiles()
        self._directories = {root}
        with _typed("open", str(root)):
            self._files.claim(root)

    def put(self, name: str, data: Bytes) -> None:
        with self._finished_file("put", name, data) as (temporary, path):
            self._files.rename(temporary, path)
            self._files.sync_directory(path.parent)

    def create(self, name: str, data: Bytes) -> None:
        with self._finished_file("create", name, data) as (temporary, path):
            try:
                self._files.link(temporary, path)
            except FileExistsError:
                raise ExistsError(name) from None
            try:
                self._files.unlink(temporary)
                self._files.sync_directory(path.parent)
            except OSError:
                # Without the sync the name may not outlive a crash; who is told so may try it again.
                with suppress(OSError):
                    self._files.unlink(path)
                raise

    def get(self, name: str) -> bytes | None:
        check_name(name)
        with _typed("get", name):
            try:
                return self._files.read(self._root / name)
            except FileNotFoundError:
                return None

    def list(self, prefix: str) -> Iterator[Entry]:
        directory = prefix.rpartition("/")[0]
        if directory:
            check_name(directory)
        with _typed("list", prefix):
            yield from self._walk(directory, prefix)

    def delete(self, names: Collection[str]) -> None:
        parents: set[Path] = set()
        for name in names:
            if leftover_time(name) is None:
                check_name(name)
            else:
                check_name(name.rpartition("/")[0])
            with _typed("delete", name), suppress(FileNotFoundError):
                self._files.unlink(self._root / name)
                parents.add((self._root / name).parent)
        for parent in sorted(parents):
            with _typed("delete", str(parent.relative_to(self._root))):
                self._files.sync_directory(parent)

    @contextmanager
    def _finished_file(self, operation: str, name: str, data: Bytes) -> Generator[tuple[Path, Path], None, None]:
        """Gives a temporary file with all of the data, synced, and the path where it belongs."""
        check_name(name)
        path = self._root / name
        temporary = path.parent / f"tmp-{int(self._clock())}-{secrets.token_hex(8)}"
        with _typed(operation, name):
            self._make_directories(path.parent)
            try:
                self._write(temporary, memoryview(data).cast("B"))
                yield temporary, path
            except (OSError, StoreError):
                # A file whose sync failed is not tried again: what the system dropped cannot be known.
                with suppress(OSError):
                    self._files.unlink(temporary)
                raise

    def _write(self, path: Path, data: memoryview) -> None:
        descriptor = self._files.create(path)
        try:
            while data:
                data = data[self._files.write(descriptor, data) :]
            self._files.sync(descriptor)
        finally:
            self._files.close(descriptor)

    def _make_directories(self, path: Path) -> None:
        if path in self._directories:
            return
        self._make_directories(path.parent)
        try:
            self._files.make_directory(path)
        except FileExistsError:
            self._check_directory(path)
        self._files.sync_directory(path.parent)
        self._directories.add(path)

    def _check_directory(self, path: Path) -> None:
        """What lies behind a link would be written, but never listed or counted. Raises `StoreError`."""
        if not any(entry.name == path.name and entry.is_directory for entry in self._files.entries(path.parent)):
            name = str(path.relative_to(self._root))
            raise StoreError("open", name, "is a file or a symbolic link, must be a directory")

    def _walk(self, directory: str, prefix: str) -> Iterator[Entry]:
        try:
            entries = self._files.entries(self._root / directory)
        except FileNotFoundError:
            return
        for entry in entries:
            name = f"{directory}/{entry.name}" if directory else entry.name
            if not _NAME.fullmatch(name):
                continue  # nothing of ours: lost+found, .nfs0000
            if entry.is_directory and (name.startswith(prefix) or prefix.startswith(f"{name}/")):
                yield from self._walk(name, prefix)
            elif not entry.is_directory and name.startswith(prefix):
                yield Entry(name, entry.size)


@contextmanager
def _typed(operation: str, name: str) -> Generator[None, None, None]:
    try:
        yield
    except OSError as error:
        raise StoreError(operation, name, error.strerror or str(error), error.errno) from error
