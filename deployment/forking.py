"""Explicit checkpoints, and forks from them, from a turn's end, or from where the session stands.

A checkpoint keeps two things: what the session was, in its record, which is in all copies when the client hears of it;
and the state there, which spares a fork the prefill, as long as there is room for it. So no fork is refused for want of
state.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Iterator
from dataclasses import replace

from deployment.creating import Creating
from deployment.engine.commands import Checkpoint, Fork, Unpin
from deployment.engine.errors import OVERLOADED, UNKNOWN_CHECKPOINT, UNKNOWN_SESSION, EngineError
from deployment.engine.events import Checkpointed
from deployment.engine.service import EngineService
from deployment.errors import RequestError, session_busy
from deployment.fork_points import ForkAt, found, of_turn, past_of
from deployment.keeper import SessionKeeper
from deployment.ownership.words import SessionKey
from deployment.session import Session
from state.media import without_pixels
from state.session_record import ForkPoint, SessionRecord

MOST_CHECKPOINTS = 16
"""Explicit ones of a session."""

log = logging.getLogger("ray.serve")


class Forking:
    """Of one replica's sessions. Raises RequestError."""

    def __init__(self, service: EngineService, keeper: SessionKeeper, creating: Creating) -> None:
        self._service = service
        self._keeper = keeper
        self._creating = creating

    # -------------------------------------------------------------------------------------------- checkpoints

    async def checkpoint(self, session: Session, name: str | None) -> ForkPoint:
        """Keeps where the session stands, under a name of its own if none is given."""
        await self._at_rest(session, "a turn is running; a checkpoint can be made between turns")
        named = {point.name for point in session.fork_points if point.name is not None}
        if not session.ledger:
            message = f"session {session.key.session!r} has no turn yet, so that there is nothing to keep"
            raise RequestError(409, "session_empty", message, "session")
        if name in named:
            message = f"name: session {session.key.session!r} has a checkpoint {name!r} already"
            raise RequestError(409, "checkpoint_exists", message, "name")
        if len(named) >= MOST_CHECKPOINTS:
            message = f"name: a session has at most {MOST_CHECKPOINTS} checkpoints; delete one of {sorted(named)}"
            raise RequestError(409, "too_many_checkpoints", message, "name")
        with self._still(session):
            here = of_turn(session.record(), session.turns[-1].id if session.turns else None)
            point = replace(here, name=name or secrets.token_hex(4), image=await self._pinned(session))
            session.fork_points.append(point)
            try:
                await self._keeper.copies.recorded(session)
            except BaseException:
                session.fork_points.remove(point)
                await self._unpinned(session, point)
                raise
        return point

    def made_before(self, session: Session, name: str) -> ForkPoint | None:
        """The checkpoint of that name, if it is of where the session stands."""
        here = len(session.ledger), session.frontier
        named = (point for point in session.fork_points if point.name == name and not point.ledger)
        return next((point for point in named if (point.tokens, point.frontier) == here), None)

    async def delete_checkpoint(self, session: Session, name: str) -> None:
        await self._at_rest(session, "a turn is running; a checkpoint can be deleted between turns")
        point = found(session.record(), ForkAt(checkpoint=name))
        with self._still(session):
            session.fork_points.remove(point)
            await self._unpinned(session, point)
            await self._keeper.copies.recorded(session)

    # -------------------------------------------------------------------------------------------- forks

    async def fork(self, session: Session, child_key: SessionKey, at: ForkAt | None) -> Session:
        """A new session with all that this one is, or was there. The past can be forked while a turn runs."""
        if at is None:
            await self._at_rest(session, "a turn is running; it can be forked between turns, or from an earlier turn")
        elif session.moving:
            raise session_busy(session.key.session, "it is being moved")
        async with self._creating.of_past(child_key, self.past(session, at), session) as child:
            if child.ledger:
                await self._fork_state(session, child)
        return child

    def past(self, session: Session, at: ForkAt | None) -> SessionRecord:
        """What a fork begins with."""
        record = session.record()
        return record if at is None else past_of(record, found(record, at))

    async def _fork_state(self, session: Session, child: Session) -> None:
        """What leads to the child's ledger, whatever the parent does meanwhile. What is not found, or finds no room, is
        prefilled: the child is whole by its ledger."""
        media = tuple(map(without_pixels, child.media))
        fork = Fork(secrets.token_hex(8), session.engine_id, child.engine_id, child.ledger, media)
        try:
            await self._service.call(fork)
        except EngineError as error:
            if error.code not in (UNKNOWN_SESSION, UNKNOWN_CHECKPOINT, OVERLOADED):
                raise
            if error.code == UNKNOWN_SESSION and session.free:
                with contextlib.suppress(RequestError, EngineError), self._still(session):
                    await self._keeper.bring_back(session)
                    await self._service.call(fork)

    # -------------------------------------------------------------------------------------------- inside

    async def _at_rest(self, session: Session, why_not: str) -> None:
        if not await session.idle():
            raise session_busy(session.key.session, why_not)
        if self._keeper.held(session.key) is not session:
            raise session_busy(session.key.session, "it was moved while its turn was about to end; ask again")

    @contextlib.contextmanager
    def _still(self, session: Session) -> Iterator[None]:
        """No turn begins meanwhile."""
        session.moving = True
        try:
            yield
        finally:
            session.moving = False

    async def _pinned(self, session: Session) -> int:
        """The frontier of the state that is kept; 0: there is none, or no room for it."""
        command = Checkpoint(secrets.token_hex(8), session.engine_id)
        try:
            try:
                answer = await self._service.call(command)
            except EngineError as error:
                if error.code != UNKNOWN_SESSION:
                    raise
                await self._keeper.bring_back(session)
                answer = await self._service.call(command)
        except (EngineError, RequestError) as error:
            if isinstance(error, EngineError) and error.code not in (UNKNOWN_SESSION, OVERLOADED):
                raise
            log.info("a checkpoint of session %s is kept by its ledger alone: %s", session.key, error)
            return 0
        assert isinstance(answer, Checkpointed)
        if answer.frontier <= session.frontier:
            return answer.frontier
        await self._service.call(Unpin(secrets.token_hex(8), session.engine_id, answer.frontier))
        return 0  # state of a past that the session has left

    async def _unpinned(self, session: Session, point: ForkPoint) -> None:
        if point.image and all(other.image != point.image for other in session.fork_points):
            await self._service.call(Unpin(secrets.token_hex(8), session.engine_id, point.image))
