"""The owner's part of `spec/ownership.md`: which sessions this replica holds, how it gets and gives them, their copies.

Thin for now: a session is taken over without waiting for a lease, and Host replicas follow a turn instead of a log of
its rounds. The fence is whole: what an older owner writes after a takeover is refused by epoch.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from typing import Protocol

import numpy as np

from deployment.actors import Cluster
from deployment.engine.errors import BAD_STATE, FINGERPRINT_MISMATCH, UNKNOWN_SESSION, EngineError
from deployment.engine.messages import Drop, Export, Exported, Hit, Import, Imported
from deployment.engine.service import EngineService
from deployment.errors import (
    Refused,
    RequestError,
    session_busy,
    session_exists,
    session_unavailable,
    unknown_session,
)
from deployment.locks import Locks
from deployment.ownership import Conflict, Epoch, Placement, SessionKey
from deployment.session import Session
from deployment.wire import HandedOver, NotHere
from state.session_record import SessionRecord

MOVE_SECONDS = 30.0
"""How long a session that was given away waits for its new owner's word before it takes turns again."""

log = logging.getLogger("ray.serve")


class Peers(Protocol):
    """The other replicas of this deployment."""

    async def hand_over(self, placement: Placement) -> HandedOver | NotHere | Refused: ...

    async def release(self, placement: Placement) -> None: ...


