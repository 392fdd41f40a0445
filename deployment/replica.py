"""One engine as a Serve replica: prompts in, text out, and the sessions it owns."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import ray
from ray import serve

from deployment.arrivals import Arrivals
from deployment.checkpoint_places import KindAt
from deployment.cluster.fleet import Load
from deployment.cluster.not_owned import OwnedElsewhere
from deployment.cluster.transport import Cluster, RayTransport, on_head, start_host_store
from deployment.creating import Creating
from deployment.draining import Drainer
from deployment.durable_copies import DurableCopies
from deployment.durable_place import settled
from deployment.engine import errors as engine_errors
from deployment.engine.commands import Inspect
from deployment.engine.errors import EngineError
from deployment.engine.events import Facts
from deployment.engine.service import EngineService
from deployment.engine_health import EngineHealth, EngineStuck
from deployment.errors import Refused, RequestError, of_engine
from deployment.event_ids import EventId
from deployment.fork_points import ForkAt
from deployment.forking import Forking
from deployment.held_turn import HeldTurn, call_later
from deployment.keeper import SessionKeeper
from deployment.keyed_expiry import KEPT_SHARE, KeyedExpiry
from deployment.logs import set_up
from deployment.metrics.measured import Measured
from deployment.moving import ToDestination, Welcome
from deployment.ownership.messages import Drain
from deployment.ownership.words import SessionKey
from deployment.prompting import Prompter
from deployment.router import LANES_FREE
from deployment.scaling import RECENT_SECONDS, Demand
from deployment.session import Session
from deployment.session_desk import SessionDesk
from deployment.settings import AppArgs
from deployment.state_limit import StateLimit
from deployment.telling import events, is_full, told
from deployment.turn_desk import TurnDesk
from deployment.turn_lines import TurnLines
from deployment.turn_records import turn_object
from deployment.turn_table import TurnTable
from deployment.wire import (
    MOST_TOLD_IDS,
    Adopted,
    Elsewhere,
    Encoded,
    EncodedAs,
    ExportedSession,
    Movement,
    NotHere,
    PlacedCheckpoint,
    Received,
    ReplicaInfo,
    Route,
    SessionInfo,
    Told,
    TurnAnswer,
    TurnRequest,
)
from state.session_record import ForkPoint

STORE_SECONDS = 60.0
"""How long a node's host store may take to come up."""

STUCK_END_SECONDS = 12.0
"""Between the first check that finds the engine stuck, and the end of the process: it may have been a slow step, which
the next check sees."""

MEASURED_SECONDS = 1.0
"""How long who only looks may wait for the engine: less than a scrape's ingress waits for the replica."""

STAY_SECONDS = 10.0
"""How long a session stays at least before it is moved again for want of room."""

log = logging.getLogger("ray.serve")

T = TypeVar("T")


