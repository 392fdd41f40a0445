"""What is asked of a session beside its turns. One desk a replica; whatever it is asked of, it brings here first."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import numpy as np

from deployment.cluster.not_owned import NotOwned, OwnedElsewhere
from deployment.creating import Creating
from deployment.errors import RequestError, session_exists
from deployment.fork_points import ForkAt
from deployment.forking import Forking
from deployment.keeper import SessionKeeper
from deployment.ownership.words import SessionKey
from deployment.session import Session
from deployment.state_limit import StateLimit
from deployment.turn_table import TurnTable
from deployment.wire import Adopted, ExportedSession, Movement, Route
from state.document import open_document
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
        session, _ = await self._keeper.acquire(key, route.placement, must_exist=True)
        try:
            child = await self._made(
                route,
                child_key,
                lambda: self._forking.fork(session, child_key, at),
                lambda: self._forking.past(session, at).ledger,
            )
        except OwnedElsewhere:  # who asks is sent to the child's owner, which does not have the parent
            raise session_exists(child_key.session) from None
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

    async def import_(self, route: Route, key: SessionKey, document: np.ndarray) -> Adopted:
        body = await asyncio.to_thread(document.tobytes)
        session = await self._made(
            route,
            key,
            lambda: self._creating.imported(key, body),
            lambda: open_document(body).manifest.session.record().ledger,
        )
        return Adopted(self._id, session.epoch, "disk", session.frontier)

    async def create(self, route: Route, key: SessionKey, alone: bool) -> Adopted:
        session = await self._made(route, key, lambda: self._creating.empty(key, alone), tuple)
        return Adopted(self._id, session.epoch, "none", session.frontier)

    async def delete(self, route: Route, key: SessionKey) -> bool:
        while True:
            try:
                # `anew`: one of which no copy is left can be deleted too.
                session, _ = await self._keeper.acquire(key, route.placement, must_exist=True, anew=True)
            except RequestError as error:
                if route.again and error.refused.code == "session_not_found":
                    return True
                raise
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

    async def _made(
        self,
        route: Route,
        key: SessionKey,
        make: Callable[[], Awaitable[Session]],
        ledger: Callable[[], tuple[int, ...]],
    ) -> Session:
        """A new session; or what a replica has made that was asked before, and was lost: all that is asked for, and no
        more. OwnedElsewhere, if somebody else has it who may know."""
        if route.again and (made := await self._existing(key)) is not None:
            if made.free and made.ledger == await asyncio.to_thread(ledger):
                return made
            raise session_exists(key.session)
        await self._state_limit.check(key.tenant)
        return await make()

    async def _existing(self, key: SessionKey) -> Session | None:
        try:
            session, _ = await self._keeper.acquire(key, await self._keeper.located(key), must_exist=True)
        except RequestError as error:
            if error.refused.code != "session_not_found":
                raise
            return None
        return session
