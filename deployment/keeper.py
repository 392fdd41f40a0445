"""Which sessions does this replica hold, and how does it get, copy, give and lose them?

Above the ownership machines: what a session is, is what its newest image says and its log after that. A turn whose end
is not in the log goes on here, from the last round that is.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from ray.exceptions import RayError

from deployment import wire
from deployment.arrivals import Arrival, Arrivals
from deployment.cluster.not_owned import NoCopyLeft, NotOwned
from deployment.cluster.owned_sessions import OwnedSessions
from deployment.cluster.reach import Transport
from deployment.cluster.transport import Cluster
from deployment.durable_copies import DurableCopies
from deployment.ending import Ending
from deployment.engine.commands import Drop, Hit
from deployment.engine.errors import EngineError
from deployment.engine.service import EngineService
from deployment.errors import RequestError, session_unavailable, unknown_session
from deployment.giving import Giving
from deployment.locks import Locks
from deployment.metrics.transfers import Transfers
from deployment.moving import Send
from deployment.ownership.log import OLDER, Numbered
from deployment.ownership.messages import Drain, Offer, Opened, Placed, Wait
from deployment.ownership.words import Epoch, SessionKey
from deployment.rebuilding import Rebuilder, begun_again, exists, lacks_image
from deployment.session import Session
from deployment.session_copies import KEPT_SECONDS, SessionCopies
from deployment.session_log import LoggedTurn
from deployment.taking import Taking

LOCATE_SECONDS = 10.0

log = logging.getLogger("ray.serve")

T = TypeVar("T")


class SessionKeeper:
    """All sessions that one replica owns."""

    def __init__(
        self,
        replica: str,
        service: EngineService,
        cluster: Cluster,
        transport: Transport,
        durable: DurableCopies,
        arrivals: Arrivals,
        send: Send,
    ) -> None:
        """`arrivals`: what others sent of sessions that they may give; `send` reaches another replica's."""
        self._arrivals = arrivals
        self._service = service
        self._cluster = cluster
        self._durable = durable
        self._owned = OwnedSessions(
            replica, cluster.node, transport, opened=self._reopened, fenced=self._fenced,
            copies_lost=self._copies_lost, no_room=lambda message: self.copies.no_room(message), offered=self._offered,
            drain=lambda message: self._drain(message),
        )  # fmt: skip
        self.transfers = Transfers()
        self._rebuilder = Rebuilder(replica, service, cluster, arrivals, self.transfers)
        self._sessions: dict[SessionKey, Session] = {}
        self.ending = Ending(self._owned, durable, self._sessions, self.write, self.forget, self._spawn)
        self.getting = Locks()
        self.taking = Taking(self._owned, durable, self.ending, self.getting, self.held, self._spawn)
        self.copies = SessionCopies(
            cluster.node,
            service,
            self._owned,
            durable,
            self.transfers,
            self._sessions,
            self.held,
            self.write,
            self.ending.end,
            self._spawn,
        )
        self._giving = Giving(
            replica, cluster.node, service, self._owned, self.transfers, send, self.forget, self._spawn
        )
        self._tasks: set[asyncio.Task[Any]] = set()
        self._resume: Callable[[Session, LoggedTurn], None] | None = None
        self._drain: Callable[[Drain], None] = lambda message: None

    def start(self, resume: Callable[[Session, LoggedTurn], None], drain: Callable[[Drain], None]) -> None:
        """From the replica's event loop. `resume` is given the newest turn that the log of a session tells which was
        taken over: it goes on here, or if it is over, is told here to those who have not heard its end. `drain` is
        given the directory's word that the replica is about to go."""
        self._resume = resume
        self._drain = drain
        self._owned.start()
        self._durable.start()
        self._spawn(self.copies.publish_idle())

    def close(self) -> None:
        self._owned.close()
        for task in self._tasks:
            task.cancel()

    @property
    def named(self) -> int:
        """How many sessions of clients it holds: a turn with a key alone has one too, which none can name."""
        return sum(not session.keyed for session in self._sessions.values())

    def all(self) -> tuple[Session, ...]:
        return tuple(self._sessions.values())

    def held(self, key: SessionKey) -> Session | None:
        """A session that this replica may commit to, as far as it knows."""
        return self._sessions.get(key) if key in self._owned else None

    def keep(self, session: Session) -> Session:
        """One whose owner this replica has become. How it is kept is known now, and must be after it was lost, too."""
        session.alone = self._owned.alone(session.key)
        self._sessions[session.key] = session
        return session

    # -------------------------------------------------------------------------------------------- getting

    async def acquire(
        self,
        key: SessionKey,
        believed: Placed | None,
        *,
        must_exist: bool,
        anew: bool = False,
        accept_durable: bool = False,
        untouched: bool = False,
        alone: bool = False,
    ) -> tuple[Session, Hit]:
        """Makes this replica the owner, if it is not yet, and brings the state here.

        `believed` is what the caller read from the directory a moment ago; `anew`: if nothing of the session is left
        that counts, it begins again; `accept_durable`: an older state will do; `untouched`: what the device let go of
        stays away, since somebody only looks; `alone`: a new one is kept by one store and by nothing else. The Hit says
        where the state came from: `device` if it was here. Raises `OwnedElsewhere`; RequestError: 404, 503.
        """
        async with self.getting.of(key):
            held = self.held(key)
            if held is not None:
                if not untouched:
                    await self._onto_device(held)
                return held, "device"
            if must_exist and believed is None and await self.located(key) is None:
                raise unknown_session(key.session)
            deleted = self.ending.deleted_under(key)
            if must_exist and believed is not None and deleted is not None and believed.epoch <= deleted:
                raise unknown_session(key.session)  # it was there when its asker looked
            with self.taking.for_somebody(key):
                try:
                    opened = await self.taking.taken(key, anew=False, alone=alone)
                except NoCopyLeft:
                    return await self._restored(key, anew, accept_durable)
                if lacks_image(opened):
                    return await self._restored(key, anew, accept_durable, opened)
                if await self.taking.is_durable_alone(opened):
                    return await self._restored(key, anew, accept_durable)
                if must_exist and not exists(opened):
                    await self.taking.take_back(opened)
                    raise unknown_session(key.session)
                await self.taking.end_durable(opened)
                return await self._load(opened)

    async def _restored(
        self, key: SessionKey, anew: bool, accept_durable: bool, begun: Opened | None = None
    ) -> tuple[Session, Hit]:
        """A session of which no copy is left that counts: from the durable tier, or by the history that its client
        has. `begun`: what is left where somebody was cut off who did the same."""
        under = begun_again(begun) if begun is not None else None
        async with self._durable.found(key, under) as found:
            untouched = begun is None or under is not None
            usable = found is not None and ((found.continues and untouched) or accept_durable or anew)
            if not usable and not anew:
                self._owned.forget(key)
                why = "no copy of its newest state is left; send the full history"
                older = ", or x-session-accept: durable for an older state" if found is not None else ""
                raise session_unavailable(key.session, why + older)
            opened = await self.taking.taken(key, anew=True, first=None if found is None else OLDER)
            if found is None:
                return await self._load(opened)
            try:
                session, hit = await self._rebuilder.of_document(opened, found.document, "disk")
            except RequestError:
                self._owned.forget(key)
                raise
            while not self.taking.is_loaded(opened):
                opened = await self.taking.taken(key, anew=True)
            session.epoch, session.created = opened.epoch, True
            session.moving = True
            self.keep(session)
            try:
                await self._durable.taken(key, session.epoch)
                await self.copies.settle_again(session)
            except BaseException:  # nobody may go on with what no copy has, nor take its log for all of it
                await self.forget(session)
                raise
            session.moving = False
        return session, hit

    async def adopt(self, offer: Offer) -> None:
        """Takes over what another replica offers."""
        async with self.getting.of(offer.key):
            if self.held(offer.key) is None:
                await self._load(await self._owned.take(offer.key, given=offer.epoch, offered_by=offer.source))

    async def located(self, key: SessionKey) -> Placed | None:
        """Where the session is; None: there is none. RequestError (503) while nobody can say."""
        try:
            async with asyncio.timeout(LOCATE_SECONDS):
                while isinstance(placed := await self._cluster.locate(key), Wait):
                    await asyncio.sleep(min(placed.seconds, 0.25))
        except (RayError, TimeoutError):
            raise session_unavailable(key.session, "the directory does not answer") from None
        return placed

    # -------------------------------------------------------------------------------------------- rebuilding

    async def _load(self, opened: Opened) -> tuple[Session, Hit]:
        """The session as its copies say it, and the right to append to it. RequestError (503)."""
        try:
            rebuilt = await self._rebuilder.rebuilt(opened)
            while not self.taking.is_loaded(opened):
                opened = await self.taking.taken(opened.key, anew=False)
                rebuilt = await self._rebuilder.rebuilt(opened)
        except RequestError:
            self._owned.forget(opened.key)  # the next request takes it over again, and tries the copies again
            raise
        session = rebuilt.session
        session.came = rebuilt.hit
        self.keep(session)
        if rebuilt.newest is not None and self._resume is not None:
            self._resume(session, rebuilt.newest)
        if rebuilt.arrival is not None:
            self._spawn(self._settle_in(session, rebuilt.arrival))
        return session, rebuilt.hit

    async def _settle_in(self, session: Session, arrival: Arrival) -> None:
        """A session that came with its state, which no store has yet, and which may not even have been checked."""
        if not await self._arrivals.verified(arrival):
            await self._begin_again(session)
        await self.copies.copy(session)

    async def _begin_again(self, session: Session) -> None:
        """The engine has dropped the session's state: its turn goes on from the ledger. One that is suspended does so
        where it goes."""
        running = session.running
        if running is None or session.moving:
            return
        session.moving = True
        try:
            await running.suspend()
        finally:
            session.moving = False
            running.go_on(None)

    async def bring_back(self, session: Session) -> None:
        """The newest Host replica onto the device, which had no room to keep the session. RequestError (503)."""
        await self._rebuilder.onto_device(session.key, self._owned.members(session.key))

    async def _onto_device(self, session: Session) -> None:
        """Brings a session back that the device had no room to keep. Without a copy its ledger is prefilled."""
        if self._service.was_evicted(session.engine_id) and session.free:
            session.moving = True  # a turn must not have its state replaced under it
            try:
                await self.bring_back(session)
            except (RequestError, EngineError) as error:
                log.warning("session %s is prefilled: %s", session.key, error)
            finally:
                session.moving = False

    # -------------------------------------------------------------------------------------------- the log

    def append(self, key: SessionKey, records: Sequence[Numbered]) -> int:
        """See `OwnedSessions.append`. Raises `NotOwned`."""
        return self._owned.append(key, records)

    async def committed(self, key: SessionKey, sequence: int) -> None:
        """Waits until all copies hold the log up to there. Raises `NotOwned`."""
        await self._owned.committed(key, sequence)

    async def write(self, key: SessionKey, records: Sequence[Numbered]) -> None:
        """RequestError (503) if the session is another replica's now, or its copies do not answer."""
        try:
            async with asyncio.timeout(KEPT_SECONDS):
                await self.committed(key, self.append(key, records))
        except NotOwned as error:
            raise session_unavailable(key.session, str(error)) from None
        except TimeoutError:
            raise session_unavailable(key.session, "its copies do not answer") from None

    # -------------------------------------------------------------------------------------------- giving, losing

    async def move(self, session: Session, destination: str) -> wire.Movement | None:
        """Gives a session, and the turn that runs in it, to another replica: see `Giving`."""
        return await self._giving.move(session, destination)

    def _offered(self, offer: Offer) -> None:
        self._spawn(self._adopted(offer))

    async def _adopted(self, offer: Offer) -> None:
        try:
            await self.adopt(offer)
        except (NotOwned, RequestError, EngineError) as error:
            log.info("session %s, which %s offered, was not taken: %s", offer.key, offer.source, error)

    async def forget(self, session: Session) -> None:
        """Drops what this replica has of a session, on the device too."""
        if self._sessions.get(session.key) is not session:
            return  # it has been forgotten, and may be here again, as another one
        del self._sessions[session.key]
        self._owned.forget(session.key)
        self._durable.forget(session.key)
        await self._drop(session)

    def _reopened(self, opened: Opened) -> None:
        """The same owner under a new epoch, as when another store has joined. What is here counts if it is what the
        copies say."""
        session = self._sessions.get(opened.key)
        if session is not None and opened.continues:
            session.epoch = opened.epoch
        elif session is not None:
            self._lose(session)

    def _fenced(self, key: SessionKey) -> None:
        """Another replica is the owner now."""
        session = self._sessions.get(key)
        if session is not None:
            log.info("session %s has another owner now", key)
            self._owned.forget(key)
            self._lose(session)

    def _copies_lost(self, key: SessionKey, holds: Epoch | None) -> None:
        """No store has anything of a session any more. At rest, all of it is here still; a turn that runs cannot be
        published, and ends."""
        session = self._sessions.get(key)
        if session is None:
            return
        log.warning("no copy of session %s is left in any store", key)
        self._owned.forget(key)
        if holds is None or not session.free or session.keyed:
            self._lose(session)
            return
        del self._sessions[key]
        self._spawn(self._founded_again(session, holds))

    async def _founded_again(self, session: Session, holds: Epoch) -> None:
        """Gives the session new copies of what is here, if that is what was published last; else it is given up."""
        key = session.key
        async with self.getting.of(key):
            if key in self._sessions:
                return  # a full history has begun it anew
            try:
                opened = await self.taking.taken(key, anew=False, holds=holds, alone=session.alone, first=OLDER)
                while not self.taking.is_loaded(opened):
                    opened = await self.taking.taken(key, anew=False, holds=holds, alone=session.alone)
                session.epoch, session.since = opened.epoch, 0
                self._sessions[key] = session
                await self.copies.settle_again(session)
            except (NotOwned, RequestError, EngineError) as error:
                log.warning("session %s is given up: %s", key, error)
                self._owned.forget(key)
                self._sessions.pop(key, None)
                self._durable.forget(key)
                await self._drop(session)

    def _lose(self, session: Session) -> None:
        """What is here of a session is not what counts any more."""
        del self._sessions[session.key]
        self._durable.forget(session.key)
        if session.running is not None and not session.moving:  # who moves it knows where its turn goes
            session.running.moved()
        self._spawn(self._drop(session))

    async def _drop(self, session: Session) -> None:
        await self._service.call(Drop(secrets.token_hex(8), session.engine_id))

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a part of the session keeper failed", exc_info=task.exception())
