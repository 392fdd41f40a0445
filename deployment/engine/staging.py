"""What has come of a session that is still on its way? Segments, held by migration until their document names them.

They are hashed when they come, while the source still decodes, so that the import behind the source's last round hashes
none of them. On one node what that round left comes unhashed, under random names, and is hashed after the import: it is
held for so long. Nobody may ever come: all goes after `seconds` in which nothing was heard of its migration.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from deployment.engine import errors
from deployment.engine.commands import SegmentBytes
from deployment.engine.errors import EngineError


@dataclass
class _Migration:
    """`unverified`: names of segments that were not hashed."""

    heard: float
    segments: dict[bytes, bytes] = field(default_factory=dict)
    unverified: set[bytes] = field(default_factory=set)

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

    def add(self, name: str, segments: Sequence[SegmentBytes], hashed: bool = True) -> None:
        """All or nothing. Raises EngineError for bytes that are not what their sha256 says, and without room."""
        for number, segment in enumerate(segments if hashed else ()):
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
        if not hashed:
            held.unverified.update(fresh)

    def held(self, name: str) -> tuple[int, int]:
        """Segments and bytes that are held for a migration."""
        migration = self._migrations.get(name)
        return (len(migration.segments), migration.size) if migration else (0, 0)

    def segment(self, name: str | None, sha256: bytes) -> bytes | None:
        migration = self._migrations.get(name) if name is not None else None
        return migration.segments.get(sha256) if migration else None

    def imported(self, name: str) -> None:
        """Drops what was hashed when it came."""
        migration = self._migrations.get(name)
        if migration is not None:
            migration.segments = {key: migration.segments[key] for key in migration.unverified}
            if not migration.segments:
                self.drop(name)

    def verify(self, name: str, digests: Mapping[bytes, bytes]) -> None:
        """Hashes what was not, and drops it. Raises EngineError unless all of it, and nothing else, is what `digests`
        says: sha256 by name."""
        migration = self._migrations.pop(name, _Migration(0.0))
        if migration.unverified != set(digests):
            held = len(migration.unverified)
            message = f"digests are of {len(digests)} segments, {held} are held unhashed for {name!r}"
            raise EngineError(errors.BAD_STATE, message, "digests")
        for key, sha256 in digests.items():
            if hashlib.sha256(migration.segments[key]).digest() != sha256:
                message = f"a segment of {name!r} does not have the sha256 {sha256.hex()} of its source"
                raise EngineError(errors.BAD_STATE, message, "digests")

    def drop(self, name: str) -> None:
        self._migrations.pop(name, None)

    def expire(self) -> None:
        """Drops what nobody came for."""
        oldest = self._clock() - self._seconds
        for name in [name for name, migration in self._migrations.items() if migration.heard <= oldest]:
            del self._migrations[name]
