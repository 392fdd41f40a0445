"""When does a turn's own session (`deployment/keyed_turns.py`) end? When nobody may ask for the turn any more."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Protocol

from ray.exceptions import RayError

from deployment.cluster.not_owned import NotOwned
from deployment.engine.errors import EngineError
from deployment.errors import RequestError
from deployment.keeper import SessionKeeper
from deployment.keyed_turns import KEYED
from deployment.ownership.messages import Placed
from deployment.ownership.words import SessionKey
from deployment.session import Session
from deployment.turn_table import KEPT_SECONDS
from state.fair_share import first_to_go

LOOK_SECONDS = 5.0
SWEEP_SECONDS = 300.0

KEPT_TURNS = 4096
"""Of one replica, beside the one that ended last; beyond it, and beyond so many bytes, some go before their time."""

KEPT_SHARE = 32
"""One part in so many of a node's host store is a replica's for their logs: eight replicas of a node, and the second
copies of others', leave half of it for sessions."""

log = logging.getLogger("ray.serve")


class Unowned(Protocol):
    async def unowned(self, beginning: str) -> Sequence[Placed]:
        """Sessions whose names begin so and that no replica owns. Raises `RayError`, TimeoutError."""
        ...


class KeyedExpiry:
    """Of those that one replica owns. `kept_bytes`: of the logs of those that are over, beside the one that ended last;
    `unix`: seconds since 1970."""

    def __init__(
        self, keeper: SessionKeeper, cluster: Unowned, kept_bytes: int, unix: Callable[[], float] = time.time
    ) -> None:
        self._keeper = keeper
        self._cluster = cluster
        self._kept_bytes = kept_bytes
        self._unix = unix
        self._empty: dict[SessionKey, Session] = {}

    async def watch(self) -> None:
        swept = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.end_empty()
                await self.end_surplus()
                if time.monotonic() - swept > SWEEP_SECONDS:
                    swept = time.monotonic()
                    await self.sweep()
            except Exception:  # the next one may see more
                log.exception("turns with an idempotency key could not be looked after")

    async def end_surplus(self) -> None:
        """Ends those whose time is over, and those that are too many."""
        for session in self._over():
            await self._keeper.ending.end(session)

    async def end_empty(self) -> None:
        """Ends those that had no turn when this was called last, and have none now: who asked for it has left before it
        began."""
        seen = self._empty
        self._empty = {one.key: one for one in self._keeper.all() if one.keyed and one.free and not one.turns}
        for key, session in self._empty.items():
            if seen.get(key) is session and session.free:
                await self._keeper.ending.end(session)

    async def sweep(self) -> None:
        """Those of replicas that are gone are taken over, after all else, so that no fault of theirs keeps the others:
        nobody else would ever end them."""
        await self.end_surplus()
        try:
            orphans = await self._cluster.unowned(KEYED)
        except (RayError, TimeoutError) as error:
            log.info("nobody says which keyed turns have no replica: %r", error)
            orphans = ()
        for placed in orphans:
            try:
                await self._keeper.acquire(placed.key, placed, must_exist=True)
            except (NotOwned, RequestError, EngineError) as error:
                log.info("a keyed turn is not taken over: %s", error)

    def _over(self) -> list[Session]:
        keyed = {one.key: one for one in self._keeper.all() if one.keyed}
        bytes_of = self._keeper.copies.bytes_of
        ended_before = self._unix() - KEPT_SECONDS
        over = [one for one in keyed.values() if _rests(one) and one.rests_since < ended_before]
        for size, kept in ((lambda one: 1, KEPT_TURNS), (bytes_of, self._kept_bytes)):
            for one in over:
                keyed.pop(one.key, None)
            over += _surplus(tuple(keyed.values()), size, kept)
        return over


def _rests(session: Session) -> bool:
    return session.free and bool(session.turns)


def _surplus(keyed: Sequence[Session], size: Callable[[Session], int], kept: int) -> list[Session]:
    """Those that go so that those at rest have no more than `kept`: of the tenants that hold more than their share, if
    anything of those rests, and of them the longest ended. The one that ended last is neither counted nor taken, since
    its client may just be about to ask for it again."""
    used: Counter[str] = Counter()
    for one in keyed:
        used[one.key.tenant] += size(one)
    resting = sorted(filter(_rests, keyed), key=lambda one: one.rests_since)[:-1]
    queues: defaultdict[str, deque[Session]] = defaultdict(deque)
    for one in resting:
        queues[one.key.tenant].append(one)
    surplus = sum(map(size, resting)) - kept
    going: list[Session] = []
    while surplus > 0:
        first = first_to_go(used)
        tenant = min(queues, key=lambda name: (name not in first, queues[name][0].rests_since))
        going.append(one := queues[tenant].popleft())
        if not queues[tenant]:
            del queues[tenant]
        used[tenant] -= size(one)
        surplus -= size(one)
    return going
