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
from typing import TypeVar

from deployment.engine import errors
from deployment.engine.errors import EngineError
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
    Exported,
    Facts,
    Failed,
    Finished,
    Fork,
    Import,
    Imported,
    Inspect,
    Started,
    Submit,
    Tokens,
)
from deployment.engine.options import EngineOptions
from deployment.engine.publication import preview
from deployment.engine.round import Executor
from deployment.engine.sessions import SessionTable
from state.checkpoint import Checkpoint
from state.codec import decode_checkpoint, encode_checkpoint
from state.errors import CapacityError, StateError
from state.geometry import pages_for
from state.memory import SequenceMemory, StateMemory

logger = logging.getLogger(__name__)

_Taken = TypeVar("_Taken")


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
                    self._check(command)
                    self._queue.append((command, time.monotonic()))
                case Cancel():
                    if any(command.turn == turn for turn in self._turns()):
                        self._cancelled.add(command.turn)
                case Export():
                    self._emit(self._export(command))
                case Import():
                    self._emit(self._import(command))
                case Fork():
                    self._emit(self._fork(command))
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

    def _check(self, submit: Submit) -> None:
        """Refuses what can never run, before it waits for anything."""
        prompt, limit = submit.prompt_ids, self.models.context
        if submit.turn in self._turns():
            raise EngineError(errors.INVALID_REQUEST, f"turn {submit.turn!r} is running already", "turn")
        if not prompt:
            raise EngineError(errors.INVALID_REQUEST, "the prompt is empty, must have at least one token", "prompt")
        rows = self.models.target.public_rows
        wrong = next((token for token in prompt if not 0 <= token < rows), None)
        if wrong is not None:
            raise EngineError(
                errors.INVALID_REQUEST, f"prompt token id {wrong} is outside the vocabulary [0, {rows})", "prompt"
            )
        if len(prompt) >= limit:
            raise EngineError(
                errors.CONTEXT_LENGTH_EXCEEDED,
                f"the prompt has {len(prompt)} tokens, but the context limit is {limit} tokens, of which at least one "
                "must be left for the answer",
                "prompt",
            )
        if submit.max_tokens is not None and submit.max_tokens < 1:
            raise EngineError(
                errors.INVALID_REQUEST, f"max_tokens is {submit.max_tokens}, must be at least 1", "max_tokens"
            )
        if not 0 <= submit.stable_boundary <= len(prompt):
            raise EngineError(
                errors.INVALID_REQUEST,
                f"stable_boundary is {submit.stable_boundary}, must be between 0 and the prompt's {len(prompt)} tokens",
                "stable_boundary",
            )
        _check_sampling(submit)

    def _export(self, command: Export) -> Exported:
        held = self._sessions.checkpoints(command.session)
        if not held:
            raise EngineError(errors.UNKNOWN_SESSION, f"no state of session {command.session!r} is held here")
        newest: dict[str, Checkpoint] = {}
        for checkpoint in held:
            if checkpoint.kind in command.kinds:
                newest[checkpoint.kind] = checkpoint
        chosen = [checkpoint for checkpoint in held if newest.get(checkpoint.kind) is checkpoint]
        blobs = tuple(encode_checkpoint(self.memory, c, self.models.fingerprint, command.record) for c in chosen)
        kinds: tuple[CheckpointKind, ...] = tuple(c.kind for c in chosen)  # pyright: ignore[reportAssignmentType]
        return Exported(command.call, command.session, blobs, kinds, tuple(c.frontier for c in chosen))

    def _import(self, command: Import) -> Imported:
        if not command.blobs:
            raise EngineError(errors.BAD_STATE, "an import needs at least one checkpoint")
        rows = self.models.target.public_rows
        decoded: list[Checkpoint] = []
        record: dict[str, object] = {}
        try:
            for blob in command.blobs:
                checkpoint, record = self._with_room(
                    lambda blob=blob: decode_checkpoint(self.memory, blob, self.models.fingerprint, rows),
                    keep=command.session,
                )
                decoded.append(checkpoint)
        except StateError:
            for checkpoint in decoded:
                self.memory.release(checkpoint)
            raise
        self._sessions.replace(command.session, decoded, command.origin)
        return self._imported(command.call, command.session, record)

    def _fork(self, command: Fork) -> Imported:
        held = self._sessions.checkpoints(command.session)
        if not held:
            raise EngineError(errors.UNKNOWN_SESSION, f"no state of session {command.session!r} is held here")
        forked: list[Checkpoint] = []
        try:
            for checkpoint in held:
                forked.append(
                    self._with_room(lambda c=checkpoint: self.memory.fork(c), keep=command.session)
                )
        except StateError:
            for checkpoint in forked:
                self.memory.release(checkpoint)
            raise
        self._sessions.replace(command.child, forked, "device")
        return self._imported(command.call, command.child, {})

    def _imported(self, call: str, session: str, record: dict[str, object]) -> Imported:
        held = self._sessions.checkpoints(session)
        deepest = max(held, key=lambda c: len(c.ledger))
        return Imported(call, session, tuple(c.frontier for c in held), deepest.ledger, record)

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
            found = self._sessions.deepest_prefix(submit.session, submit.prompt_ids) if submit.session else None
            try:
                memory = self._with_room(lambda: self._open(found[0] if found else None, tokens), submit.session)
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
                    hit=found[1] if found else "none",
                    reused=memory.frontier,
                    started_at=arrived,
                    boundary=submit.stable_boundary if submit.session else 0,
                )
            )
            if submit.session and found:
                self._sessions.settle(submit.session)

    @property
    def _eos_ids(self) -> frozenset[int]:
        return frozenset(self.models.defaults.eos_ids)

    def _open(self, checkpoint: Checkpoint | None, tokens: int) -> SequenceMemory:
        return self.memory.restore(checkpoint, tokens) if checkpoint else self.memory.open(tokens)

    def _with_room(self, take: Callable[[], _Taken], keep: str | None) -> _Taken:
        """Calls `take`, and makes room by evicting checkpoints for as long as memory is short and some are idle."""
        while True:
            try:
                return take()
            except CapacityError:
                if not self._sessions.evict_one(keep) and not self._sessions.evict_one():
                    raise

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
            checkpoint = self._with_room(
                lambda: self.memory.capture(lane.memory, ledger, form, kind), keep=session
            )
        except CapacityError as error:
            logger.warning("no %s checkpoint for a session: %s", kind, error)
            return
        self._sessions.add(session, checkpoint)
        self._emit(Captured(lane.submit.turn, session, kind, checkpoint.frontier))

    def _leave(self, lane: Lane) -> None:
        self._lanes.remove(lane)
        self.memory.close(lane.memory)


def _check_sampling(submit: Submit) -> None:
    sampling = submit.sampling
    if not 0.0 <= sampling.temperature < float("inf"):
        message = f"temperature is {sampling.temperature}, must be a finite number of at least 0"
        raise EngineError(errors.INVALID_REQUEST, message, "temperature")
    if sampling.top_k < 0:
        raise EngineError(errors.INVALID_REQUEST, f"top_k is {sampling.top_k}, must be at least 0 (0: all)", "top_k")
    if not 0.0 < sampling.top_p <= 1.0:
        raise EngineError(
            errors.INVALID_REQUEST, f"top_p is {sampling.top_p}, must be above 0 and at most 1", "top_p"
        )
    if not 0 <= sampling.seed < 1 << 64:
        raise EngineError(errors.INVALID_REQUEST, f"seed is {sampling.seed}, must be in [0, 2^64)", "seed")
