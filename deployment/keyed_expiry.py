"""When does a turn's own session (`deployment/keyed_turns.py`) end? When nobody may ask for the turn any more."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ray.exceptions import RayError

from deployment.cluster.not_owned import NotOwned
from deployment.engine.errors import EngineError
from deployment.errors import RequestError
from deployment.keeper import SessionKeeper
from deployment.keyed_turns import KEYED
from deployment.ownership.messages import Placed
from deployment.session import Session
from deployment.turn_table import KEPT_SECONDS

LOOK_SECONDS = 5.0
SWEEP_SECONDS = 300.0

KEPT_TURNS = 4096
"""Of one replica; beyond it, and beyond so many bytes, the longest ended ones go before their time."""

KEPT_SHARE = 32
"""One part in so many of a node's host store is a replica's for their logs: eight replicas of a node, and the second
copies of others', leave half of it for sessions."""

log = logging.getLogger("ray.serve")


class Unowned(Protocol):
    async def unowned(self, beginning: str) -> Sequence[Placed]:
        """Sessions whose names begin so and that no replica owns. Raises `RayError`, TimeoutError."""
        ...


class KeyedExpiry:
    """Of those that one replica owns. `kept_bytes`: of all their logs; `unix`: seconds since 1970."""

    def __init__(
        self, keeper: SessionKeeper, cluster: Unowned, kept_bytes: int, unix: Callable[[], float] = time.time
    ) -> None:
        self._keeper = keeper
        self._cluster = cluster
        self._kept_bytes = kept_bytes
        self._unix = unix

    async def watch(self) -> None:
        swept = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.end_surplus()
                if time.monotonic() - swept > SWEEP_SECONDS:
                    swept = time.monotonic()
                    await self.sweep()
            except Exception:  # the next one may see more
                log.exception("turns with an idempotency key could not be looked after")

    async def end_surplus(self) -> None:
        """Ends those whose time is over, and those that are too many."""
        for session in self._over():
            await self._keeper.end(session)

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
        keyed = [one for one in self._keeper.all() if one.keyed]
        resting = sorted((one for one in keyed if one.free and one.turns), key=lambda one: one.rests_since)
        bytes_of = self._keeper.copies.bytes_of
        surplus = len(resting) - KEPT_TURNS
        surplus_bytes = sum(map(bytes_of, keyed)) - self._kept_bytes
        now = self._unix()
        over: list[Session] = []
        for one in resting:
            if surplus > 0 or surplus_bytes > 0 or one.rests_since + KEPT_SECONDS < now:
                over.append(one)
                surplus, surplus_bytes = surplus - 1, surplus_bytes - bytes_of(one)
        return over
