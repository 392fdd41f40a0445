"""What is a session called, and under which names do its parts lie in the durable tier?

Names hold digests and numbers only, so that no id can point anywhere else. Numbers have 16 digits, so that the order of
names is the order of publication.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from state.errors import StateError

SESSIONS = "v1/sessions/"
SEGMENTS = "v1/segments/"
TOMBSTONES = "v1/tombstones/"
LEASES = "v1/leases/"
ENCRYPTION = "v1/encryption"
"""Is there where all else is encrypted (`deployment/sealing.py`)."""

LARGEST = 1 << 53
"""No incarnation, counter or sequence is larger."""
_ID_BYTES = 1024
_NUMBERED = re.compile(r"v1/[a-z]+/[0-9a-f]{2}/([0-9a-f]{64})\.(\d{16})\.(\d{16})\.(\d{16})")
_SEGMENT = re.compile(r"v1/segments/[0-9a-f]{2}/([0-9a-f]{64})")


@dataclass(frozen=True, order=True)
class SessionKey:
    """A session's name inside its tenant. `tenant` is 64 hex digits, `session` 1-128 visible characters."""

    tenant: str
    session: str

    def __str__(self) -> str:
        return f"{self.tenant[:16]}/{self.session}"


@dataclass(frozen=True, order=True)
class Epoch:
    """A fence: of two owners the one with the higher epoch may commit. Incarnations are those of the directory."""

    incarnation: int
    counter: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.counter}"


@dataclass(frozen=True, order=True)
class Order:
    """Where a publication stands among those of its session: a higher one replaces a lower one."""

    epoch: Epoch
    sequence: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.sequence}"


def key_digest(key: SessionKey) -> str:
    """64 hex digits that stand for tenant and session. Raises `StateError` for ids that are no text or too long."""
    parts: list[bytes] = []
    for field, text in (("tenant", key.tenant), ("session", key.session)):
        try:
            data = text.encode()
        except UnicodeEncodeError:
            raise StateError(f"session key: {field} {text!r} must be valid Unicode") from None
        if not 1 <= len(data) <= _ID_BYTES:
            raise StateError(f"session key: {field} has {len(data)} bytes, must have 1 to {_ID_BYTES}")
        parts.append(len(data).to_bytes(4, "big") + data)
    return hashlib.sha256(b"".join(parts)).hexdigest()


def publications_of(digest: str) -> str:
    """Prefix of the names of a session's publications."""
    return f"{SESSIONS}{digest[:2]}/{digest}."


def publication_name(digest: str, order: Order) -> str:
    epoch, sequence = order.epoch, order.sequence
    return publications_of(digest) + _numbers(incarnation=epoch.incarnation, counter=epoch.counter, sequence=sequence)


def tombstones_of(digest: str) -> str:
    return f"{TOMBSTONES}{digest[:2]}/{digest}."


def tombstone_name(digest: str, epoch: Epoch, created: float) -> str:
    numbers = _numbers(incarnation=epoch.incarnation, counter=epoch.counter, created=int(created))
    return tombstones_of(digest) + numbers


def parse_numbered(name: str) -> tuple[str, Order] | None:
    """Digest and order of a publication, or digest, epoch and time of a tombstone. None for another name."""
    found = _NUMBERED.fullmatch(name)
    if found is None:
        return None
    digest, incarnation, counter, last = found.groups()
    return digest, Order(Epoch(int(incarnation), int(counter)), int(last))


def segment_name(sha256: bytes) -> str:
    digest = sha256.hex()
    return f"{SEGMENTS}{digest[:2]}/{digest}"


def parse_segment(name: str) -> bytes | None:
    """The sha256 that a segment is named by. None for another name."""
    found = _SEGMENT.fullmatch(name)
    return bytes.fromhex(found.group(1)) if found else None


def _numbers(**values: int) -> str:
    for field, value in values.items():
        if not 0 <= value <= LARGEST:
            raise StateError(f"name in the store: {field} is {value}, must be 0 to 2^53")
    return ".".join(f"{value:016}" for value in values.values())
