"""A file system in memory that can fail at any call, and that forgets in a crash what was not synced.

After `crash_at` calls every call raises `Crash`, as nothing runs any more; `after_crash` is what a reboot finds. Bytes
of a file survive only if the file was synced. Names survive only if their directory was synced; with `eager_names` all
of them do, as a journal may have written them already. Real file systems lie in between.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from state.files import FileEntry


class Crash(BaseException):
    """The machine stopped. No Exception, so that no handler runs on as if it had not."""


@dataclass
class _File:
    content: bytearray = field(default_factory=bytearray)
    synced: bytes | None = None


class ModelFiles:
    """Calls count from 1. `fail_at` is the one that raises OSError(`code`), `crash_at` that which a crash precedes."""

    def __init__(self, *, fail_at: int = 0, code: int = 0, crash_at: int = 0) -> None:
        self.fail_at, self.code, self.crash_at = fail_at, code, crash_at
        self.calls = 0
        self._names: dict[Path, _File] = {}
        self._directories: set[Path] = set()
        self._durable_names: dict[Path, _File] = {}
        self._durable_directories: set[Path] = set()
        self._open: dict[int, _File] = {}

    def after_crash(self, *, eager_names: bool) -> ModelFiles:
        survivor = ModelFiles()
        names = self._names if eager_names else self._durable_names
        directories = self._directories if eager_names else self._durable_directories
        survivor._directories = set(directories)
        for path, file in names.items():
            if path.parent in directories:
                data = file.synced or b""
                survivor._names[path] = _File(bytearray(data), data)
        survivor._durable_names = dict(survivor._names)
        survivor._durable_directories = set(directories)
        return survivor

    def paths(self) -> list[Path]:
        return sorted(self._names)

    def claim(self, root: Path) -> None:
        self._directories.add(root)
        self._durable_directories.add(root)

    def make_directory(self, path: Path) -> None:
        self._step()
        if path in self._directories:
            raise FileExistsError(path)
        self._directories.add(path)

    def sync_directory(self, path: Path) -> None:
        self._step()
        if path not in self._directories:
            raise FileNotFoundError(path)
        for known in [name for name in self._durable_names if name.parent == path and name not in self._names]:
            del self._durable_names[known]
        self._durable_names |= {name: file for name, file in self._names.items() if name.parent == path}
        self._durable_directories |= {name for name in self._directories if name.parent == path}

    def entries(self, path: Path) -> list[FileEntry]:
        self._step()
        if path not in self._directories:
            raise FileNotFoundError(path)
        found = [FileEntry(name.name, True, 0) for name in self._directories if name.parent == path and name != path]
        return found + [
            FileEntry(name.name, False, len(file.content)) for name, file in self._names.items() if name.parent == path
        ]

    def create(self, path: Path) -> int:
        self._step()
        if path in self._names:
            raise FileExistsError(path)
        if path.parent not in self._directories:
            raise FileNotFoundError(path)
        self._names[path] = _File()
        descriptor = len(self._open) + 3
        self._open[descriptor] = self._names[path]
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> int:
        self._step()
        taken = max(1, len(data) * 2 // 3)  # never all at once, so that files can be torn
        self._open[descriptor].content += data[:taken]
        return taken

    def sync(self, descriptor: int) -> None:
        self._step()
        file = self._open[descriptor]
        file.synced = bytes(file.content)

    def close(self, descriptor: int) -> None:
        self._step()

    def rename(self, source: Path, target: Path) -> None:
        self._step()
        self._names[target] = self._names.pop(source)

    def link(self, source: Path, target: Path) -> None:
        self._step()
        if target in self._names:
            raise FileExistsError(target)
        self._names[target] = self._names[source]

    def unlink(self, path: Path) -> None:
        self._step()
        if path not in self._names:
            raise FileNotFoundError(path)
        del self._names[path]

    def read(self, path: Path) -> bytes:
        self._step()
        if path not in self._names:
            raise FileNotFoundError(path)
        return bytes(self._names[path].content)

    def _step(self) -> None:
        self.calls += 1
        if self.crash_at and self.calls >= self.crash_at:
            raise Crash
        if self.calls == self.fail_at:
            raise OSError(self.code, os.strerror(self.code))
