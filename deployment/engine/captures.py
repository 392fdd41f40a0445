"""Which images does a turn leave behind? Places come from the turn, whether they are worth it from the policy.

    turn start   at the stable boundary, where a regenerated or a next answer begins
    turn end     at whatever was committed; always, where the turn goes on elsewhere
    tap          at the end of the tools-and-system block, for all sessions of the tenant; on the way through a long
                 prompt or a long answer, for the session

A turn end without an image loses nothing: the session's ledger goes on to its end, and whoever continues prefills what
came after its last image. The first image of a session is kept however short it is: a fork begins at an image.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from deployment.engine.events import Captured, CheckpointKind
from deployment.engine.lane import Lane
from deployment.engine.sessions import SessionTable, processed
from state.checkpoint import Checkpoint
from state.coverage import Form
from state.image_policy import ImagePolicy
from state.media import begun
from state.memory import StateMemory

logger = logging.getLogger(__name__)


class Captures:
    """Captures raise nothing, but for explicit ones: without room, or if the state is not whole, there is no image, and
    the turn goes on or ends all the same."""

    def __init__(
        self,
        memory: StateMemory,
        sessions: SessionTable,
        policy: ImagePolicy,
        catch_up: Callable[[Lane], None],
        emit: Callable[[Captured], None],
    ) -> None:
        """`catch_up` takes a lane's pending features into its draft context."""
        self._memory = memory
        self._sessions = sessions
        self._policy = policy
        self._catch_up = catch_up
        self._emit = emit

    def prefilled(self, lane: Lane) -> None:
        """A slice of the lane's prompt is in."""
        if lane.frontier == lane.system_boundary:
            self._tap_system(lane)
        if lane.frontier == lane.boundary:
            if self._policy.worth(self._since_kept(lane)):
                self._give(lane, "turn_start")
        elif self._policy.ladder(lane.frontier - lane.imaged):
            self._give(lane, "tap")

    def explicit(self, lane: Lane, session: str) -> int:
        """Keeps a checkpoint of the lane's committed state until it is unpinned; returns its frontier. Raises what a
        capture raises."""
        here = tuple(lane.ledger[: lane.frontier]), begun(lane.submit.media, lane.frontier)
        if here not in map(processed, self._sessions.pinned(session, lane.frontier)):
            checkpoint = self._capture(lane, "explicit")
            self._sessions.add(session, checkpoint, lane.submit.tenant, private=lane.private)
        return lane.frontier

    def decoded(self, lane: Lane) -> None:
        """A round of the lane was committed, and its turn goes on."""
        if self._policy.long_turn(lane.frontier - lane.imaged):
            self._give(lane, "tap")

    def ended(self, lane: Lane, always: bool = False) -> int:
        """The lane's turn is over, with whatever it had committed. `always`: whatever an image is worth. Returns where
        the deepest state stands that its session can count on; 0 without one."""
        if lane.session is None:
            return 0
        since = self._since_kept(lane)
        if lane.suspended and lane.frontier > lane.reused:
            self._give_parked(lane, lane.session)
        elif since == lane.frontier or self._policy.worth(since) or (always and since):
            self._give(lane, "turn_end")
        if lane.generated:
            tenant, media = lane.submit.tenant, lane.submit.media
            self._sessions.commit(lane.session, lane.ledger, tenant, media, private=lane.private)
        return lane.frontier - self._since_kept(lane)

    def _since_kept(self, lane: Lane) -> int:
        tokens = lane.ledger[: lane.frontier]
        return lane.frontier - self._sessions.nearest(lane.session, tokens, lane.submit.tenant, lane.submit.media)

    def _give(self, lane: Lane, kind: CheckpointKind) -> None:
        """Keeps a checkpoint at the lane's frontier, if it has a session and anything new."""
        session = lane.session
        if session is None or lane.frontier <= lane.reused:
            return
        checkpoint = self._captured(lane, kind)
        if checkpoint is not None:
            self._sessions.add(session, checkpoint, lane.submit.tenant, private=lane.private)
            self._emit(Captured(lane.submit.turn, session, kind, checkpoint.frontier))

    def _give_parked(self, lane: Lane, session: str) -> None:
        checkpoint = self._sessions.give_parked(lane.submit.turn, session, lane.submit.tenant)
        if checkpoint is not None:
            self._emit(Captured(lane.submit.turn, session, "turn_end", checkpoint.frontier))

    def _tap_system(self, lane: Lane) -> None:
        if lane.private:
            return
        tenant, tokens = lane.submit.tenant, lane.ledger[: lane.frontier]
        if self._policy.worth(lane.frontier - self._sessions.nearest(None, tokens, tenant, lane.submit.media)):
            checkpoint = self._captured(lane, "tap")
            if checkpoint is not None:
                self._sessions.add_tap(checkpoint, tenant)

    def _captured(self, lane: Lane, kind: CheckpointKind) -> Checkpoint | None:
        try:
            return self._capture(lane, kind)
        except Exception as error:  # also that of a device: what the turn committed is in its ledger
            lane.imaged = lane.frontier  # it is tried again after as many tokens as after an image, not in every round
            logger.warning("no %s checkpoint of a session: %s: %s", kind, type(error).__name__, error)
            return None

    def _capture(self, lane: Lane, kind: CheckpointKind) -> Checkpoint:
        form: Form = "decode" if len(lane.ledger) > lane.frontier and not lane.prefilling else "prompt"
        ledger = lane.ledger[: lane.frontier + (form == "decode")]
        self._catch_up(lane)
        capture = partial(self._memory.capture, lane.memory, ledger, form, kind, media=lane.submit.media)
        checkpoint = self._sessions.with_room(capture, keep=None)
        lane.imaged = lane.frontier
        return checkpoint
