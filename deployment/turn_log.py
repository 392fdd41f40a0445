"""Where a turn's rounds are written before anybody is told of them."""

from __future__ import annotations

import time
from typing import Protocol

from deployment.engine.events import Finished, Round
from deployment.keeper import SessionKeeper
from deployment.session import Session
from deployment.session_log import began_record, ended_record, round_record
from deployment.turns import Prompt
from deployment.wire import TurnRequest


class TurnLog(Protocol):
    """Raises `NotOwned` where another replica goes on with the session."""

    def round(self, one: Round) -> None:
        """Writes a round. Waits for nothing."""
        ...

    async def told(self) -> None:
        """Returns once every copy of the log has all rounds so far."""
        ...

    async def ended(self, finished: Finished) -> None:
        """Writes the turn's end, and returns once every copy has it."""
        ...


class NoLog:
    """Of a turn whose ingress holds what it takes to go on."""

    def round(self, one: Round) -> None:
        pass

    async def told(self) -> None:
        pass

    async def ended(self, finished: Finished) -> None:
        pass


class SessionTurnLog:
    """Of one choice of a turn in a session."""

    def __init__(self, keeper: SessionKeeper, session: Session, turn: str, since: int, choice: int = 0) -> None:
        """`since`: the sequence of the record of the turn's beginning."""
        self._keeper = keeper
        self._session = session
        self._turn = turn
        self._choice = choice
        self._last = session.since = since

    @classmethod
    def begin(
        cls, keeper: SessionKeeper, session: Session, request: TurnRequest, prompt: Prompt, seed: int
    ) -> SessionTurnLog:
        """Writes the turn's beginning. Raises `NotOwned`."""
        since = keeper.append(session.key, [began_record(request, prompt, seed, time.time(), session.media)])
        return cls(keeper, session, request.turn, since)

    def of(self, choice: int) -> SessionTurnLog:
        """The log of another choice of the turn, which has said nothing yet."""
        return SessionTurnLog(self._keeper, self._session, self._turn, self._session.since, choice)

    def round(self, one: Round) -> None:
        record = round_record(one, self._turn, self._choice)
        self._last = self._keeper.append(self._session.key, [record])

    async def told(self) -> None:
        await self._keeper.committed(self._session.key, self._last)

    async def ended(self, finished: Finished) -> None:
        record = ended_record(finished, self._turn, self._choice, time.time())
        self._last = self._keeper.append(self._session.key, [record])
        await self.told()
