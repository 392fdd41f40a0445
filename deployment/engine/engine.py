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

import torch

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
    Evicted,
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
    TokenLogprob,
    Tokens,
)
from deployment.engine.options import EngineOptions
from deployment.engine.publication import Preview, preview
from deployment.engine.round import Executor
from deployment.engine.sessions import SessionTable
from deployment.engine.validation import check_submit
from model.errors import ModelError
from state.errors import CapacityError, CoverageError, StateError
from state.geometry import PAGE_TOKENS, pages_for
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
        self.memory = state_memory(models, options)
        self._executor = Executor(models, self.memory, options.lanes)
        self._sessions = SessionTable(self.memory, lambda session: emit(Evicted(session)))
        self._exchange = StateExchange(models, self.memory, self._sessions)
        self._queue: deque[Submit] = deque()
        self._lanes: list[Lane] = []
        self._cancelled: set[str] = set()

    @property
    def idle(self) -> bool:
        return not self._lanes and not self._queue

    def warm(self) -> None:
        """Loads what the first turn with a grammar would wait for, and everybody else with it: about a second at a
        vocabulary of 250k tokens."""
        try:
            self._executor.grammars.warm()
        except EngineError as error:
            logger.info("no structured output here: %s", error.message)

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
                    self._check_size(command)
                    self._executor.grammars.check(command.grammar)
                    self._queue.append(command)
                case Cancel():
                    if any(command.turn == turn for turn in self._turns()):
                        self._cancelled.add(command.turn)
                case Export():
                    self._emit(self._exchange.export(command))
                case Import():
                    self._detach(command.session)
                    self._emit(self._exchange.import_(command))
                case Fork():
                    self._emit(self._exchange.fork(command))
                case Drop():
                    self._detach(command.session)
                    self._sessions.drop(command.session)
                    self._emit(Dropped(command.call, command.session))
                case Inspect():
                    self._emit(Facts(command.call, self.facts()))
        except EngineError as error:
            self._emit(Failed(ref, error.code, error.message, error.param))
        except CapacityError as error:
            self._emit(Failed(ref, errors.OVERLOADED, f"the engine has no room for it: {error}"))
        except StateError as error:
            self._emit(Failed(ref, errors.BAD_STATE, str(error)))
        except Exception as error:  # out of memory, a lost device: running turns must not end for one command
            logger.exception("a command failed")
            self._emit(Failed(ref, errors.INTERNAL_ERROR, f"the engine failed on it: {_shown(error)}"))

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
        return [lane.submit.turn for lane in self._lanes] + [submit.turn for submit in self._queue]

    def _budget(self, submit: Submit) -> int:
        """Tokens that a turn may publish (decision 7)."""
        left = self.models.context - len(submit.prompt_ids)
        return left if submit.max_tokens is None else min(left, submit.max_tokens)

    def _check_size(self, submit: Submit) -> None:
        """Refuses a turn that would not fit even if nothing else were here, before it makes others wait."""
        wanted = pages_for(len(submit.prompt_ids) + self._budget(submit))
        pages = self.memory.target.pages
        if wanted > pages:
            raise EngineError(
                errors.OVERLOADED,
                f"the turn's prompt and answer need {wanted} pages of {PAGE_TOKENS} tokens, but this engine has "
                f"{pages}; a smaller max_tokens may fit",
                "max_tokens",
            )

    def _detach(self, session: str) -> None:
        """Turns of this session that still run will not give it their state any more: it has another now."""
        for lane in self._lanes:
            if lane.session == session:
                lane.session = None

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
        """A fault in the middle of work ends the turns it was for; the other lanes and the engine live on.

        What such a turn had committed before is kept, if its state is whole.
        """
        try:
            work()
        except EngineError as error:  # the turn itself is at its end, as at a grammar's dead end
            for lane in lanes:
                self._fail(lane, error)
        except Exception as error:  # anything a kernel or a pool can raise
            logger.exception("a turn failed")
            for lane in lanes:
                self._fail(lane, EngineError(errors.INTERNAL_ERROR, f"the turn failed: {_shown(error)}"))

    def _fail(self, lane: Lane, error: EngineError) -> None:
        if not lane.ended:
            self._capture(lane, "turn_end")
            self._end(lane, Failed(lane.submit.turn, error.code, error.message, error.param))

    def _end_cancelled(self) -> None:
        for submit in [submit for submit in self._queue if submit.turn in self._cancelled]:
            self._queue.remove(submit)
            self._emit(Finished(submit.turn, "cancelled", (), None, len(submit.prompt_ids), 0, (), 0.0, 0.0))
        for lane in [lane for lane in self._lanes if lane.submit.turn in self._cancelled]:
            lane.finish_reason = "cancelled"
            self._guarded([lane], partial(self._finish, lane))
        self._cancelled.clear()

    def _admit(self) -> None:
        """First come, first served, while a lane, an image and the pages for prompt and budget are there."""
        while self._queue and len(self._lanes) < self._options.lanes:
            submit = self._queue[0]
            try:
                lane = self._lane_for(submit)
            except CapacityError as error:
                if self._lanes:
                    return  # a running lane will give its memory back
                self._emit(Failed(submit.turn, errors.OVERLOADED, f"the turn does not fit this engine: {error}"))
            except Exception as error:
                logger.exception("a turn could not be admitted")
                self._emit(Failed(submit.turn, errors.INTERNAL_ERROR, f"the turn failed: {_shown(error)}"))
            else:
                self._lanes.append(lane)
            self._queue.popleft()

    def _lane_for(self, submit: Submit) -> Lane:
        """A lane with memory of its own. `CapacityError` if there is no room now."""
        budget = self._budget(submit)
        take = partial(self._open, submit, len(submit.prompt_ids) + budget)
        try:
            # the checkpoint to go on from is not evicted for the turn that waits for it
            memory, hit = self._sessions.with_room(take, keep=submit.session)
        except CapacityError:
            if self._lanes:
                raise
            memory, hit = self._sessions.with_room(take, keep=None)
        if submit.session:
            self._sessions.settle(submit.session)
        used = {lane.row for lane in self._lanes}
        return Lane(
            submit=submit,
            row=next(row for row in range(self._options.lanes) if row not in used),
            memory=memory,
            ledger=list(submit.prompt_ids),
            budget=budget,
            stop_ids=frozenset(submit.stop_ids) | (frozenset() if submit.ignore_eos else self._eos_ids),
            hit=hit,
            reused=memory.frontier,
            admitted_at=time.monotonic(),
            session=submit.session,
            boundary=submit.stable_boundary if submit.session else 0,
            matcher=self._executor.grammars.matcher(submit.grammar),
        )

    @property
    def _eos_ids(self) -> frozenset[int]:
        return frozenset(self.models.defaults.eos_ids)

    def _open(self, submit: Submit, tokens: int) -> tuple[SequenceMemory, Hit]:
        """Memory of a new lane: from the session's deepest fitting checkpoint, else empty. `CapacityError`.

        A checkpoint that is not whole is a miss: it is released, and the next deepest is tried.
        """
        while submit.session:
            found = self._sessions.deepest_prefix(submit.session, submit.prompt_ids)
            if found is None:
                break
            checkpoint, hit = found
            try:
                return self.memory.restore(checkpoint, tokens), hit
            except CoverageError as error:
                logger.warning("a checkpoint is not used: %s", error)
                self._sessions.discard(submit.session, checkpoint)
        return self.memory.open(tokens), "none"

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
        token, logprobs = self._executor.first_token(lane)
        self._emit(Started(lane.submit.turn, lane.hit, lane.reused, lane.prompt_tokens - lane.reused))
        self._publish(lane, preview(lane, (token,)), None, logprobs)

    # ------------------------------------------------------------------------------------------------ decode

    def _decode(self, lanes: list[Lane]) -> None:
        done = self._executor.run(lanes)
        previews = [preview(lane, licensed) for lane, licensed in zip(lanes, done.licensed, strict=True)]
        self._executor.commit(done, [len(outcome.kept) for outcome in previews])
        for lane, outcome, accepted, told in zip(lanes, previews, done.accepted, done.logprobs, strict=True):
            lane.rounds.append(accepted)
            self._guarded([lane], partial(self._publish, lane, outcome, accepted, told))
        for lane, error in done.dead_ends:
            self._fail(lane, error)

    def _publish(self, lane: Lane, outcome: Preview, accepted: int | None, logprobs: tuple[TokenLogprob, ...]) -> None:
        """Appends what was kept to the ledger, tells the client, and ends the turn if it is over."""
        start = len(lane.ledger)
        lane.ledger.extend(outcome.kept)
        lane.published.extend(outcome.published)
        lane.finish_reason, lane.stop_id = outcome.finish_reason, outcome.stop_id
        if outcome.published:
            told = logprobs[: len(outcome.published)]
            self._emit(Tokens(lane.submit.turn, start, outcome.published, accepted, told))
        if lane.finish_reason is not None:
            self._finish(lane)

    def _finish(self, lane: Lane) -> None:
        """Captures the turn's end, frees the lane, and says how the turn ended."""
        self._capture(lane, "turn_end")
        finished = Finished(
            turn=lane.submit.turn,
            finish_reason=lane.finish_reason or "cancelled",
            token_ids=tuple(lane.published),
            stop_id=lane.stop_id,
            prompt_tokens=lane.prompt_tokens,
            frontier=lane.frontier,
            rounds=tuple(lane.rounds),
            acceptance_length=lane.acceptance_length,
            seconds=time.monotonic() - lane.admitted_at,
        )
        self._end(lane, finished)

    def _capture(self, lane: Lane, kind: CheckpointKind) -> None:
        """Keeps a checkpoint at the lane's frontier, if it has a session and anything new.

        Without room, or if the state is not whole, there is none: the turn goes on or ends all the same.
        """
        if lane.session is None or lane.frontier <= lane.reused:
            return
        form = "decode" if len(lane.ledger) > lane.frontier and not lane.prefilling else "prompt"
        ledger = lane.ledger[: lane.frontier + (form == "decode")]
        try:
            self._executor.catch_up([lane])
            capture = partial(self.memory.capture, lane.memory, ledger, form, kind)
            checkpoint = self._sessions.with_room(capture, keep=None)
            self._sessions.add(lane.session, checkpoint)
        except Exception as error:  # also that of a device: what the turn committed is in its ledger
            logger.warning("no %s checkpoint of a session: %s", kind, _shown(error))
            return
        self._emit(Captured(lane.submit.turn, lane.session, kind, checkpoint.frontier))

    def _end(self, lane: Lane, last: Finished | Failed) -> None:
        """Frees the lane and sends the turn's last event, whatever happens."""
        if lane.ended:
            return
        lane.ended = True
        try:
            self._lanes.remove(lane)
            self.memory.close(lane.memory)
        finally:
            self._emit(last)


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def state_memory(models: Models, options: EngineOptions) -> StateMemory:
    """All pools of an engine. Raises ModelError where the device has no room for them.

    Unless told otherwise there are pages for every lane at full context and half as much for checkpoints; a GPU gives
    at most what is free beside the weights, less a tenth for activations.
    """
    images = options.lanes + options.images
    pages = options.pages or pages_for(models.context) * (options.lanes + max(1, options.lanes // 2))
    geometry = models.geometry
    if models.device.type == "cuda":
        free = int(0.9 * torch.cuda.mem_get_info(models.device)[0])
        fitting = (free - images * geometry.image_bytes) // (geometry.target_page_bytes + geometry.draft_page_bytes)
        pages = pages if options.pages else min(pages, fitting)
        if pages < 1 or pages > fitting:
            raise ModelError(
                f"images and pages do not fit the device: {images} images of {geometry.image_bytes} bytes and "
                f"{max(pages, 1)} pages of {geometry.target_page_bytes + geometry.draft_page_bytes} bytes are wanted, "
                f"{free} bytes can be used; choose fewer lanes, images or pages"
            )
    return StateMemory(geometry, pages, pages, images, models.device)
