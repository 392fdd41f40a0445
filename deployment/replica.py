"""One engine as a Serve replica: prompts in, text out, and the sessions it owns."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import numpy as np
from ray import serve
from ray.exceptions import RayActorError

from deployment.actors import Cluster
from deployment.engine import errors as engine_errors
from deployment.engine.errors import EngineError
from deployment.engine.messages import Facts, Fork, Inspect
from deployment.engine.service import EngineService
from deployment.errors import Refused, RequestError, of_engine, session_busy
from deployment.event_ids import EventId
from deployment.held_turn import HeldTurn, call_later
from deployment.keeper import SessionKeeper
from deployment.ownership import Epoch, Placement, SessionKey
from deployment.prompting import Prompter
from deployment.session import Session
from deployment.settings import AppArgs
from deployment.turn_desk import TurnDesk
from deployment.turn_records import turn_object
from deployment.turn_table import TurnTable
from deployment.wire import (
    Adopted,
    Elsewhere,
    ExportedSession,
    HandedOver,
    NotHere,
    ReplicaInfo,
    Route,
    SessionInfo,
    Told,
    TurnAnswer,
    TurnRequest,
)

PEER_SECONDS = 10.0

log = logging.getLogger("ray.serve")


class ServePeers:
    """Calls to a named replica of the own deployment. Serve has no such call: the callee checks that it was meant."""

    def __init__(self, deployment: str, app: str) -> None:
        self._handle = serve.get_deployment_handle(deployment, app)

    async def hand_over(self, placement: Placement) -> HandedOver | NotHere | Refused:
        """A dead or silent owner is NotHere: the host stores are asked next."""
        owner = placement.owner or ""
        route = Route(str(placement.key), owner)
        try:
            return await asyncio.wait_for(self._call("hand_over", route, placement), PEER_SECONDS)
        except (RayActorError, TimeoutError) as error:
            log.warning("replica %s did not hand over %s: %r", owner, placement.key, error)
            return NotHere(owner)

    async def release(self, placement: Placement) -> None:
        route = Route(str(placement.key), placement.owner)
        try:
            await asyncio.wait_for(self._call("release", route, placement), PEER_SECONDS)
        except (RayActorError, TimeoutError) as error:
            log.warning("replica %s was not told that %s has moved: %r", placement.owner, placement.key, error)

    async def _call(self, method: str, route: Route, placement: Placement) -> Any:
        return await getattr(self._handle, method).remote(route, placement)


# Each generator closes the one that it reads: a reader who leaves must be known to have left at once.
async def _told(
    get: Callable[[], Awaitable[HeldTurn | Elsewhere]], after: EventId | None
) -> AsyncGenerator[TurnAnswer, None]:
    """Refusals are values, so that no traceback is a user's."""
    try:
        found = await get()
    except RequestError as error:
        yield Told("", error.refused)
        return
    except EngineError as error:
        yield Told("", of_engine(error.code, error.message, error.param))
        return
    if isinstance(found, Elsewhere):
        yield found
        return
    async with aclosing(_events(found, after)) as events:
        async for told in events:
            yield told


async def _events(turn: HeldTurn, after: EventId | None) -> AsyncGenerator[TurnAnswer, None]:
    try:
        async with aclosing(turn.read(after)) as events:
            async for told in events:
                yield told
    except RequestError as error:
        yield Told("", error.refused)


