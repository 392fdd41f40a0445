"""Toy documents and segments, a store in memory, and a clock that stands still until it is moved."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from state.byte_store import Bytes, ByteStore, Entry, check_name
from state.durable import DurableTier
from state.errors import ExistsError, FormatError
from state.names import SEGMENTS, SESSIONS, Epoch, SessionKey
from state.publication_record import StoredCheckpoint, StoredSegment

TENANT = "a" * 64
KEY = SessionKey(TENANT, "chat")
FIRST = Epoch(1, 1)


class MemoryStore:
    """A dictionary. `after` is called after each change, with the change's name."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.after: Callable[[str], None] = lambda name: None
        self.puts: list[str] = []

    def put(self, name: str, data: Bytes) -> None:
        check_name(name)
        self.content[name] = bytes(data)
        self.puts.append(name)
        self.after(name)

    def create(self, name: str, data: Bytes) -> None:
        if name in self.content:
            raise ExistsError(name)
        self.put(name, data)

    def get(self, name: str) -> bytes | None:
        return self.content.get(name)

    def list(self, prefix: str) -> Iterator[Entry]:
        return iter([Entry(name, len(data)) for name, data in self.content.items() if name.startswith(prefix)])

    def delete(self, names: Collection[str]) -> None:
        for name in names:
            self.content.pop(name, None)
            self.after(name)

    def counted(self) -> int:
        return sum(len(data) for name, data in self.content.items() if name.startswith((SESSIONS, SEGMENTS)))


@dataclass
class Clock:
    """Seconds since 1970. Sleeping moves it."""

    now: float = 1_790_000_000.0
    sleeps: int = field(default=0)

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps += 1
        self.now += seconds


def document(text: str) -> bytes:
    """A document that says itself whether it is whole."""
    data = text.encode()
    return data + hashlib.sha256(data).digest()


def verify(data: bytes) -> None:
    if hashlib.sha256(data[:-32]).digest() != data[-32:]:
        raise FormatError("document", "is torn")


def data_of(text: str, size: int = 100) -> bytes:
    return (text.encode() * (size // len(text.encode()) + 1))[:size]


def segment(data: bytes) -> StoredSegment:
    return StoredSegment(hashlib.sha256(data).digest(), len(data))


def checkpoint(
    name: str, contents: Sequence[bytes], seconds: float = 1.0, ancestor: str | None = None
) -> StoredCheckpoint:
    return StoredCheckpoint(name, ancestor, seconds, tuple(segment(data) for data in contents))


def reader(*contents: bytes) -> Callable[[bytes], bytes]:
    by_digest = {hashlib.sha256(data).digest(): data for data in contents}
    return by_digest.__getitem__


def open_tier(
    store: ByteStore, clock: Clock, *, budget: int = 1 << 20, session_ttl: float = 3000.0, lease_seconds: float = 60.0
) -> DurableTier:
    return DurableTier(
        store,
        budget,
        verify,
        session_ttl=session_ttl,
        lease_seconds=lease_seconds,
        clock=clock,
        sleep=clock.sleep,
    )


def publish(
    tier: DurableTier,
    text: str,
    contents: Sequence[bytes] = (),
    *,
    key: SessionKey = KEY,
    epoch: Epoch = FIRST,
    sequence: int = 1,
    seconds: float = 1.0,
    ancestor: str | None = None,
) -> bool:
    """Publishes one checkpoint, named by its text. Returns whether its payload was stored."""
    made = [checkpoint(text, contents, seconds, ancestor)] if contents else []
    return tier.publish(key, epoch, sequence, document(text), made, reader(*contents)).payload
