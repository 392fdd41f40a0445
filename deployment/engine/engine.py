"""The engine: commands in, events out, one `step` at a time. No threads, no clock but for durations, no network.

    step    end what was cancelled; admit what fits; one prefill slice; one decode round
    round   execute -> preview each lane -> commit the batch once -> publish

A lane that ends is caught up before its state is captured. Model state first, user-visible output last: an event leaves
only after the state that it speaks of is committed.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from deployment.engine import errors
from deployment.engine.errors import EngineError
from deployment.engine.exchange import StateExchange
from deployment.engine.lane import Lane
from deployment.engine.loading import Models
from deployment.engine.messages import (
    Cancel,
    Captured,
    CheckpointKind,
    Command,
    Drop,
    Dropped,
    Event,
    Export,
    Facts,
    Failed,
    Finished,
    Fork,
    Hit,
    Import,
    Inspect,
    Started,
    Submit,
    Tokens,
)
from deployment.engine.options import EngineOptions
from deployment.engine.publication import preview
from deployment.engine.round import Executor
from deployment.engine.sessions import SessionTable
from deployment.engine.validation import check_submit
from state.errors import CapacityError, StateError
from state.geometry import pages_for
from state.memory import SequenceMemory, StateMemory

logger = logging.getLogger(__name__)


class Engine:
    """One model on one device. Not thread safe: whoever owns it calls `execute` and `step`.

    `emit` receives every event, in order, from inside these calls.
    """

    def __init__(self, models: Models, options: EngineOptions, emit: Callable[[Event], None]) -> None:
        self.models = models
        self._options = options
        self._emit = emit
        pages = options.pages or pages_for(models.context) * (options.lanes + max(1, options.lanes // 2))
        self.memory = StateMemory(models.geometry, pages, pages, options.lanes + options.images, models.device)
        self._executor = Executor(models, self.memory, options.lanes)
        self._sessions = SessionTable(self.memory)
        self._exchange = StateExchange(models, self.memory, self._sessions)
        self._queue: deque[tuple[Submit, float]] = deque()
        self._lanes: list[Lane] = []
        self._cancelled: set[str] = set()

    @property
    def idle(self) -> bool:
        return not self._lanes and not self._queue

    # ------------------------------------------------------------------------------------------------ commands

    def execute(self, command: Command) -> None:
        """Takes a command. Turns run in later steps; everything else is done when this returns."""
        ref = command.turn if isinstance(command, Submit | Cancel) else command.call
        try:
            match command:
                case Submit():
                    if command.turn in self._turns():
                        raise EngineError(errors.INVALID_REQUEST, f"turn {command.turn!r} is running already", "turn")
                    check_submit(command, self.models.context, self.models.target.public_rows)
                    self._queue.append((command, time.monotonic()))
                case Cancel():
                    if any(command.turn == turn for turn in self._turns()):
                        self._cancelled.add(command.turn)
                case Export():
                    self._emit(self._exchange.export(command))
                case Import():
                    self._emit(self._exchange.import_(command))
                case Fork():
                    self._emit(self._exchange.fork(command))
                case Drop():
                    self._sessions.drop(command.session)
                    self._emit(Dropped(command.call, command.session))
                case Inspect():
                    self._emit(Facts(command.call, self.facts()))
        except EngineError as error:
            self._emit(Failed(ref, error.code, error.message, error.param))
        except StateError as error:
            self._emit(Failed(ref, errors.BAD_STATE, str(error)))

    def facts(self) -> dict[str, int | str]:
        """What the engine holds now."""
        memory = self.memory
        return {
            "lanes": self._options.lanes,
            "lanes_running": len(self._lanes),
            "turns_queued": len(self._queue),
            "sessions": len(self._sessions),
            "pages_free": memory.target.free,
            "images_free": memory.images.free,
            "image_bytes": self.models.geometry.image_bytes,
            "page_bytes": self.models.geometry.target_page_bytes,
            "backend": self._options.backend,
            "draft_tokens": self.models.draft_tokens,
        }

    def _turns(self) -> list[str]:
        return [lane.submit.turn for lane in self._lanes] + [submit.turn for submit, _ in self._queue]

    # ------------------------------------------------------------------------------------------------ one step

    def step(self) -> bool:
        """Does one piece of work of each kind. Returns False if there was nothing to do."""
        if self.idle:
            return False
        self._end_cancelled()
        self._admit()
        prefilling = next((lane for lane in self._lanes if lane.prefilling), None)
        if prefilling is not None:
            self._guarded([prefilling], lambda: self._prefill_slice(prefilling))
        decoding = [lane for lane in self._lanes if not lane.prefilling]
        if decoding:
            self._guarded(decoding, lambda: self._decode(decoding))
        return True

    def _guarded(self, lanes: Sequence[Lane], work: Callable[[], None]) -> None:
        """A fault in the middle of work ends the lanes it was for, without publishing; the engine goes on."""
        try:
            work()
        except Exception as error:  # anything a kernel or a pool can raise: the other lanes must live on
            logger.exception("a turn failed")
            for lane in lanes:
                if lane in self._lanes:
                    self._leave(lane)
                    message = f"the turn failed inside the engine: {type(error).__name__}: {error}"
                    self._emit(Failed(lane.submit.turn, errors.INTERNAL_ERROR, message))

    def _end_cancelled(self) -> None:
        for submit, _ in [entry for entry in self._queue if entry[0].turn in self._cancelled]:
            self._queue = deque(entry for entry in self._queue if entry[0] is not submit)
            self._emit(Finished(submit.turn, "cancelled", (), None, len(submit.prompt_ids), 0, (), 0.0, 0.0))
        for lane in [lane for lane in self._lanes if lane.submit.turn in self._cancelled]:
            lane.finish_reason = "cancelled"
            self._guarded([lane], lambda lane=lane: self._finish(lane))
        self._cancelled.clear()

    def _admit(self) -> None:
        """First come, first served, while a lane, an image and the pages for prompt and budget are there."""
        while self._queue and len(self._lanes) < self._options.lanes:
            submit, arrived = self._queue[0]
            budget = self.models.context - len(submit.prompt_ids)
            if submit.max_tokens is not None:
                budget = min(budget, submit.max_tokens)
            tokens = len(submit.prompt_ids) + budget
            try:
                memory, hit = self._sessions.with_room(partial(self._open, submit, tokens), submit.session)
            except CapacityError as error:
                if self._lanes:
                    return  # a running lane will give its memory back
                self._queue.popleft()
                self._emit(Failed(submit.turn, errors.OVERLOADED, f"the turn does not fit this engine: {error}"))
                continue
            self._queue.popleft()
            stop_ids = frozenset(submit.stop_ids) | (frozenset() if submit.ignore_eos else self._eos_ids)
            used = {lane.row for lane in self._lanes}
            self._lanes.append(
                Lane(
                    submit=submit,
                    row=next(row for row in range(self._options.lanes) if row not in used),
                    memory=memory,
                    ledger=list(submit.prompt_ids),
                    budget=budget,
                    stop_ids=stop_ids,
                    hit=hit,
                    reused=memory.frontier,
                    started_at=arrived,
                    boundary=submit.stable_boundary if submit.session else 0,
                )
            )
            if submit.session:
                self._sessions.settle(submit.session)

    @property
    def _eos_ids(self) -> frozenset[int]:
        return frozenset(self.models.defaults.eos_ids)

    def _open(self, submit: Submit, tokens: int) -> tuple[SequenceMemory, Hit]:
        """Memory of a new lane: from the session's deepest fitting checkpoint, else empty. `CapacityError`."""
        found = self._sessions.deepest_prefix(submit.session, submit.prompt_ids) if submit.session else None
        if found is None:
            return self.memory.open(tokens), "none"
        checkpoint, hit = found
        return self.memory.restore(checkpoint, tokens), hit

    # ------------------------------------------------------------------------------------------------ prefill

    def _prefill_slice(self, lane: Lane) -> None:
        """One slice of a prompt; ends early at the stable boundary, where the turn start is captured."""
        end = min(lane.frontier + self._options.prefill_chunk, lane.prompt_tokens)
        if lane.frontier < lane.boundary:
            end = min(end, lane.boundary)
        self._executor.prefill(lane, end)
        if end == lane.boundary:
            self._capture(lane, "turn_start")
        if lane.prefilling:
            return
        turn = lane.submit.turn
        token = self._executor.first_token(lane)
        self._emit(Started(turn, lane.hit, lane.reused, lane.prompt_tokens - lane.reused))
        self._publish(lane, (token,), None)

    # ------------------------------------------------------------------------------------------------ decode

    def _decode(self, lanes: list[Lane]) -> None:
        done = self._executor.run(lanes)
        kept = [preview(lane, licensed).kept for lane, licensed in zip(lanes, done.licensed, strict=True)]
        self._executor.commit(done, kept)
        for lane, licensed, accepted in zip(lanes, done.licensed, done.accepted, strict=True):
            lane.rounds.append(accepted)
            self._publish(lane, licensed, accepted)

    def _publish(self, lane: Lane, licensed: Sequence[int], accepted: int | None) -> None:
        """Appends what the preview keeps to the ledger, tells the client, and ends the turn if it is over."""
        outcome = preview(lane, licensed)
        start = len(lane.ledger)
        lane.ledger.extend(licensed[: outcome.kept])
        lane.published.extend(outcome.published)
        lane.finish_reason, lane.stop_id = outcome.finish_reason, outcome.stop_id
        if outcome.published:
            self._emit(Tokens(lane.submit.turn, start, outcome.published, accepted))
        if lane.finish_reason is not None:
            self._finish(lane)

    def _finish(self, lane: Lane) -> None:
        """Captures the turn's end, frees the lane, and says how the turn ended."""
        if not lane.prefilling and len(lane.ledger) > lane.frontier:
            self._executor.catch_up([lane])
            if lane.submit.session:
                self._capture(lane, "turn_end")
        self._leave(lane)
        self._emit(
            Finished(
                turn=lane.submit.turn,
                finish_reason=lane.finish_reason or "cancelled",
                token_ids=tuple(lane.published),
                stop_id=lane.stop_id,
                prompt_tokens=lane.prompt_tokens,
                frontier=lane.frontier,
                rounds=tuple(lane.rounds),
                acceptance_length=lane.acceptance_length,
                seconds=time.monotonic() - lane.started_at,
            )
        )

    def _capture(self, lane: Lane, kind: CheckpointKind) -> None:
        """Keeps a checkpoint at the lane's frontier. Without room there is none, and the turn goes on all the same."""
        session = lane.submit.session
        assert session is not None
        form = "prompt" if lane.prefilling or len(lane.ledger) == lane.frontier else "decode"
        ledger = lane.ledger[: lane.frontier + (form == "decode")]
        try:
            capture = partial(self.memory.capture, lane.memory, ledger, form, kind)
            checkpoint = self._sessions.with_room(capture, keep=session)
        except CapacityError as error:
            logger.warning("no %s checkpoint for a session: %s", kind, error)
            return
        self._sessions.add(session, checkpoint)
        self._emit(Captured(lane.submit.turn, session, kind, checkpoint.frontier))

    def _leave(self, lane: Lane) -> None:
        self._lanes.remove(lane)
        self.memory.close(lane.memory)
