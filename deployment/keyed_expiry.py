"""When does a turn's own session (`deployment/keyed_turns.py`) end? When nobody may ask for the turn any more."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ray.exceptions import RayError

from deployment.cluster.owned_sessions import NotOwned
from deployment.engine.errors import EngineError
from deployment.errors import RequestError
from deployment.keeper import SessionKeeper
from deployment.keyed_turns import KEYED
from deployment.ownership.messages import Placed
from deployment.session import Session
from deployment.turn_table import KEPT_SECONDS

SWEEP_SECONDS = 300.0

KEPT_TURNS = 4096
"""Of one replica; beyond it the longest ended ones go before their time."""

log = logging.getLogger("ray.serve")


class Unowned(Protocol):
    async def unowned(self, beginning: str) -> Sequence[Placed]:
        """Sessions whose names begin so and that no replica owns. Raises `RayError`, TimeoutError."""
        ...


class KeyedExpiry:
    """Of those that one replica owns. `unix`: seconds since 1970."""

    def __init__(self, keeper: SessionKeeper, cluster: Unowned, unix: Callable[[], float] = time.time) -> None:
        self._keeper = keeper
        self._cluster = cluster
        self._unix = unix

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                await self.sweep()
            except Exception:  # the next one may see more
                log.exception("turns with an idempotency key could not be looked after")

    async def sweep(self) -> None:
        """Those of replicas that are gone are taken over, after all else, so that no fault of theirs keeps the others:
        nobody else would ever end them."""
        for session in self._over():
            try:
                await self._keeper.delete(session, self._unix())
            except RequestError as error:
                log.info("a keyed turn is not ended: %s", error)
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
        resting = [one for one in self._keeper.all() if one.keyed and one.free and one.turns]
        resting.sort(key=_ended_at)
        surplus = max(0, len(resting) - KEPT_TURNS)
        now = self._unix()
        return [one for place, one in enumerate(resting) if place < surplus or _ended_at(one) + KEPT_SECONDS < now]


def _ended_at(session: Session) -> float:
    return session.turns[-1].ended_at
