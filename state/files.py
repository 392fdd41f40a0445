"""What does a directory store ask of the operating system? Each call by itself, so that tests can make any one fail."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from state.errors import StoreError

_READ_BYTES = 1 << 24


@dataclass(frozen=True)
class FileEntry:
    """A regular file or a directory; `size` in bytes."""

    name: str
    is_directory: bool
    size: int


class Files(Protocol):
    """Every method raises OSError."""

    def claim(self, root: Path) -> None:
        """Makes the directory and keeps others out of it."""
        ...

    def make_directory(self, path: Path) -> None: ...
    def sync_directory(self, path: Path) -> None: ...
    def entries(self, path: Path) -> list[FileEntry]: ...
    def create(self, path: Path) -> int:
        """Opens a new file for writing and gives its descriptor."""
        ...

    def write(self, descriptor: int, data: memoryview) -> int:
        """How many bytes were written: perhaps not all of them."""
        ...

    def sync(self, descriptor: int) -> None: ...
    def close(self, descriptor: int) -> None: ...
    def rename(self, source: Path, target: Path) -> None: ...
    def link(self, source: Path, target: Path) -> None: ...
    def unlink(self, path: Path) -> None: ...
    def read(self, path: Path) -> bytes: ...


class OsFiles:
    """The operating system's. Files are 0600, directories 0700; symbolic links are neither followed nor listed."""

    def claim(self, root: Path) -> None:
        """An empty directory of ours is closed to others. One with content that is open to them is refused."""
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = root.stat()
        mode = stat.S_IMODE(facts.st_mode)
        if facts.st_uid != os.geteuid():
            raise StoreError("open", str(root), f"belongs to user {facts.st_uid}, must belong to user {os.geteuid()}")
        if mode & 0o077 == 0:
            return
        if any(root.iterdir()):
            raise StoreError("open", str(root), f"has mode {mode:04o} and is not empty, must be 0700 (chmod 700)")
        root.chmod(0o700)

    def make_directory(self, path: Path) -> None:
        path.mkdir(mode=0o700)

    def sync_directory(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def entries(self, path: Path) -> list[FileEntry]:
        found: list[FileEntry] = []
        with os.scandir(path) as scan:
            for entry in scan:
                if entry.is_dir(follow_symlinks=False):
                    found.append(FileEntry(entry.name, True, 0))
                elif entry.is_file(follow_symlinks=False):
                    try:
                        found.append(FileEntry(entry.name, False, entry.stat(follow_symlinks=False).st_size))
                    except FileNotFoundError:
                        continue  # another process deleted it
        return found

    def create(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def write(self, descriptor: int, data: memoryview) -> int:
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def link(self, source: Path, target: Path) -> None:
        target.hardlink_to(source)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def read(self, path: Path) -> bytes:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            data = bytearray()
            while part := os.read(descriptor, _READ_BYTES):
                data += part
            return bytes(data)
        finally:
            os.close(descriptor)
