"""What has come of a session that is still on its way? Segments, held by migration until their document names them.

They are hashed when they come, while the source still decodes, so that the import behind the source's last round hashes
none of them. Nobody may ever come for them: they go after `seconds` in which nothing was heard of their migration.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from deployment.engine import errors
from deployment.engine.errors import EngineError
from deployment.engine.messages import SegmentBytes


@dataclass
class _Migration:
    heard: float
    segments: dict[bytes, bytes] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(map(len, self.segments.values()))


class StagedSegments:
    """At most `most` bytes for all migrations."""

    def __init__(self, most: int, seconds: float, clock: Callable[[], float]) -> None:
        self._most = most
        self._seconds = seconds
        self._clock = clock
        self._migrations: dict[str, _Migration] = {}

    @property
    def size(self) -> int:
        return sum(migration.size for migration in self._migrations.values())

    def add(self, name: str, segments: Sequence[SegmentBytes]) -> None:
        """All or nothing. Raises EngineError for bytes that are not what their sha256 says, and without room."""
        for number, segment in enumerate(segments):
            if hashlib.sha256(segment.data).digest() != segment.sha256:
                message = f"segments[{number}]: its bytes do not have the sha256 {segment.sha256.hex()} that it names"
                raise EngineError(errors.BAD_STATE, message, "segments")
        self.expire()
        held = self._migrations.get(name)
        fresh = {s.sha256: s.data for s in segments if held is None or s.sha256 not in held.segments}
        wanted, size = sum(map(len, fresh.values())), self.size
        if size + wanted > self._most:
            message = f"{size} bytes are staged, {wanted} more would exceed {self._most} (staged_bytes)"
            raise EngineError(errors.OVERLOADED, message, "segments")
        held = self._migrations.setdefault(name, _Migration(0.0))
        held.heard = self._clock()
        held.segments.update(fresh)

    def held(self, name: str) -> tuple[int, int]:
        """Segments and bytes that are held for a migration."""
        migration = self._migrations.get(name)
        return (len(migration.segments), migration.size) if migration else (0, 0)

    def segment(self, name: str | None, sha256: bytes) -> bytes | None:
        migration = self._migrations.get(name) if name is not None else None
        return migration.segments.get(sha256) if migration else None

    def drop(self, name: str) -> None:
        self._migrations.pop(name, None)

    def expire(self) -> None:
        """Drops what nobody came for."""
        oldest = self._clock() - self._seconds
        for name in [name for name, migration in self._migrations.items() if migration.heard <= oldest]:
            del self._migrations[name]
