"""What is asked of a session beside its turns. One desk a replica; whatever it is asked of, it brings here first."""

from __future__ import annotations

import asyncio
import time

import numpy as np

from deployment.cluster.not_owned import NotOwned, OwnedElsewhere
from deployment.creating import Creating
from deployment.errors import RequestError
from deployment.fork_points import ForkAt
from deployment.forking import Forking
from deployment.keeper import SessionKeeper
from deployment.ownership.words import SessionKey
from deployment.session import Session
from deployment.state_limit import StateLimit
from deployment.turn_table import TurnTable
from deployment.wire import Adopted, ExportedSession, Movement, Route
from state.session_record import ForkPoint


class SessionDesk:
    """`EngineReplica` says what each call is. OwnedElsewhere, RequestError, EngineError."""

    def __init__(
        self,
        replica: str,
        keeper: SessionKeeper,
        creating: Creating,
        forking: Forking,
        state_limit: StateLimit,
        turns: TurnTable,
    ) -> None:
        self._id = replica
        self._keeper = keeper
        self._creating = creating
        self._forking = forking
        self._state_limit = state_limit
        self._turns = turns

    async def adopt(self, route: Route, key: SessionKey) -> Adopted:
        session, hit = await self._keeper.acquire(key, route.placement, must_exist=True)
        # Who believed it elsewhere has had it moved here just now.
        believed = route.placement.owner if route.placement is not None else None
        return Adopted(self._id, session.epoch, hit if believed == self._id else session.came, session.frontier)

    async def move(self, route: Route, key: SessionKey, destination: str) -> Movement | None:
        session, _ = await self._keeper.acquire(key, route.placement, must_exist=True)
        return await self._keeper.move(session, destination)

    async def fork(self, route: Route, key: SessionKey, child_key: SessionKey, at: ForkAt | None) -> Adopted:
        await self._state_limit.check(child_key.tenant)
        session, _ = await self._keeper.acquire(key, route.placement, must_exist=True)
        made = await self._made_before(child_key, self._forking.past(session, at).ledger) if route.again else None
        child = made or await self._forking.fork(session, child_key, at)
        return Adopted(self._id, child.epoch, "device", child.frontier)

    async def checkpoint(self, route: Route, key: SessionKey, name: str) -> ForkPoint:
        session, _ = await self._keeper.acquire(key, route.placement, must_exist=True)
        made = self._forking.made_before(session, name) if route.again else None
        return made or await self._forking.checkpoint(session, name)

    async def delete_checkpoint(self, route: Route, key: SessionKey, name: str) -> bool:
        session, _ = await self._keeper.acquire(key, route.placement, must_exist=True)
        try:
            await self._forking.delete_checkpoint(session, name)
        except RequestError as error:
            if not (route.again and error.refused.code == "checkpoint_not_found"):
                raise
        return True

    async def export(self, route: Route, key: SessionKey) -> ExportedSession:
        session, _ = await self._keeper.acquire(key, route.placement, must_exist=True)
        return ExportedSession(await self._keeper.copies.document(session))

    async def import_(self, key: SessionKey, document: np.ndarray) -> Adopted:
        await self._state_limit.check(key.tenant)
        session = await self._creating.imported(key, await asyncio.to_thread(document.tobytes))
        return Adopted(self._id, session.epoch, "disk", session.frontier)

    async def create(self, key: SessionKey, alone: bool) -> Adopted:
        await self._state_limit.check(key.tenant)
        session = await self._creating.empty(key, alone)
        return Adopted(self._id, session.epoch, "none", session.frontier)

    async def delete(self, route: Route, key: SessionKey) -> bool:
        while True:
            # `anew`: one of which no copy is left can be deleted too.
            session, _ = await self._keeper.acquire(key, route.placement, must_exist=True, anew=True)
            try:
                await self._keeper.ending.delete(session, time.time())
            except NotOwned:
                continue  # whose it is now is known by acquiring it
            self._turns.forget(key)
            return True

    async def cancel_turn(self, route: Route, key: SessionKey, turn: str) -> str:
        while True:
            session, _ = await self._keeper.acquire(key, route.placement, must_exist=True)
            running = session.running
            if running is None or running.id != turn:
                message = f"turn {turn!r} does not run, so that it cannot be cancelled"
                raise RequestError(409, "turn_over", message, "turn")
            running.cancel()
            await running.ended()
            if not running.stream.moved:
                return running.request.note

    async def _made_before(self, key: SessionKey, ledger: tuple[int, ...]) -> Session | None:
        """What a replica that was asked before, and was lost, has made: all that is asked for, and no more."""
        try:
            made, _ = await self._keeper.acquire(key, await self._keeper.located(key), must_exist=True)
        except OwnedElsewhere:
            return None
        except RequestError as error:
            if error.refused.status == 404:
                return None
            raise
        return made if made.ledger == ledger and made.free else None
