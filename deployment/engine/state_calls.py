"""Commands that begin and end no turn: on sessions' state, and on that of a lane between two rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deployment.engine import errors
from deployment.engine.captures import Captures
from deployment.engine.commands import (
    Checkpoint,
    Drop,
    DropStaged,
    Export,
    ExportPages,
    Fork,
    Import,
    Publish,
    StageSegments,
    StateCall,
    Unpin,
    VerifyStaged,
)
from deployment.engine.errors import EngineError
from deployment.engine.events import Checkpointed, Dropped, Event, Staged, Unpinned
from deployment.engine.exchange import StateExchange
from deployment.engine.lane import Lane
from deployment.engine.sessions import SessionTable


class StateCalls:
    """`lanes`, `suspended`: the engine's own, which it changes."""

    def __init__(
        self,
        exchange: StateExchange,
        sessions: SessionTable,
        captures: Captures,
        lanes: Sequence[Lane],
        suspended: Mapping[str, Lane],
    ) -> None:
        self._exchange = exchange
        self._sessions = sessions
        self._captures = captures
        self._lanes = lanes
        self._suspended = suspended

    def answer(self, command: StateCall) -> Event:
        """EngineError, StateError or CapacityError for what cannot be done."""
        match command:
            case Checkpoint():
                return Checkpointed(command.call, command.session, self._checkpoint(command.session))
            case Unpin():
                self._sessions.unpin(command.session, command.frontier)
                return Unpinned(command.call, command.session, command.frontier)
            case ExportPages():
                return self._exchange.pages(command, self._running(command.turn))
            case StageSegments():
                return self._exchange.stage(command)
            case VerifyStaged():
                return self._verify(command)
            case DropStaged():
                return self._exchange.drop_staged(command)
            case Export():
                return self._exchange.export(command)
            case Publish():
                return self._exchange.publish(command)
            case Import():
                self._detach(command.session)
                return self._exchange.import_(command)
            case Fork():
                return self._exchange.fork(command)
            case Drop():
                self._detach(command.session)
                self._exchange.forget(command.session)
                return Dropped(command.call, command.session)

    def _detach(self, session: str) -> None:
        """Turns of this session that still run will not give it their state any more: it has another now."""
        for lane in (*self._lanes, *self._suspended.values()):
            if lane.session == session:
                lane.session = None

    def _verify(self, command: VerifyStaged) -> Staged:
        try:
            return self._exchange.verify_staged(command)
        except EngineError:
            self._detach(command.session)
            self._exchange.forget(command.session)
            raise

    def _running(self, turn: str) -> Lane:
        lane = next((lane for lane in self._lanes if lane.submit.turn == turn), None)
        if lane is None:
            raise not_here(turn)
        return lane

    def _checkpoint(self, session: str) -> int:
        """Of the session's youngest turn that decodes, else of what it has committed."""
        decoding = [lane for lane in self._lanes if lane.session == session and not lane.prefilling]
        return self._captures.explicit(decoding[-1], session) if decoding else self._exchange.checkpoint(session)


def not_here(turn: str) -> EngineError:
    return EngineError(errors.UNKNOWN_TURN, f"turn {turn!r} does not run here: it has ended, or never came", "turn")