class EngineReplica:
    """A Serve deployment (`deployment/app.py` binds it). Refusals are values, so that no traceback is a user's."""

    def __init__(self, args: AppArgs) -> None:
        context = serve.get_replica_context()
        self._id = context.replica_id.unique_id
        self._model = args.model_id
        self._service = EngineService.start(args.engine_options())
        self._cluster = Cluster(context.app_name, args.host_store_bytes)
        self._cluster.start_host_store()
        self._keeper = SessionKeeper(
            self._id, self._service, self._cluster, ServePeers(context.deployment, context.app_name)
        )
        self._turns = TurnTable()
        self._desk = TurnDesk(
            self._id,
            self._model,
            self._service,
            self._keeper,
            Prompter(self._service, accept_new_weights=args.accept_new_weights),
            self._turns,
            args.detach_seconds,
            call_later,
        )

    async def check_health(self) -> None:
        await self._service.call(Inspect(secrets.token_hex(8)))

    async def __del__(self) -> None:
        # Serve calls this for a replica whose constructor failed, too.
        service: EngineService | None = getattr(self, "_service", None)
        if service is not None:
            service.close()

    # ------------------------------------------------------------------------------------------------ turns

    async def take_turn(self, route: Route, request: TurnRequest) -> AsyncIterator[TurnAnswer]:
        """Begins a turn, or finds the one that is asked for again, and tells it from its first event. The last event
        is the last choice's Closed, or a Refused."""
        async with aclosing(_told(lambda: self._desk.take(route, request), None)) as answers:
            async for answer in answers:
                yield answer

    async def follow_turn(
        self, route: Route, key: SessionKey, turn: str, after: EventId | None
    ) -> AsyncIterator[TurnAnswer]:
        """A session's turn, running or over: its first event, then all others, or those after an event id."""
        async with aclosing(_told(lambda: self._desk.find(route, key, turn), after)) as answers:
            async for answer in answers:
                yield answer

    async def follow_kept_turn(
        self, route: Route, key: SessionKey, turn: str, after: EventId | None
    ) -> AsyncIterator[TurnAnswer]:
        """The same of a session that has moved on, as long as its turn's events are kept here."""
        held = self._turns.find(turn, key)
        if held is None:
            yield NotHere(self._id)
            return
        async with aclosing(_events(held, after)) as answers:
            async for answer in answers:
                yield answer

    # ------------------------------------------------------------------------------------------------ sessions

    async def adopt(self, route: Route, key: SessionKey) -> Adopted | NotHere | Refused:
        """Brings an existing session here."""
        if route.replica not in (None, self._id):
            return NotHere(self._id)
        try:
            session, hit = await self._keeper.acquire(key, route.placement, must_exist=True)
        except RequestError as error:
            return error.refused
        return Adopted(self._id, session.epoch, hit, session.frontier)

    async def hand_over(self, route: Route, placement: Placement) -> HandedOver | NotHere | Refused:
        """Gives a session to the replica that asks; `release` follows once that one has it."""
        if route.replica != self._id:
            return NotHere(self._id)
        return await self._keeper.give(placement.key, placement)

    async def release(self, route: Route, placement: Placement) -> None:
        if route.replica == self._id:
            await self._keeper.release(placement.key, placement)

    async def fork(self, route: Route, key: SessionKey, child_key: SessionKey) -> Adopted | Refused:
        """Gives `child_key` all that the session is now. The child lives here, sharing the parent's pages."""
        try:
            session, _ = await self._keeper.acquire(key, route.placement, must_exist=True)
            return await self._fork(session, child_key)
        except RequestError as error:
            return error.refused
        except EngineError as error:
            return of_engine(error.code, error.message, error.param)

    async def _fork(self, session: Session, child_key: SessionKey) -> Adopted | Refused:
        if not await self._keeper.idle(session):
            raise session_busy(session.key.session, "a turn is running; it can be forked between turns")
        self._keeper.check_found(session)
        child = await self._keeper.create(child_key, like=session)
        try:
            await self._fork_state(session, child)
        except (EngineError, RequestError):
            await self._keeper.abandon(child)
            raise
        await self._keeper.copy(child)
        return Adopted(self._id, child.epoch, "device", child.frontier)

    async def _fork_state(self, session: Session, child: Session) -> None:
        fork = Fork(secrets.token_hex(8), session.engine_id, child.engine_id)
        try:
            await self._service.call(fork)
        except EngineError as error:
            if error.code != engine_errors.UNKNOWN_SESSION:
                raise
            # Without state on the device or in a host store, the child is whole by its ledger.
            with contextlib.suppress(RequestError, EngineError):
                await self._keeper.bring_back(session)
                await self._service.call(fork)

    async def export_session(self, route: Route, key: SessionKey) -> ExportedSession | Refused:
        """The session as a document for its client."""
        try:
            session, _ = await self._keeper.acquire(key, route.placement, must_exist=True)
            return ExportedSession(await self._keeper.document(session))
        except RequestError as error:
            return error.refused
        except EngineError as error:
            return of_engine(error.code, error.message, error.param)

    async def import_session(self, route: Route, key: SessionKey, document: np.ndarray) -> Adopted | Refused:
        """A new session, made of a document."""
        try:
            session = await self._keeper.create_imported(key, await asyncio.to_thread(document.tobytes))
        except RequestError as error:
            return error.refused
        except EngineError as error:
            return of_engine(error.code, error.message, error.param)
        return Adopted(self._id, session.epoch, "disk", session.frontier)

    async def create_session(self, route: Route, key: SessionKey) -> Adopted | Refused:
        """A new session without a past, which lives here."""
        try:
            session = await self._keeper.create_empty(key)
        except RequestError as error:
            return error.refused
        return Adopted(self._id, session.epoch, "none", session.frontier)

    async def delete(self, route: Route, key: SessionKey) -> bool:
        """False if there is no such session. A running turn is cancelled."""
        session = self._keeper.held(key)
        if session is not None:
            if session.running is not None:
                session.running.cancel()
                await session.running.ended()
            await self._keeper.forget(session)
        self._turns.forget(key)
        return await self._cluster.delete(key) is not None

    async def loaded_session_info(self, route: Route, key: SessionKey) -> SessionInfo | Refused:
        """What the owner knows, and if it is gone, what its copies say: then the session is brought here."""
        try:
            session, _ = await self._keeper.acquire(key, route.placement, must_exist=True)
        except RequestError as error:
            return error.refused
        return self._info_of(session)

    async def session_info(self, route: Route, key: SessionKey) -> SessionInfo | NotHere:
        """What the owner knows; NotHere if that is not this replica."""
        session = self._keeper.held(key)
        if session is None or (route.placement is not None and route.placement.epoch != session.epoch):
            return NotHere(self._id)
        return self._info_of(session)

    def _info_of(self, session: Session) -> SessionInfo:
        return SessionInfo(
            replica=self._id,
            epoch=session.epoch,
            tokens=len(session.ledger),
            frontier=session.frontier,
            running=session.running.id if session.running else None,
            transcript=tuple(session.transcript),
            turns=tuple(turn_object(turn) for turn in session.turns),
            checkpoints=session.checkpoints,
        )

    async def owned(self) -> list[tuple[str, SessionKey, Epoch]]:
        """For a directory that is being rebuilt."""
        return [(self._id, session.key, session.epoch) for session in self._keeper.owned()]

    async def info(self, route: Route | None = None) -> ReplicaInfo:
        answer = await self._service.call(Inspect(secrets.token_hex(8)))
        assert isinstance(answer, Facts)
        return ReplicaInfo(
            replica=self._id,
            pid=os.getpid(),
            node=self._cluster.node,
            model=self._model,
            backend=self._service.options.backend,
            context_limit=self._service.context_limit,
            sessions=len(self._keeper),
            running=self._turns.running,
            engine=answer.facts,
        )
