"""What stores and the durable tier have of the sessions that a replica owns; and which go first where there is no room.

An image says all that a session is, so that the log before it can be forgotten. It is made when a turn ends, and on a
turn's way where its state is captured.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from deployment import wire
from deployment.checkpoint_places import KindAt, placed
from deployment.cluster.not_owned import NotOwned
from deployment.cluster.owned_sessions import OwnedSessions
from deployment.durable_copies import IDLE_CHECK_SECONDS, DurableCopies
from deployment.engine.commands import Export
from deployment.engine.errors import UNKNOWN_CHECKPOINT, UNKNOWN_SESSION, EngineError
from deployment.engine.events import Exported
from deployment.engine.service import EngineService
from deployment.errors import RequestError, session_busy, session_unavailable
from deployment.locks import Locks
from deployment.metrics.transfers import Transfers
from deployment.ownership.log import HeadMoved, Numbered
from deployment.ownership.messages import NoRoom
from deployment.ownership.words import NOTHING, SessionKey
from deployment.session import Session
from deployment.whole_documents import SLICE_BYTES, Slices, WholeDocument
from state.errors import StateError
from state.fair_share import first_to_go

KEPT_SECONDS = 30.0
"""How long a session that is made of an image waits for all copies to hold it."""

log = logging.getLogger("ray.serve")


class SessionCopies:
    def __init__(
        self,
        node: str,
        service: EngineService,
        owned: OwnedSessions,
        durable: DurableCopies,
        transfers: Transfers,
        sessions: Mapping[SessionKey, Session],
        held: Callable[[SessionKey], Session | None],
        write: Callable[[SessionKey, Sequence[Numbered]], Coroutine[Any, Any, None]],
        end: Callable[[Session], Coroutine[Any, Any, None]],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        """`sessions`: all of the replica's, as they come and go; `held`: one that it may commit to, as far as it knows;
        `write` adds to one's log; `end` deletes one; `spawn` runs what nobody waits for."""
        self._node = node
        self._service = service
        self._owned = owned
        self._durable = durable
        self._transfers = transfers
        self._sessions = sessions
        self._held = held
        self._write = write
        self._end = end
        self._spawn = spawn
        self._copying = Locks()
        self._exporting = asyncio.Lock()

    async def copy(self, session: Session) -> None:
        """Gives an image of the session to all its copies, in the background."""
        key = session.key
        if session.keyed:
            return  # its log says all of it
        async with self._copying.of(key):
            if self._held(key) is not session:
                return
            try:
                began = time.perf_counter()
                await self._publish(session)
                self._transfers.copied(len(session.newest.document), time.perf_counter() - began)
            except EngineError as error:
                if error.code != UNKNOWN_SESSION:
                    raise
                log.warning("no image of session %s: nothing was ever committed to it", key)
            except (NotOwned, StateError) as error:
                log.info("no image of session %s: %s", key, error)

    def checkpoints(self, session: Session, device: Collection[KindAt]) -> tuple[wire.PlacedCheckpoint, ...]:
        """Where its state lies. `device`: what the engine has of it."""
        members, durable = self._owned.members(session.key), self._durable.checkpoints(session.key)
        return placed(device, session.checkpoints, members, self._node, durable)

    def turn_began(self, session: Session) -> None:
        if not session.alone:
            self._durable.turn_began(session.key)

    async def turn_ended(self, session: Session) -> None:
        """What the session is now goes to its copies, and becomes durable; that too where there is no copy of it."""
        try:
            await self.copy(session)
        finally:
            await self.make_durable(session)

    async def make_durable(self, session: Session) -> None:
        if not session.alone:
            await self._durable.turn_ended(session)

    async def settle(self, session: Session) -> None:
        """A new session that did not begin with a turn: all copies hold it when this returns. RequestError (503).

        Until an image says them, the ids that it begins with are nowhere: whoever takes it over finds none there.
        """
        await self._settle(session, None)

    async def settle_again(self, session: Session) -> None:
        """The same of one that was there before, and is not what its copies' log and images say."""
        await self._settle(session, session.turns[-1].id if session.turns else None)

    async def recorded(self, session: Session) -> None:
        """Something was added to the session's record between two turns: all copies have it when this returns."""
        await self.settle_again(session)
        await self.make_durable(session)

    async def _settle(self, session: Session, turn: str | None) -> None:
        still = session.moving
        session.moving = True  # a turn's beginning must not be trimmed away behind an image that does not say it
        try:
            await self._write(session.key, [HeadMoved(NOTHING, turn, len(session.ledger))])
            await self.copy(session)
            async with asyncio.timeout(KEPT_SECONDS):
                await self._owned.kept(session.key)
            if self._held(session.key) is not session:
                raise NotOwned(f"session {session.key} was lost before all copies had it")
        except (NotOwned, TimeoutError):
            raise session_unavailable(session.key.session, "its copies do not answer") from None
        finally:
            session.moving = still

    async def publish_idle(self) -> None:
        while True:
            await asyncio.sleep(IDLE_CHECK_SECONDS)
            await self._durable.publish_idle(self._held)

    async def document(self, session: Session) -> np.ndarray:
        """The session as bytes for its client, as it is when this is called: a turn may begin meanwhile. Raises
        RequestError: 409 while it is busy or empty."""

        def between_turns() -> None:
            if not session.free:
                raise session_busy(session.key.session, "a turn is running; it can be exported between turns")

        await session.idle()
        between_turns()
        if not session.ledger:
            message = f"session {session.key.session!r} has no turn yet, so that there is nothing to export"
            raise RequestError(409, "session_empty", message, "session")
        return (await self._export(session, between_turns))[0].document

    async def _publish(self, session: Session, checkpoints: bool = True) -> None:
        """Makes an image of the session, and gives it to all copies. `checkpoints`: with state."""
        key = session.key

        def at_the_logs_end() -> None:
            session.order = self._owned.end(key).sequence

        document, said, sequence = await self._export(session, at_the_logs_end, checkpoints)
        session.newest, session.checkpoints = document, tuple(zip(said.kinds, said.frontiers, strict=True))
        self._owned.publish(key, sequence, said.frontiers, document.document, session.since or sequence + 1)

    async def _export(
        self, session: Session, begin: Callable[[], None], checkpoints: bool = True
    ) -> tuple[WholeDocument, Exported, int]:
        """The session as of one moment, at which `begin` is called: its document, what the engine says of that, and the
        order that it says itself. Where one of its checkpoints goes meanwhile, it begins anew, as of a later moment, if
        `begin` lets it."""
        slices, command, exported = Slices(session.newest), None, None
        while exported is None or not exported.whole:
            # Sessions take turns: none waits for all of another one, and no lane for more than one slice.
            async with self._exporting:
                if command is None:
                    begin()
                    command = Export(
                        "", session.engine_id, session.record(), checkpoints, session.foreign, slice_bytes=SLICE_BYTES
                    )
                try:
                    exported = await self._brought(slices, command)
                except EngineError as error:
                    if error.code != UNKNOWN_CHECKPOINT:
                        raise
                    slices.begin_anew()
                    command = None
        assert command is not None and command.record is not None
        return await asyncio.to_thread(slices.put_together, exported), exported, command.record.order

    async def _brought(self, slices: Slices, command: Export) -> Exported:
        """The next slice of a document, or all pieces of an image: the engine goes on with one image at a time."""
        while True:
            exported = await self._service.call(slices.asking(replace(command, call=secrets.token_hex(8))))
            assert isinstance(exported, Exported)
            slices.take(exported)
            if exported.piece is None or exported.piece.sha256 is not None:
                return exported

    def no_room(self, message: NoRoom) -> None:
        log.warning("store %s has %d bytes free, %d are wanted", message.member, message.free, message.wanted)
        self._spawn(self.make_room(message.key))

    async def make_room(self, asking: SessionKey) -> None:
        """What has rested longest goes, or the image that is too large: a tenant's that holds more than its share here,
        if anything of those rests."""
        used: Counter[str] = Counter()
        for session in self._sessions.values():
            used[session.key.tenant] += self.bytes_of(session)
        first = first_to_go(used)

        def rank(session: Session) -> tuple[bool, bool, bool, float]:
            return session.key.tenant not in first, session.keyed, session.key != asking, session.rests_since

        await self._let_go(min(self._resting(), key=rank, default=None))

    def make_room_of(self, tenant: str) -> None:
        """What has rested longest of a tenant's goes, soon."""
        own = [session for session in self._resting() if session.key.tenant == tenant]
        first = min(own, key=lambda session: (session.keyed, session.rests_since), default=None)
        self._spawn(self._let_go(first))

    def bytes_of(self, session: Session) -> int:
        """What each of its copies takes, of a turn's own session its log."""
        return self._owned.logged(session.key) if session.keyed else len(session.newest.document)

    def recent_bytes(self, since: float) -> int:
        """What one copy takes of each session that has a turn, or had one since then."""
        recent = (one for one in self._sessions.values() if one.running is not None or one.rests_since >= since)
        return sum(map(self.bytes_of, recent))

    def _resting(self) -> list[Session]:
        """Sessions in which no turn runs and whose copies have something to let go of: images, which are made again; or
        else the log of a turn that is over, which somebody may still ask for."""
        sessions = [session for session in self._sessions.values() if session.free]
        return [session for session in sessions if (session.turns if session.keyed else session.checkpoints)]

    async def _let_go(self, session: Session | None) -> None:
        if session is not None and session.keyed:
            log.warning("a turn with an idempotency key is forgotten before its time: %d bytes", self.bytes_of(session))
            await self._end(session)
        else:
            await self._lighten(session)

    async def _lighten(self, session: Session | None) -> None:
        if session is None:
            return
        async with self._copying.of(session.key):
            if session.key not in self._owned or not session.checkpoints:
                return  # it has gone meanwhile, or its state has
            try:
                await self._publish(session, checkpoints=False)
            except (NotOwned, StateError, EngineError) as error:
                log.info("session %s keeps its image: %s", session.key, error)
