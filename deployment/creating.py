"""Sessions that are made, not begun by a turn: empty ones, forks and imports.

All copies have one before anybody gets it, and nothing stays of one that could not be made.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from deployment.cluster.not_owned import NoCopyLeft, OwnedElsewhere
from deployment.engine.commands import Import
from deployment.engine.errors import BAD_STATE, FINGERPRINT_MISMATCH, EngineError
from deployment.engine.events import Imported
from deployment.engine.service import EngineService
from deployment.errors import RequestError, session_exists
from deployment.keeper import SessionKeeper
from deployment.ownership.log import HeadMoved
from deployment.ownership.messages import Opened
from deployment.ownership.words import NOTHING, SessionKey
from deployment.rebuilding import exists
from deployment.session import Session, engine_id_of
from state.session_record import SessionRecord


class Creating:
    """Of one replica's sessions."""

    def __init__(self, service: EngineService, keeper: SessionKeeper) -> None:
        self._service = service
        self._keeper = keeper

    @asynccontextmanager
    async def of_past(self, key: SessionKey, past: SessionRecord, like: Session) -> AsyncGenerator[Session, None]:
        """A new session here with a past of that one's, and time to give it state: all copies hold it when this is
        over, and nobody gets it before. RequestError: 409 if the name is taken, 503."""
        async with self._keeper.getting.of(key):
            opened = await self._taken_new(key, like.alone)
            session = self._keeper.keep(Session.of_record(key, opened.epoch, past))
            session.foreign, session.created = like.foreign, like.created
            session.moving = True  # who leaves does not take along what is half made
            try:
                yield session
                await self._keeper.copies.settle(session)
            except BaseException:  # also if who asked has gone away: nobody else could ever use or free the name
                await self._keeper.ending.abandon(session)
                raise
            try:
                await self._make_durable(session)
            finally:
                session.moving = False

    async def empty(self, key: SessionKey, alone: bool = False) -> Session:
        """A new session here without a past. Raises RequestError (409) if the name is taken."""
        async with self._keeper.getting.of(key):
            opened = await self._taken_new(key, alone)
            session = self._keeper.keep(Session(key, opened.epoch, created=True))
            try:
                await self._keeper.write(key, [HeadMoved(NOTHING, None, 0)])
            except BaseException:
                await self._keeper.ending.abandon(session)
                raise
            return session

    async def imported(self, key: SessionKey, document: bytes) -> Session:
        """A new session here from a document of another server or time. Nothing of it stays unless all of it fits.

        Raises RequestError: 400 for a document that is not whole, 409 if the name is taken or anything that the state
        depends on is not the same here.
        """
        async with self._keeper.getting.of(key):
            opened = await self._taken_new(key)
            session = self._keeper.keep(Session(key, opened.epoch))
            session.moving = True  # no turn begins in what is not there yet
            try:
                record = await self._exactly(key, document)
                session = self._keeper.keep(Session.of_record(key, session.epoch, record))
                session.created = True
                await self._keeper.copies.settle(session)
            except BaseException:  # also if who asked has gone away: nobody else could ever use or free the name
                await self._keeper.ending.abandon(session)
                raise
            await self._make_durable(session)
            return session

    async def _make_durable(self, session: Session) -> None:
        """What it begins with would else be nowhere but in this cluster until its first turn ends."""
        if session.ledger:
            await self._keeper.copies.make_durable(session)

    async def _taken_new(self, key: SessionKey, alone: bool = False) -> Opened:
        """RequestError (409) if there is such a session, whoever has it and even if nobody does."""
        if self._keeper.held(key) is not None:
            raise session_exists(key.session)
        with self._keeper.taking.for_somebody(key):
            try:
                opened = await self._keeper.taking.taken(key, anew=False, alone=alone)
            except (OwnedElsewhere, NoCopyLeft):
                raise session_exists(key.session) from None
            if exists(opened):
                self._keeper.taking.give_back(key)
                raise session_exists(key.session)
            await self._keeper.taking.end_durable(opened)
            return await self._keeper.taking.as_nothing(opened)

    async def _exactly(self, key: SessionKey, document: bytes) -> SessionRecord:
        """Loads a document that comes from outside, all of it or nothing. RequestError: 400 for one that is not whole,
        409 if anything that the state depends on is not the same here."""
        command = Import(secrets.token_hex(8), engine_id_of(key), document, "disk", exact=True, tenant=key.tenant)
        try:
            imported = await self._service.call(command)
        except EngineError as error:
            status = {BAD_STATE: 400, FINGERPRINT_MISMATCH: 409}.get(error.code)
            if status is None:
                raise
            raise RequestError(status, error.code, f"document: {error.message}", "document") from None
        assert isinstance(imported, Imported) and imported.record is not None
        if not imported.record.ledger:
            raise RequestError(400, BAD_STATE, "document: manifest.ledger: is empty, so there is nothing to continue")
        return imported.record
