"""Where does the durable tier lie? In the directory or under the URL that the settings name."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

from state.byte_store import Bytes, ByteStore, DirectoryStore, Entry, check_name
from state.errors import ExistsError, StateError, StoreError


def open_store(place: str) -> ByteStore:
    """A store for a path, a file:// URL, or the URL of any file system that fsspec knows (s3://bucket/prefix).

    Raises `StateError` for a scheme that is unknown or whose package is not installed, and for one that would put
    something between us and what is stored: a cache, or this machine's files by another way than `DirectoryStore`.
    """
    scheme = urlsplit(place).scheme
    if scheme in ("", "file"):
        path = place.removeprefix("file://")
        if not path.startswith("/"):
            raise StateError(f"durable store: {place!r} must be an absolute path or a URL")
        return DirectoryStore(Path(path))
    if "::" in place:
        raise StateError(f"durable store: {place!r} is a chain of file systems, must be one URL")
    try:
        files, root = fsspec.core.url_to_fs(place, use_listings_cache=False)
    except Exception as error:  # each file system has errors of its own
        raise StateError(f"durable store: {place!r} cannot be opened: {error}") from error
    if isinstance(files, LocalFileSystem):
        raise StateError(f"durable store: {place!r} is on this machine, must be an absolute path or a file:// URL")
    return FsspecStore(files, root)


class FsspecStore:
    """Objects under a prefix of an fsspec file system that shows an object only when all of it is there.

    Object stores do; where one does not, the digests of records and segments show what is torn. Access to the prefix
    is the bucket's policy: nobody else may read or write there.
    """

    def __init__(self, files: AbstractFileSystem, root: str) -> None:
        self._files = files
        self._root = root.rstrip("/")

    def put(self, name: str, data: Bytes) -> None:
        with self._typed("put", name) as path:
            self._files.pipe_file(path, bytes(data))

    def create(self, name: str, data: Bytes) -> None:
        with self._typed("create", name) as path:
            try:
                self._files.pipe_file(path, bytes(data), mode="create")
            except FileExistsError:
                raise ExistsError(name) from None

    def get(self, name: str) -> bytes | None:
        with self._typed("get", name) as path:
            try:
                return cast(bytes, self._files.cat_file(path))
            except FileNotFoundError:
                return None

    def list(self, prefix: str) -> Iterator[Entry]:
        directory = prefix.rpartition("/")[0]
        with self._typed("list", directory) as path:
            self._files.invalidate_cache()
            try:
                found = cast(dict[str, dict[str, Any]], self._files.find(path, detail=True))
            except FileNotFoundError:
                return
        for place, facts in found.items():
            name = place[len(self._root) :].lstrip("/")
            if name.startswith(prefix):
                yield Entry(name, int(facts["size"]))

    def delete(self, names: Collection[str]) -> None:
        for name in names:
            with self._typed("delete", name) as path:
                try:
                    self._files.rm_file(path)
                except FileNotFoundError:
                    continue

    @contextmanager
    def _typed(self, operation: str, name: str) -> Generator[str, None, None]:
        if name:
            check_name(name)
        try:
            yield f"{self._root}/{name}" if name else self._root
        except StateError:
            raise
        except Exception as error:  # each file system has errors of its own
            code = error.errno if isinstance(error, OSError) else None
            raise StoreError(operation, name, str(error) or type(error).__name__, code) from error
