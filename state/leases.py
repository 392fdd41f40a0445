"""How do processes that share a store keep out of each other's way? By lease files, whose names say all but the list.

Who uses segments first puts a lease that names them, then waits until no sweep goes on. Who sweeps first puts a lease
that excludes others, then reads who uses what. Of two that start at once at least one sees the other, so nothing that
is in use is ever taken. A lease ends by itself, so that a process that died is in nobody's way for long.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from state.byte_store import ByteStore
from state.errors import StoreError
from state.names import LEASES

CLOCK_SLACK = 5.0
"""Seconds by which clocks of processes may differ: who holds a lease lets go that much before others believe it."""

SWEEP_SECONDS = 30.0
_POLL_SECONDS = 0.02
_DIGEST_BYTES = 32
_NAME = re.compile(LEASES + r"(use|sweep)-(\d{16})-(\d{16})-[0-9a-f]{32}")


@dataclass(frozen=True)
class InUse:
    """What others may not take: sessions by key digest (hex), segments by sha256."""

    sessions: frozenset[str]
    segments: frozenset[bytes]


class Lease:
    """A lease that is held. `reserved`: bytes that its holder is about to write."""

    def __init__(self, leases: Leases, kind: str, body: bytes, reserved: int, seconds: float) -> None:
        self._leases = leases
        self._kind = kind
        self._body = body
        self._seconds = seconds
        self._token = secrets.token_hex(16)
        self.reserved = reserved
        self.name = self._put()

    def keep(self) -> None:
        """To be called before every step that relies on it. Raises `StoreError` if it has ended meanwhile."""
        now = self._leases.clock()
        if now >= self._ends:
            raise StoreError("keep", self.name, "the lease has ended, because a step took too long")
        if now >= self._ends - self._seconds / 2:
            self._replace()

    def reserve(self, reserved: int) -> None:
        self.reserved = reserved
        self._replace()

    def release(self) -> None:
        with suppress(StoreError):  # it ends by itself
            self._leases.store.delete([self.name])

    def _put(self) -> str:
        self._ends = float(int(self._leases.clock() + self._seconds))
        name = f"{LEASES}{self._kind}-{int(self._ends):016}-{self.reserved:016}-{self._token}"
        self._leases.store.put(name, self._body)
        return name

    def _replace(self) -> None:
        old = self.name
        self.name = self._put()
        if self.name != old:
            self._leases.store.delete([old])


class Leases:
    """Leases on a store. `seconds`: how long one lasts unless kept; `clock`: seconds since 1970."""

    def __init__(
        self, store: ByteStore, clock: Callable[[], float], sleep: Callable[[float], None], seconds: float
    ) -> None:
        self.store = store
        self.clock = clock
        self._sleep = sleep
        self._seconds = seconds

    @contextmanager
    def use(self, session: str, segments: Collection[bytes], reserved: int = 0) -> Iterator[Lease]:
        """Keeps a session (its key digest) and segments from being taken, once no sweep goes on.

        Raises `StoreError` if sweeps do not end for as long as a sweep's lease can last.
        """
        body = bytes.fromhex(session) + b"".join(segments)
        lease = Lease(self, "use", body, reserved, self._seconds)
        try:
            self._wait_for_sweeps()
            yield lease
        finally:
            lease.release()

    @contextmanager
    def sweep(self) -> Iterator[Lease]:
        """Excludes other sweeps and new uses. Raises `StoreError` if another sweep does not end."""
        lease = self._exclusive()
        try:
            yield lease
        finally:
            lease.release()

    def in_use(self) -> InUse:
        while True:
            bodies = [self.store.get(name) for name in self._live("use")]
            if None not in bodies:
                break  # else one was released, or goes on under a name that only another look finds
        sessions: set[str] = set()
        segments: set[bytes] = set()
        for body in filter(None, bodies):
            sessions.add(body[:_DIGEST_BYTES].hex())
            segments.update(body[at : at + _DIGEST_BYTES] for at in range(_DIGEST_BYTES, len(body), _DIGEST_BYTES))
        return InUse(frozenset(sessions), frozenset(segments))

    def reserved(self, but: Lease) -> int:
        """Bytes that others are about to write."""
        return sum(reserved for name, reserved in self._live("use").items() if name != but.name)

    def ended(self) -> list[str]:
        """Names of leases that hold nothing any more."""
        live = self._live("use").keys() | self._live("sweep").keys()
        return [entry.name for entry in self.store.list(LEASES) if _NAME.fullmatch(entry.name) and entry.name not in live]

    def _live(self, kind: str) -> dict[str, int]:
        """Reserved bytes of the leases that have not ended, by name."""
        now = self.clock()
        found = (_NAME.fullmatch(entry.name) for entry in self.store.list(LEASES))
        return {
            match.group(): int(match.group(3))
            for match in found
            if match and match.group(1) == kind and int(match.group(2)) + CLOCK_SLACK > now
        }

    def _wait_for_sweeps(self) -> None:
        deadline = self.clock() + SWEEP_SECONDS + 2 * CLOCK_SLACK
        while self._live("sweep"):
            if self.clock() >= deadline:
                raise StoreError("wait", LEASES, "another process sweeps the store and does not end")
            self._sleep(_POLL_SECONDS)

    def _exclusive(self) -> Lease:
        deadline = self.clock() + SWEEP_SECONDS + 2 * CLOCK_SLACK
        while True:
            self._wait_for_sweeps()
            lease = Lease(self, "sweep", b"", 0, SWEEP_SECONDS)
            try:
                alone = self._live("sweep").keys() == {lease.name}
            except StoreError:
                lease.release()
                raise
            if alone:
                return lease
            lease.release()
            if self.clock() >= deadline:
                raise StoreError("wait", LEASES, "other processes sweep the store again and again")
            self._sleep(_POLL_SECONDS * (1 + secrets.randbelow(8)))
