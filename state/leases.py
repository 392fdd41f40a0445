"""How do processes that share a store keep out of each other's way? By lease files, whose names say all but the list.

Who uses segments first puts a lease that names them, then waits until no sweep goes on. Who sweeps first puts a lease
that excludes others, then reads who uses what. Of two that start at once at least one sees the other, so nothing that
is in use is ever taken. A lease ends by itself, so that a process that died is in nobody's way for long.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from state.byte_store import ByteStore
from state.errors import StateError, StoreError
from state.names import LEASES

CLOCK_SLACK = 5.0
"""Seconds by which clocks of processes may differ: who holds a lease lets go that much before others believe it."""

SWEEP_SECONDS = 30.0

LONGEST_SECONDS = 3600.0
"""No lease lasts longer. One that seems to was dated by a clock that was wrong, and holds nothing: it would stand in
everybody's way until then."""

_POLL_SECONDS = 0.02
_DIGEST_BYTES = 32
_NAME = re.compile(LEASES + r"(use|sweep)-(\d{16})-(\d{16})-([0-9a-f]{32})")


@dataclass(frozen=True)
class InUse:
    """What others may not take: sessions by key digest (hex), segments by sha256."""

    sessions: frozenset[str]
    segments: frozenset[bytes]


@dataclass(frozen=True)
class _Found:
    name: str
    kind: str
    ends: int
    reserved: int
    token: str


class Lease:
    """A lease that is held. `reserved`: bytes that its holder is about to write."""

    def __init__(self, leases: Leases, kind: str, body: bytes, reserved: int, seconds: float) -> None:
        self._leases = leases
        self._kind = kind
        self._body = body
        self._seconds = seconds
        self.token = secrets.token_hex(16)
        self._names: list[str] = []
        self.reserve(reserved)

    def keep(self) -> None:
        """To be called before every step that relies on it. Raises `StoreError` if it has ended meanwhile."""
        left = self._ends - self._leases.clock()
        if left <= 0:
            raise StoreError("keep", self._names[-1], "the lease has ended, because a step took too long")
        if left > self._seconds + CLOCK_SLACK:
            raise StoreError("keep", self._names[-1], "the lease is not believed any more: the clock was set back")
        self.renew()

    def renew(self) -> None:
        """Makes it last, also if it has ended: for who does not rely on it yet. Does nothing in its first half."""
        if self._leases.clock() >= self._ends - self._seconds / 2:
            self.reserve(self.reserved)

    def reserve(self, reserved: int) -> None:
        """Renews the lease. Its older files stay until it is released: a listing under way could miss both."""
        self.reserved = reserved
        ends = int(self._leases.clock() + self._seconds)
        name = f"{LEASES}{self._kind}-{ends:016}-{reserved:016}-{self.token}"
        self._leases.store.put(name, self._body)
        self._names.append(name)
        self._ends = ends

    def release(self) -> None:
        with suppress(StoreError):  # it ends by itself
            self._leases.store.delete(self._names)


class Leases:
    """Leases on a store. `seconds`: how long one lasts unless kept; `clock`: seconds since 1970.

    Raises `StateError` for a number of seconds that no lease can last.
    """

    def __init__(
        self, store: ByteStore, clock: Callable[[], float], sleep: Callable[[float], None], seconds: float
    ) -> None:
        if not 1 <= seconds <= LONGEST_SECONDS:
            raise StateError(f"leases: {seconds} seconds, must be from 1 to {LONGEST_SECONDS:.0f}")
        self.store = store
        self.clock = clock
        self._sleep = sleep
        self._seconds = seconds

    @contextmanager
    def use(self, session: str, segments: Collection[bytes], reserved: int = 0) -> Generator[Lease, None, None]:
        """Keeps a session (its key digest) and segments from being taken, once no sweep goes on.

        Raises `StoreError` if sweeps do not end for as long as a sweep's lease can last.
        """
        body = bytes.fromhex(session) + b"".join(segments)
        lease = Lease(self, "use", body, reserved, self._seconds)
        try:
            self._wait_for_sweeps(lease.renew)
            yield lease
        finally:
            lease.release()

    @contextmanager
    def sweep(self) -> Generator[Lease, None, None]:
        """Excludes other sweeps and new uses. Raises `StoreError` if another sweep does not end."""
        lease = self._exclusive()
        try:
            yield lease
        finally:
            lease.release()

    def in_use(self) -> InUse:
        sessions: set[str] = set()
        segments: set[bytes] = set()
        for held in self._live("use"):
            body = self.store.get(held.name)
            if body is None:
                continue  # released since it was listed
            sessions.add(body[:_DIGEST_BYTES].hex())
            segments.update(body[at : at + _DIGEST_BYTES] for at in range(_DIGEST_BYTES, len(body), _DIGEST_BYTES))
        return InUse(frozenset(sessions), frozenset(segments))

    def reserved(self, but: Lease) -> int:
        """Bytes that others are about to write."""
        reserved: dict[str, int] = {}
        for held in self._live("use"):
            if held.token != but.token:
                reserved[held.token] = max(held.reserved, reserved.get(held.token, 0))
        return sum(reserved.values())

    def ended(self) -> list[str]:
        """Names of leases that hold nothing any more."""
        return [held.name for held in self._all() if not self._holds(held)]

    def _live(self, kind: str) -> list[_Found]:
        return [held for held in self._all() if held.kind == kind and self._holds(held)]

    def _holds(self, held: _Found) -> bool:
        left = held.ends - self.clock()
        longest = SWEEP_SECONDS if held.kind == "sweep" else LONGEST_SECONDS
        return -CLOCK_SLACK < left <= longest + CLOCK_SLACK

    def _all(self) -> Iterator[_Found]:
        for entry in self.store.list(LEASES):
            if match := _NAME.fullmatch(entry.name):
                kind, ends, reserved, token = match.groups()
                yield _Found(entry.name, kind, int(ends), int(reserved), token)

    def _wait_for_sweeps(self, meanwhile: Callable[[], None]) -> None:
        deadline = self.clock() + SWEEP_SECONDS + 2 * CLOCK_SLACK
        while self._live("sweep"):
            if self.clock() >= deadline:
                raise StoreError("wait", LEASES, "another process sweeps the store and does not end")
            self._sleep(_POLL_SECONDS)
            meanwhile()

    def _exclusive(self) -> Lease:
        deadline = self.clock() + SWEEP_SECONDS + 2 * CLOCK_SLACK
        while True:
            self._wait_for_sweeps(lambda: None)
            lease = Lease(self, "sweep", b"", 0, min(SWEEP_SECONDS, self._seconds))
            try:
                alone = all(held.token == lease.token for held in self._live("sweep"))
            except StoreError:
                lease.release()
                raise
            if alone:
                return lease
            lease.release()
            if self.clock() >= deadline:
                raise StoreError("wait", LEASES, "other processes sweep the store again and again")
            self._sleep(_POLL_SECONDS * (1 + secrets.randbelow(8)))