class EngineReplica:
    """A Serve deployment, which `deployment/app.py` binds: what ingresses and other replicas ask of a replica."""

    def __init__(self, args: AppArgs) -> None:
        context = serve.get_replica_context()
        self._cluster = Cluster(context.app_name, args.durable, args.durable_key_env, args.logs)
        args = settled(args, context.app_name, on_head=on_head())
        self._id = context.replica_id.unique_id
        self._model = args.model_id
        set_up(args.logs, context)
        self._service = EngineService.start(args.engine_options())
        store = start_host_store(context.app_name, args.host_store_bytes, logs=args.logs)
        ray.get(store.member.remote(), timeout=STORE_SECONDS)
        self._turns = TurnTable()
        transport = RayTransport(self._cluster, context.app_name, self._id, self._load)
        durable = DurableCopies(
            context.app_name, self._service, args.durable, args.durable_bytes, key_env=args.durable_key_env
        )
        self._peers = serve.get_deployment_handle(context.deployment, context.app_name)
        self._arrivals = Arrivals(self._service, self._cluster.node, self._service.options.staged_seconds)
        self._keeper = SessionKeeper(
            self._id, self._service, self._cluster, transport, durable, self._arrivals, self._send
        )
        self._state_limit = StateLimit(args.tenant_state_bytes, self._cluster.used_by, self._keeper.copies.make_room_of)
        self._drainer = Drainer(self._id, self._keeper)
        self._keyed = KeyedExpiry(self._keeper, self._cluster, args.host_store_bytes // KEPT_SHARE)
        creating = Creating(self._service, self._keeper)
        forking = Forking(self._service, self._keeper, creating)
        self._sessions = SessionDesk(self._id, self._keeper, creating, forking, self._state_limit, self._turns)
        self._lanes, self._store_bytes = args.lanes, args.host_store_bytes
        self._prompter = Prompter(self._service, accept_new_weights=args.accept_new_weights, media=args.media_limits)
        self._desk = TurnDesk(
            self._id,
            self._model,
            self._service,
            self._keeper,
            self._prompter,
            self._turns,
            args.detach_seconds,
            call_later,
            lines=TurnLines(args.log_texts),
        )
        self._health = EngineHealth(self._service, args.patience)
        self._ending: asyncio.TimerHandle | None = None
        self._started = False

    def _start(self) -> None:
        """The constructor has no event loop; every call comes through here or through `check_health`."""
        if not self._started:
            self._started = True
            self._keeper.start(self._desk.resume, self._drainer.told)
            self._expiring = asyncio.create_task(self._keyed.watch())

    async def check_health(self) -> None:
        self._start()
        try:
            await self._health.check()
        except EngineStuck as error:
            log.error("%s; the replica ends, and its sessions go on elsewhere", error)
            # Asked to go, it would wait for its turns. What it holds is in its sessions' logs.
            self._ending = self._ending or asyncio.get_running_loop().call_later(STUCK_END_SECONDS, os._exit, 1)
            raise
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None

    async def __del__(self) -> None:
        # Serve calls this for a replica whose constructor failed, too; for others once no request runs here any more.
        if getattr(self, "_started", False):
            self._expiring.cancel()
            await self._leave()
            # Of those that nobody could take: their sessions' next owners go on with them, whoever these will be.
            self._turns.moved()
        if getattr(self, "_keeper", None) is not None:
            self._keeper.close()
        service: EngineService | None = getattr(self, "_service", None)
        if service is not None:
            service.close()

    async def _leave(self) -> None:
        """Gives all sessions away, if there is anybody to take them. Serve's graceful_shutdown_timeout_s bounds it."""
        to = await self._cluster.staying(beside=self._id)
        if to:
            self._drainer.told(Drain(to))
            await self._drainer.empty()

    def _load(self) -> Load:
        wanted = self._turns.lanes_wanted
        return Load(max(0, self._lanes - wanted), max(0, wanted - self._lanes))

    async def record_routing_stats(self) -> dict[str, int]:
        """For the routers, which Serve gives it to."""
        return {LANES_FREE: self._load().lanes_free}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For `deployment/scaling.py`, which Serve gives it to."""
        kept = self._keeper.copies.recent_bytes(time.time() - RECENT_SECONDS)
        return Demand(self._lanes, self._turns.lanes_wanted, kept, self._cluster.node, self._store_bytes).told()

    # ------------------------------------------------------------------------------------------------ turns

    async def take_turn(self, route: Route, request: TurnRequest) -> AsyncIterator[TurnAnswer]:
        """Begins a turn, or finds the one that is asked for again, and tells it from its first event. The last event
        is the last choice's Closed, or a Refused."""
        self._start()
        if route.receipt:
            yield Received(self._id)
        async with aclosing(told(lambda: self._take(route, request), None)) as answers:
            async for answer in answers:
                full = isinstance(answer, Told) and is_full(answer.event)
                yield (await self._make_way(route, request) or answer) if full else answer

    async def _take(self, route: Route, request: TurnRequest) -> HeldTurn | Elsewhere | NotHere:
        to = await self._sent_on(route, request)
        if to is not None:
            return NotHere(self._id, to)
        if request.key is not None and self._turns.repeated(request) is None:
            await self._state_limit.check(request.key.tenant)
        return await self._desk.take(route, request)

    async def _sent_on(self, route: Route, request: TurnRequest) -> str | None:
        """Who takes the turn instead of this replica, which is about to go."""
        if request.key is not None:
            return await self._drainer.sent_on(request.key, route.placement.owner if route.placement else None)
        known = self._turns.repeated(request) is not None
        return None if known else self._drainer.destination(route.affinity)

    async def _make_way(self, route: Route, request: TurnRequest) -> NotHere | None:
        """Where a turn begins at once that is refused here for want of room. Its session goes there with its state.
        None: nowhere, or it has come from elsewhere just now, since a session that is sent to and fro gains nothing."""
        if request.key is None and request.idempotency_key is not None:
            return None  # a retry with this key comes here, and must find its turn
        session = self._keeper.held(request.key) if request.key is not None else None
        if route.sent_on or (session is not None and time.monotonic() - session.arrived < STAY_SECONDS):
            return None
        to = await self._cluster.with_room(beside=self._id)
        if to is None:
            return None
        if session is not None:
            try:
                if not session.free or not await self._keeper.move(session, to):
                    return None
            except RequestError:  # it is being moved already
                return None
        return NotHere(self._id, to, full=True)

    async def follow_turn(
        self, route: Route, key: SessionKey, turn: str, after: EventId | None
    ) -> AsyncIterator[TurnAnswer]:
        """A session's turn, running or over: its first event, then all others, or those after an event id."""
        self._start()
        if route.receipt:
            yield Received(self._id)
        async with aclosing(told(lambda: self._desk.find(route, key, turn), after)) as answers:
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
        async with aclosing(events(held, after)) as answers:
            async for answer in answers:
                yield answer

    # ------------------------------------------------------------------------------------------------ tokens

    async def encode(self, route: Route, request: TurnRequest, wanted: EncodedAs = "count") -> Encoded | Refused:
        """The prompt that a turn would have."""
        try:
            ids = await self._prompter.encoded(request)
        except RequestError as error:
            return error.refused
        encoded = Encoded(len(ids), self._service.context_limit)
        if wanted == "count":
            return encoded
        if len(ids) > MOST_TOLD_IDS:
            field = "prompt" if request.mode == "prompt" else "messages"
            what = f"{field}: the prompt has {len(ids)} tokens, and at most {MOST_TOLD_IDS} are told"
            return Refused(400, engine_errors.INVALID_REQUEST, what, field)
        spelled = await asyncio.to_thread(self._spelled, ids) if wanted == "spelled" else ()
        return replace(encoded, ids=ids, spelled=spelled)

    def _spelled(self, ids: Sequence[int]) -> tuple[bytes, ...]:
        return tuple(map(self._service.tokenizer.spelled, ids))

    async def decode(self, route: Route, ids: tuple[int, ...]) -> str | Refused:
        """The text of ids, special tokens as they are spelled."""
        tokenizer = self._service.tokenizer
        wrong = next((token for token in ids if token >= tokenizer.public_rows), None)
        if wrong is not None:
            what = f"token id {wrong} is unknown; the tokenizer's ids are below {tokenizer.public_rows}"
            return Refused(400, engine_errors.INVALID_REQUEST, f"tokens: {what}", "tokens")
        return b"".join(await asyncio.to_thread(self._spelled, ids)).decode("utf-8", errors="replace")

    # ------------------------------------------------------------------------------------------------ sessions

    async def adopt(self, route: Route, key: SessionKey) -> Adopted | NotHere | Refused:
        """Brings an existing session here."""
        if route.replica not in (None, self._id):
            return NotHere(self._id)
        return await self._asked(self._sessions.adopt(route, key))

    async def move(self, route: Route, key: SessionKey, destination: str) -> Movement | NotHere | Refused | None:
        """Gives a session, and the turn that runs in it, to another replica. None: it stayed."""
        return await self._asked(self._sessions.move(route, key, destination))

    async def receive(self, route: Route, message: ToDestination) -> Welcome | NotHere | Refused:
        """A part of a session that another replica may give to this one."""
        if route.replica != self._id:
            return NotHere(self._id)
        return await self._asked(self._arrivals.receive(message))

    async def _send(self, replica: str, message: ToDestination) -> Welcome | NotHere | Refused:
        return await self._peers.receive.remote(Route(str(message.key), replica), message)

    async def fork(
        self, route: Route, key: SessionKey, child_key: SessionKey, at: ForkAt | None
    ) -> Adopted | NotHere | Refused:
        """Gives `child_key` all that the session is, or was. The child lives here, sharing the parent's pages."""
        return await self._asked(self._sessions.fork(route, key, child_key, at))

    async def checkpoint(self, route: Route, key: SessionKey, name: str) -> ForkPoint | NotHere | Refused:
        """Keeps where the session stands now."""
        return await self._asked(self._sessions.checkpoint(route, key, name))

    async def delete_checkpoint(self, route: Route, key: SessionKey, name: str) -> bool | NotHere | Refused:
        return await self._asked(self._sessions.delete_checkpoint(route, key, name))

    async def _asked(self, answer: Awaitable[T]) -> T | NotHere | Refused:
        """Refusals as values; `NotHere` with the owner if that is another replica."""
        self._start()
        try:
            return await answer
        except OwnedElsewhere as error:
            return NotHere(self._id, error.owner)
        except RequestError as error:
            return error.refused
        except EngineError as error:
            return of_engine(error.code, error.message, error.param)

    async def export_session(self, route: Route, key: SessionKey) -> ExportedSession | NotHere | Refused:
        """The session as a document for its client."""
        return await self._asked(self._sessions.export(route, key))

    async def import_session(self, route: Route, key: SessionKey, document: np.ndarray) -> Adopted | NotHere | Refused:
        """A new session, made of a document."""
        return await self._asked(self._sessions.import_(route, key, document))

    async def create_session(self, route: Route, key: SessionKey, alone: bool = False) -> Adopted | NotHere | Refused:
        """A new session without a past, which lives here; `alone`: in this node's memory, and nowhere else."""
        return await self._asked(self._sessions.create(route, key, alone))

    async def delete(self, route: Route, key: SessionKey) -> bool | NotHere | Refused:
        """A running turn is cancelled."""
        return await self._asked(self._sessions.delete(route, key))

    async def cancel_turn(self, route: Route, key: SessionKey, turn: str) -> str | NotHere | Refused:
        """Ends a session's running turn at its next commit boundary, and returns its note once it is over."""
        return await self._asked(self._sessions.cancel_turn(route, key, turn))

    async def session_info(self, route: Route, key: SessionKey) -> SessionInfo | NotHere | Refused:
        """What the owner knows, and if it is gone, what its copies say: then the session is brought here."""
        return await self._asked(self._session_info(route, key))

    async def _session_info(self, route: Route, key: SessionKey) -> SessionInfo:
        session, _ = await self._keeper.acquire(key, route.placement, must_exist=True, untouched=True)
        return self._info_of(session, self._keeper.copies.checkpoints(session, await self._on_device(session)))

    async def _on_device(self, session: Session) -> tuple[KindAt, ...]:
        """What the engine has of a session; nothing if it does not say so soon, as in a long step, or stuck."""
        try:
            return (await asyncio.wait_for(self._inspected(session.engine_id), MEASURED_SECONDS)).checkpoints
        except TimeoutError:
            log.info("the engine does not say what it has of session %s", session.key)
            return ()

    def _info_of(self, session: Session, checkpoints: tuple[PlacedCheckpoint, ...]) -> SessionInfo:
        return SessionInfo(
            replica=self._id,
            epoch=session.epoch,
            tokens=len(session.ledger),
            frontier=session.frontier,
            running=session.running.id if session.running else None,
            transcript=tuple(session.transcript),
            turns=tuple(turn_object(turn) for turn in session.turns),
            checkpoints=checkpoints,
            fork_points=tuple(replace(point, ledger=(), transcript=()) for point in session.fork_points),
            running_note=session.running.request.note if session.running else "",
        )

    async def info(self, route: Route | None = None) -> ReplicaInfo:
        """Who asks one replica, by a route, is after what never changes: that is told without the engine's facts where
        they do not come soon."""
        if route is None:
            return self._described((await self._inspected()).facts)
        try:
            return self._described((await asyncio.wait_for(self._inspected(), MEASURED_SECONDS)).facts)
        except TimeoutError:
            return self._described({})

    async def measured(self) -> Measured | None:
        """For a scrape of the application's metrics, which does not wait for a long step; None: there is one."""
        try:
            answer = await asyncio.wait_for(self._inspected(), MEASURED_SECONDS)
        except TimeoutError:
            return None
        return Measured(self._described(answer.facts), answer.counts, self._keeper.transfers.counts)

    async def _inspected(self, session: str | None = None) -> Facts:
        answer = await self._service.call(Inspect(secrets.token_hex(8), session))
        assert isinstance(answer, Facts)
        return answer

    def _described(self, engine: dict[str, Any]) -> ReplicaInfo:
        return ReplicaInfo(
            replica=self._id,
            pid=os.getpid(),
            node=self._cluster.node,
            model=self._model,
            backend=self._service.options.backend,
            context_limit=self._service.context_limit,
            sessions=self._keeper.named,
            running=self._turns.running,
            engine=engine,
            defaults=self._service.generation_defaults,
        )