class SessionKeeper:
    """All sessions that one replica owns."""

    def __init__(self, replica: str, service: EngineService, cluster: Cluster, peers: Peers) -> None:
        self._replica = replica
        self._service = service
        self._cluster = cluster
        self._peers = peers
        self._sessions: dict[SessionKey, Session] = {}
        self._getting = Locks()
        self._copying = Locks()
        self._calls = itertools.count()

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def running(self) -> int:
        return sum(session.running is not None for session in self._sessions.values())

    def owned(self) -> tuple[Session, ...]:
        return tuple(self._sessions.values())

    def held(self, key: SessionKey) -> Session | None:
        return self._sessions.get(key)

    async def acquire(self, key: SessionKey, believed: Placement | None, *, must_exist: bool) -> tuple[Session, Hit]:
        """Makes this replica the owner, if it is not yet, and brings the state here.

        `believed` is what the caller read from the directory a moment ago. The Hit says where the state came from:
        `device` if it was here. Raises RequestError: 404, 409 while the owner is busy, 503.
        """
        async with self._getting.of(key):
            held = self._sessions.get(key)
            if held is not None:
                if believed is None or believed.epoch != held.epoch:
                    believed = await self._cluster.locate(key)
                if believed is not None and believed.epoch == held.epoch:
                    await self._onto_device(held)
                    return held, "device"
                # Somebody else became the owner, or deleted it, while we could not be reached.
                await self.forget(held)
            for _ in range(5):
                if believed is None:
                    if must_exist:
                        raise unknown_session(key.session)
                    granted = await self._cluster.claim(key, self._replica, None)
                    if not isinstance(granted, Conflict):
                        session = self._sessions[key] = Session(key, granted.epoch)
                        return session, "none"
                else:
                    got = await self._take_over(believed)
                    if not isinstance(got, Conflict):
                        return got
                    granted = got
                believed = granted.current
            raise session_unavailable(key.session, "its owner changes too quickly")

    async def create(self, key: SessionKey, like: Session) -> Session:
        """A new session here with the same past. Raises RequestError (409) if the name is taken."""
        session = self._sessions[key] = Session.of_record(key, await self._claim_new(key), like.record())
        session.foreign, session.created = like.foreign, like.created
        return session

    async def create_empty(self, key: SessionKey) -> Session:
        """A new session here without a past. Raises RequestError (409) if the name is taken."""
        session = self._sessions[key] = Session(key, await self._claim_new(key), created=True)
        return session

    async def create_imported(self, key: SessionKey, document: bytes) -> Session:
        """A new session here from a document of another server or time. Nothing of it stays unless all of it fits.

        Raises RequestError: 400 for a document that is not whole, 409 if the name is taken or anything that the state
        depends on is not the same here.
        """
        session = self._sessions[key] = Session(key, await self._claim_new(key))
        session.moving_until = math.inf  # no turn begins in what is not there yet
        try:
            record = await self._import_exactly(session, document)
            session = self._sessions[key] = Session.of_record(key, session.epoch, record)
            await self.copy(session)
        except BaseException:  # also if who asked has gone away: nobody else could ever use or free the name
            await self.abandon(session)
            raise
        return session

    async def _import_exactly(self, session: Session, document: bytes) -> SessionRecord:
        try:
            imported = await self._service.call(
                Import(self._call(), session.engine_id, document, "disk", exact=True, tenant=session.key.tenant)
            )
        except EngineError as error:
            status = {BAD_STATE: 400, FINGERPRINT_MISMATCH: 409}.get(error.code)
            if status is None:
                raise
            raise RequestError(status, error.code, f"document: {error.message}", "document") from None
        assert isinstance(imported, Imported) and imported.record is not None
        if not imported.record.ledger:
            raise RequestError(400, BAD_STATE, "document: manifest.ledger: is empty, so there is nothing to continue")
        return imported.record

    async def _claim_new(self, key: SessionKey) -> Epoch:
        granted = await self._cluster.claim(key, self._replica, None)
        if isinstance(granted, Conflict):
            raise session_exists(key.session)
        return granted.epoch

    async def _take_over(self, placement: Placement) -> tuple[Session, Hit] | Conflict:
        key = placement.key
        given: HandedOver | NotHere | Refused = NotHere(self._replica)
        if placement.owner not in (None, self._replica):
            given = await self._peers.hand_over(placement)
            if isinstance(given, Refused):
                raise RequestError(given.status, given.code, given.message, given.param)
        grant = await self._cluster.claim(key, self._replica, placement.epoch)
        if isinstance(grant, Conflict):
            return grant
        sealed = await self._cluster.seal(key, grant.epoch)
        hit: Hit = "host"
        state = sealed
        if isinstance(given, HandedOver) and (sealed is None or given.frontiers or _age(given) > _age(sealed)):
            hit, state = "peer", given
        session = Session(key, grant.epoch, lost=state is None and bool(placement.copies))
        if state is not None:
            session, loaded = await self._import(session, state, hit)
            hit = hit if loaded else "none"
            self._sessions[key] = session
            await self.copy(session)
        else:
            hit = "none"
            self._sessions[key] = session
        if isinstance(given, HandedOver):
            await self._peers.release(placement)
        return session, hit

    async def _import(self, session: Session, state: HandedOver, hit: Hit) -> tuple[Session, bool]:
        """The session as its document has it, and whether any state of it is on the device now."""
        try:
            document = state.document.tobytes()
            imported = await self._service.call(
                Import(self._call(), session.engine_id, document, hit, tenant=session.key.tenant)
            )
        except EngineError as error:
            # Not kept: the next request finds us the owner without state, and tries the copies again.
            raise session_unavailable(session.key.session, f"its state cannot be loaded ({error})") from None
        assert isinstance(imported, Imported) and imported.record is not None
        if imported.record.id != session.key.session:
            await self._service.call(Drop(self._call(), session.engine_id))
            raise session_unavailable(session.key.session, f"its copy is that of session {imported.record.id!r}")
        brought = Session.of_record(session.key, session.epoch, imported.record)
        if imported.foreign is not None and imported.foreign.mismatch.matter in ("text", "weights"):
            brought.foreign = imported.foreign
        return brought, bool(imported.frontiers)

    async def bring_back(self, session: Session) -> None:
        """The newest Host replica onto the device, which had no room to keep the session. RequestError (503)."""
        state = await self._cluster.seal(session.key, session.epoch)
        if state is None:
            raise session_unavailable(session.key.session, "no copy of its state was found; send the full history")
        await self._import(session, state, "host")

    async def _onto_device(self, session: Session) -> None:
        """Brings a session back that the device had no room to keep. Without a copy its ledger is prefilled."""
        if not self._service.was_evicted(session.engine_id) or not session.free:
            return
        state = await self._cluster.seal(session.key, session.epoch)
        # A turn that began meanwhile must not have its state replaced under it.
        if state is not None and session.free:
            try:
                await self._import(session, state, "host")
            except RequestError as error:
                log.warning("session %s is prefilled: %s", session.key, error)

    async def give(self, key: SessionKey, placement: Placement) -> HandedOver | NotHere | Refused:
        """Encodes a session for its next owner, and takes no turn for it until that one has spoken or given up."""
        session = self._sessions.get(key)
        if session is None or session.epoch != placement.epoch or session.lost:
            return NotHere(self._replica)
        if not await self.idle(session):
            return session_busy(key.session, "a turn is running; it can be moved between turns").refused
        session.moving_until = time.monotonic() + MOVE_SECONDS
        try:
            return await self._export(session)
        except EngineError as error:
            log.warning("session %s could not be exported: %s", key, error)
            session.moving_until = 0.0
            return NotHere(self._replica)

    async def idle(self, session: Session) -> bool:
        """Whether a turn could begin. A running turn that nobody reads has been cancelled: its end is waited for."""
        turn = session.running
        if turn is not None and turn.abandoned:
            await turn.ended()
        return session.free

    async def release(self, key: SessionKey, placement: Placement) -> None:
        """The new owner has the state."""
        session = self._sessions.get(key)
        if session is not None and session.epoch == placement.epoch:
            await self.forget(session)

    async def forget(self, session: Session) -> None:
        """Drops what this replica has of a session, on the device too."""
        if self._sessions.get(session.key) is session:
            del self._sessions[session.key]
        await self._service.call(Drop(self._call(), session.engine_id))

    def check_found(self, session: Session) -> None:
        """Raises RequestError (503) for a lost session, and forgets it: the next request looks for its copies again."""
        if session.lost:
            self._sessions.pop(session.key, None)
            raise session_unavailable(session.key.session, "no copy of its state was found; send the full history")

    async def abandon(self, session: Session) -> None:
        """A new session's first turn was refused: as if it had never been asked for."""
        await self.forget(session)
        await self._cluster.abandon(session.key, session.epoch)

    async def copy(self, session: Session) -> None:
        """Writes a session's Host replica. Raises RequestError (409) if it has a newer owner."""
        async with self._copying.of(session.key):
            session.order += 1
            try:
                receipt = await self._cluster.put(session.key, self._replica, await self._export(session))
                if receipt.too_large:
                    log.warning("session %s is copied without its state: %s", session.key, receipt.reason)
                    bare = await self._export(session, checkpoints=False)
                    receipt = await self._cluster.put(session.key, self._replica, bare)
            except EngineError as error:
                if error.code != UNKNOWN_SESSION:
                    raise
                log.warning("no Host replica of session %s: nothing was ever committed to it", session.key)
                return
        if receipt.fenced:
            await self.forget(session)
            raise RequestError(409, "session_moved", f"session {session.key.session!r} has moved: {receipt.reason}")
        if not receipt.accepted:
            log.warning("no Host replica of session %s: %s", session.key, receipt.reason)

    async def document(self, session: Session) -> np.ndarray:
        """The session as bytes for its client. Raises RequestError: 409 while it is busy or empty."""
        if not await self.idle(session):
            raise session_busy(session.key.session, "a turn is running; it can be exported between turns")
        self.check_found(session)
        if not session.ledger and not session.created:
            raise unknown_session(session.key.session)
        if not session.ledger:
            message = f"session {session.key.session!r} has no turn yet, so that there is nothing to export"
            raise RequestError(409, "session_empty", message, "session")
        return (await self._export(session)).document

    async def _export(self, session: Session, checkpoints: bool = True) -> HandedOver:
        command = Export(self._call(), session.engine_id, session.record(), checkpoints, session.foreign)
        exported = await self._service.call(command)
        assert isinstance(exported, Exported)
        session.checkpoints = tuple(zip(exported.kinds, exported.frontiers, strict=True))
        document = np.frombuffer(exported.document, np.uint8)
        return HandedOver(session.epoch, session.order, exported.frontiers, document)

    def _call(self) -> str:
        return f"{self._replica}-{next(self._calls)}"


def _age(state: HandedOver) -> tuple[Epoch, int]:
    return state.epoch, state.order
