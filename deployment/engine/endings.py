"""How turns end: what they had committed is told and kept, their lane is free, and their last event is sent."""

from __future__ import annotations

from collections.abc import Callable

from deployment.engine.captures import Captures
from deployment.engine.commands import Submit
from deployment.engine.errors import EngineError
from deployment.engine.events import Event, Failed, Finished, Suspended, Tokens
from deployment.engine.lane import Lane
from deployment.engine.publication import finished, tell
from deployment.engine.scheduler import Scheduler
from deployment.engine.sessions import SessionTable
from state.memory import StateMemory


class Endings:
    """`lanes`: the engine's own. `over`: turns that ended before the one that they follow."""

    def __init__(
        self,
        memory: StateMemory,
        sessions: SessionTable,
        captures: Captures,
        scheduler: Scheduler,
        lanes: list[Lane],
        emit: Callable[[Event], None],
        clock: Callable[[], float],
    ) -> None:
        self._memory = memory
        self._sessions = sessions
        self._captures = captures
        self._scheduler = scheduler
        self._lanes = lanes
        self._emit = emit
        self._clock = clock
        self.over: set[str] = set()

    def finish(self, lane: Lane) -> None:
        """Captures the turn's end, frees the lane, and says how the turn ended. Nothing is held back any more."""
        self.tell(tell(lane, len(lane.published), None))
        self._captures.ended(lane)
        self.end(lane, finished(lane, lane.finish_reason or "cancelled", self._clock() - lane.admitted_at))

    def fail(self, lane: Lane, error: EngineError) -> None:
        """Ends a turn in the middle. What it had committed is told, captured and kept, as of a cancelled one."""
        if not lane.ended:
            self.tell(tell(lane, len(lane.published), None))
            self._captures.ended(lane)
            kept = finished(lane, "failed", self._clock() - lane.admitted_at) if lane.generated else None
            self.end(lane, Failed(lane.submit.turn, error.code, error.message, error.param, kept))

    def tell(self, tokens: Tokens | None) -> None:
        if tokens is not None:
            self._emit(tokens)

    def end(self, lane: Lane, last: Finished | Failed | Suspended) -> None:
        """Frees the lane and sends the turn's last event, whatever happens."""
        if lane.ended:
            return
        lane.ended = True
        try:
            if lane in self._lanes:
                self._lanes.remove(lane)
                self._scheduler.ended(lane.submit.turn)
            self.unpark(lane.submit)
            if not lane.suspended:
                self._memory.close(lane.memory)
        finally:
            self._emit(last)

    def unpark(self, submit: Submit) -> None:
        """Releases what was kept for a turn that is over. Where its leader's prompt is still to come, nothing will be
        kept for it then."""
        self._sessions.unpark(submit.turn)
        self.over.difference_update(submit.followers)
        if submit.after is not None and self._scheduler.knows(submit.after):
            self.over.add(submit.turn)
