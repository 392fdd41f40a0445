"""Arenas in shared memory for tests: small ones, and ones that tell what a crash after each step would have left."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from state.arena import Arena, open_arena
from state.arena_file import SHARED_MEMORY, ArenaHeader, Mapping, arena_path, open_store
from state.names import Epoch, Order, SessionKey

APPLICATION, NODE = "default", "ab12"
SIZE = 32768
HEAP = SIZE - 4096
KEY = SessionKey("a" * 64, "conversation")


def order(sequence: int) -> Order:
    return Order(Epoch(7, 1), sequence)


@contextmanager
def shared_directory() -> Iterator[Path]:
    """A directory of its own in shared memory, as the arena of a node has it."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="test-arena-") as name:
        yield Path(name)


def open_small(directory: Path, size: int = SIZE) -> Arena:
    return open_arena(APPLICATION, NODE, size, directory)


class RecordingMapping(Mapping):
    """Keeps what the file is after every step. Of a `write` also what it is when only its first or its last half was
    done: nobody promises in which order its bytes come."""

    def __init__(self, path: Path, header: ArenaHeader, descriptor: int) -> None:
        super().__init__(path, header, descriptor, writable=True)
        self.steps: list[bytes] = []

    def set_word(self, at: int, value: int) -> None:
        super().set_word(at, value)
        self._keep()

    def write(self, at: int, data: bytes | memoryview) -> None:
        before, half = self.read(at, len(data)), len(data) // 2
        super().write(at + half, data[half:])
        self._keep()
        super().write(at + half, before[half:])
        super().write(at, data[:half])
        self._keep()
        super().write(at, data)
        self._keep()

    def _keep(self) -> None:
        self.steps.append(self.read(0, self.header.size))


def open_recording(directory: Path) -> RecordingMapping:
    """The small arena there, made if it is not."""
    mapping = open_store(directory, APPLICATION, NODE, SIZE)
    header = mapping.header
    mapping.close()
    path = arena_path(directory, APPLICATION, NODE)
    return RecordingMapping(path, header, os.open(path, os.O_RDWR))


def open_image(directory: Path, content: bytes) -> Arena:
    """A small arena that was left like this."""
    path = arena_path(directory, APPLICATION, NODE)
    path.write_bytes(content)
    path.chmod(0o600)
    return open_small(directory)
