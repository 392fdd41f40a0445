"""The engine: commands in, events out, one `step` at a time. No threads, no network; the clock is given to it.

    step    end what was cancelled or waited too long; admit what fits; one prefill slice; one decode round
    round   execute -> preview each lane -> commit the batch once -> publish

A lane that ends is caught up before its state is captured. Model state first, user-visible output last: an event leaves
only after the state that it speaks of is committed.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from deployment.engine import errors
from deployment.engine.admission import Admission
from deployment.engine.captures import Captures
from deployment.engine.commands import Call, Cancel, Command, Inspect, Preempt, Submit, Suspend, TokenLogprob
from deployment.engine.compiling import Compiled, CompilingTurns
from deployment.engine.counts import Counts, Flow
from deployment.engine.drafting import DraftTokens
from deployment.engine.durable_sessions import DurableSessions
from deployment.engine.endings import Endings
from deployment.engine.errors import EngineError
from deployment.engine.events import Event, Evicted, Facts, Failed, Finished, PromptLogprobs, Started, Suspended
from deployment.engine.exchange import StateExchange
from deployment.engine.known_media import KnownMedia
from deployment.engine.lane import Lane
from deployment.engine.loading import Models
from deployment.engine.lost_device import device_is_lost
from deployment.engine.media_checks import check_media
from deployment.engine.options import EngineOptions
from deployment.engine.outbox import Outbox
from deployment.engine.pacing import PrefillPacer
from deployment.engine.pools import state_memory
from deployment.engine.publication import Preview, finished, preview, publish, tell
from deployment.engine.round import Executor
from deployment.engine.round_shape import Shapes
from deployment.engine.scheduler import Holding, Scheduler, Shortage, Ticket
from deployment.engine.sessions import SessionTable
from deployment.engine.state_calls import StateCalls, not_here
from deployment.engine.tally import Laps, Tally
from deployment.engine.validation import check_submit
from state.errors import CapacityError, StateError
from state.image_policy import ImagePolicy

LOOK_AGAIN_SECONDS = 0.05
"""So often a turn is looked after that waits for lanes of which none goes on: it may preempt one in its time."""

logger = logging.getLogger(__name__)


class Engine:
    """One model on one device. Not thread safe: whoever owns it calls `execute` and `step`.

    `emit` receives every event, in order, from inside these calls: on a card those of a round from inside the next
    `step`, once its round is launched, unless there is nothing to launch. `clock`: seconds, never going back.
    `durable`: this engine's access to the durable tier, if there is one. `beside`: whether the device works while the
    host does; by default, whether it is a card. Where the device is lost both raise, and nothing more can be done here.
    """

    def __init__(
        self,
        models: Models,
        options: EngineOptions,
        emit: Callable[[Event], None],
        clock: Callable[[], float] = time.monotonic,
        durable: DurableSessions | None = None,
        beside: bool | None = None,
    ) -> None:
        self.models = models
        self._options = options
        self._laps = Laps()
        self._tally = Tally(models.draft_tokens, self._laps)
        self._outbox = Outbox(self._tally.counting(emit))
        self._emit = emit = self._outbox.send
        self._beside = models.device.type == "cuda" if beside is None else beside
        self._clock = clock
        self._durable = durable
        self.memory = state_memory(models, options)
        draft_tokens = DraftTokens(models.draft_tokens, options.draft_tokens_by_lanes)
        shapes, captures = Shapes.on(models.device, draft_tokens), options.capture != "never"
        self._executor = Executor(
            models, self.memory, options.lanes, shapes, options.media_cache_bytes, captures, self._laps
        )
        self._sessions = SessionTable(self.memory, lambda session: emit(Evicted(session)))
        self._exchange = StateExchange(models, options, self.memory, self._sessions, clock, durable)
        policy = ImagePolicy.of(models.geometry, options.slice_tokens, options.image_min_tokens)
        self._captures = Captures(
            self.memory, self._sessions, policy, lambda lane: self._executor.catch_up([lane]), emit
        )
        self._admission = Admission(models, self.memory, self._sessions)
        self._scheduler = Scheduler(options)
        self._compiling = CompilingTurns(self._executor.grammars)
        self._pacer = PrefillPacer(options.slice_tokens, options.max_stall_ms)
        self._known_media = KnownMedia()
        self._lanes: list[Lane] = []
        self._suspended: dict[str, Lane] = {}
        self._endings = Endings(self.memory, self._sessions, self._captures, self._scheduler, self._lanes, emit, clock)
        self._state_calls = StateCalls(self._exchange, self._sessions, self._captures, self._lanes, self._suspended)
        self._cancelled: set[str] = set()
        self._work = 0
        self._stands_still = False
        """Whether the last step found nothing to do, and nothing came since."""
        if options.capture == "start":
            self._executor.capture()

    @property
    def idle(self) -> bool:
        return not self._lanes and not self._scheduler.waiting

    @property
    def rest(self) -> float | None:
        """Seconds for which a step would find nothing to do, unless a command comes; None: until one comes."""
        waiting = self._scheduler.waiting
        if self._cancelled or any(not lane.paused for lane in self._lanes):
            return 0.0
        self._hold()
        now = self._clock()
        ends = [ticket.expires for ticket in waiting if ticket.expires is not None]
        if any(ticket.ready for ticket in waiting):
            if not self._stands_still:
                return 0.0
            ends.append(now + LOOK_AGAIN_SECONDS)
        return max(0.0, min(ends) - now) if ends else None

    def warm(self) -> None:
        """Loads what the first turn with a grammar would wait for, and everybody else with it: about a second at a
        vocabulary of 250k tokens."""
        try:
            self._executor.grammars.warm()
        except EngineError as error:
            logger.info("no structured output here: %s", error.message)

    def compile_beside(self, compiled: Callable[[Compiled], None]) -> None:
        """From now on grammars are compiled while turns run. `compiled` is called on another thread: its argument is
        for the method of this name."""
        self._compiling.beside(compiled)

    # ------------------------------------------------------------------------------------------------ commands

    def execute(self, command: Command) -> None:
        """Takes a command. Turns run in later steps; everything else is done when this returns."""
        ref = command.call if isinstance(command, Call) else command.turn
        self._stands_still = False
        self._outbox.release()
        self._exchange.expire()
        try:
            match command:
                case Submit():
                    self._submit(command)
                case Cancel():
                    if self._scheduler.knows(command.turn):
                        self._cancelled.add(command.turn)
                case Preempt():
                    self._preempt(command.turn)
                case Suspend():
                    self._give_back(command)
                case Inspect():
                    self._emit(self._inspect(command))
                case _:
                    self._emit(self._state_calls.answer(command))
        except EngineError as error:
            self._emit(Failed(ref, error.code, error.message, error.param))
        except CapacityError as error:
            self._emit(Failed(ref, errors.OVERLOADED, f"the engine has no room for it: {error}"))
        except StateError as error:
            self._emit(Failed(ref, errors.BAD_STATE, str(error)))
        except Exception as error:  # out of memory, say: running turns must not end for one command
            if device_is_lost(error, self.models.device):
                raise
            logger.exception("a command failed")
            self._emit(Failed(ref, errors.INTERNAL_ERROR, f"the engine failed on it: {_shown(error)}"))

    def _submit(self, submit: Submit) -> None:
        if self._scheduler.knows(submit.turn):
            raise EngineError(errors.INVALID_REQUEST, f"turn {submit.turn!r} is running already", "turn")
        try:
            models = self.models
            check_submit(submit, models.context, models.target.public_rows, models.defaults.eos_ids)
            check_media(submit, models.vision)
            submit = replace(submit, media=self._known_media.shared(submit.media))
            self._admission.check_size(submit)
            now = self._clock()
            lane = None if submit.resumed is None else self._admission.replay(submit, submit.resumed, now)
            if lane is not None and lane.finish_reason is not None:
                self._endings.finish(lane)
                return
            self._compiling.begin(self._scheduler.enqueue(submit, now))
        except BaseException:
            self._scheduler.withdraw(submit.turn)
            self._endings.unpark(submit)
            raise
        if lane is not None:
            self._suspended[submit.turn] = lane

    def compiled(self, compiled: Compiled) -> None:
        """A turn's grammar is known now, and the turn waits for a lane, goes on in its own, or has failed."""
        self._stands_still = False
        self._outbox.release()
        ticket = self._compiling.settle(compiled)
        if ticket is None:
            return
        lane = next((lane for lane in self._lanes if lane.submit.turn == ticket.turn), None)
        if not isinstance(compiled.outcome, EngineError):
            ticket.matcher = compiled.outcome
            if lane is not None:
                lane.matcher = compiled.outcome
        elif lane is not None:
            self._endings.fail(lane, compiled.outcome)
        else:
            self._scheduler.withdraw(ticket.turn)
            self._refuse(ticket, compiled.outcome)

    def _inspect(self, command: Inspect) -> Facts:
        held = self._sessions.whole(command.session) if command.session is not None else ()
        checkpoints = tuple((checkpoint.kind, checkpoint.frontier) for checkpoint in held)
        return Facts(command.call, self.facts(), self.counts(), self._work, checkpoints)

    def facts(self) -> dict[str, int | str]:
        """What the engine holds now."""
        memory = self.memory
        return {
            "lanes": self._options.lanes,
            "lanes_running": len(self._lanes),
            "turns_queued": len(self._scheduler.waiting),
            "turns_preempted": len(self._suspended),
            "sessions": len(self._sessions),
            "pages": memory.target.pages,
            "pages_free": memory.target.free,
            "images": memory.images.slots,
            "images_free": memory.images.free,
            "image_bytes": self.models.geometry.image_bytes,
            "page_bytes": self.models.geometry.target_page_bytes,
            "backend": self._options.backend,
            "draft_tokens": self.models.draft_tokens,
            "staged_bytes": self._exchange.staged_bytes,
        }

    def counts(self) -> Counts:
        """What the engine has done since it began."""
        written, read = (self._durable.flow_out, self._durable.flow_in) if self._durable else (Flow(), Flow())
        return self._tally.counts(written, read)

    # ------------------------------------------------------------------------------------------------ one step

    def step(self) -> bool:
        """Does one piece of work of each kind. Returns False if there was nothing to do."""
        if self.idle:
            return False
        self._step()
        if self._options.check_invariants:
            self.memory.check_invariants()
            self._sessions.check_invariants()
        return True

    def _step(self) -> None:
        self._end_cancelled()
        self._admit(self._clock())
        decoding, prefilling = self._going()
        self._stands_still = not (decoding or prefilling)
        if prefilling:
            self._outbox.release()
            chosen = self._pacer.choose(prefilling)
            self._guarded([chosen], lambda: self._prefill_slice(chosen, bool(decoding)))
            decoding, _ = self._going()
        if decoding:
            self._guarded(decoding, lambda: self._decode(decoding))
        if all(lane.paused for lane in self._lanes):
            self._outbox.release()

    def _going(self) -> tuple[list[Lane], list[Lane]]:
        """Which lanes decode, and which prefill?"""
        going = [lane for lane in self._lanes if not lane.paused]
        return [lane for lane in going if not lane.prefilling], [lane for lane in going if lane.prefilling]

    def _guarded(self, lanes: Sequence[Lane], work: Callable[[], None]) -> None:
        """A fault in the middle of work ends the turns it was for; the other lanes and the engine live on, but for one
        that takes the device away.

        What such a turn had committed before is kept, if its state is whole.
        """
        try:
            work()
        except EngineError as error:  # the turn itself is at its end, as at a grammar's dead end
            for lane in lanes:
                self._stop(lane, error)
        except Exception as error:  # anything a kernel or a pool can raise
            if device_is_lost(error, self.models.device):
                raise
            logger.exception("a turn failed", extra={"turns": [lane.submit.turn for lane in lanes]})
            for lane in lanes:
                self._endings.fail(lane, EngineError(errors.INTERNAL_ERROR, f"the turn failed: {_shown(error)}"))
        self._work += 1

    def _stop(self, lane: Lane, error: EngineError) -> None:
        """Ends a turn that cannot go on, but for one that lacks nothing but another lexer."""
        if not lane.paused:
            self._endings.fail(lane, error)
            return
        ticket = self._scheduler.of(lane.submit.turn)
        try:
            self._compiling.renew(ticket)
        except EngineError as refusal:
            self._endings.fail(lane, refusal)
        else:
            lane.matcher = ticket.matcher

    def _end_cancelled(self) -> None:
        for ticket in [ticket for ticket in self._scheduler.waiting if ticket.turn in self._cancelled]:
            self._scheduler.withdraw(ticket.turn)
            lane = self._suspended.pop(ticket.turn, None)
            if lane is not None:
                lane.finish_reason = "cancelled"
                self._guarded([lane], partial(self._endings.finish, lane))
                continue
            self._endings.unpark(ticket.submit)
            prompt_tokens = len(ticket.submit.prompt_ids)
            self._emit(Finished(ticket.turn, "cancelled", (), None, prompt_tokens, 0, (), 0.0, 0.0))
        for lane in [lane for lane in self._lanes if lane.submit.turn in self._cancelled]:
            lane.finish_reason = "cancelled"
            self._guarded([lane], partial(self._endings.finish, lane))
        self._cancelled.clear()

    def _admit(self, now: float) -> None:
        """Lanes for turns that fit; the lanes of others for one that has waited too long."""
        self._hold()
        self._scheduler.admit(now, self._take)
        victims = self._scheduler.victims(now)
        for victim in victims:
            self._preempt(victim.turn)
        if victims:
            self._scheduler.admit(now, self._take)
        for late in self._scheduler.expired(now):
            self._endings.unpark(late.submit)
            lacked = "no lane was free" if late.offered else "its grammar was not compiled"
            message = f"the turn waited {now - late.waits_since:.1f} s, {lacked} in its time (queue_seconds)"
            self._emit(Failed(late.turn, errors.QUEUE_TIMEOUT, message))

    def _hold(self) -> None:
        """Which turns wait for another one?"""
        for ticket in self._scheduler.waiting:
            ticket.held = ticket.submit.after is not None and self._prompt_ahead(ticket.submit.after)

    def _prompt_ahead(self, turn: str) -> bool:
        """Whether a turn's prompt will be there sooner than another turn could prefill the same one."""
        lane = next((lane for lane in (*self._lanes, *self._suspended.values()) if lane.submit.turn == turn), None)
        if lane is not None:
            return len(lane.ledger) == lane.prompt_tokens
        # one that waits for another turn itself is not waited for: two turns never wait for each other
        return any(t.turn == turn and t.submit.after is None for t in self._scheduler.waiting)

    def _take(self, ticket: Ticket) -> Holding | Shortage | None:
        """A lane for a turn, or what it lacks, or None if it can never run: then it has failed."""
        alone, submit = not self._lanes, ticket.submit
        if not alone and self._admission.still_short(ticket.shortage):
            return ticket.shortage
        self._outbox.release()
        row = next(row for row in range(self._options.lanes) if row not in {lane.row for lane in self._lanes})
        lane = self._suspended.get(ticket.turn)
        try:
            if lane is not None:
                self._admission.resume(lane, row, alone, self._clock())
            else:
                lane = self._admission.open(submit, row, alone, self._clock())
            lane.matcher = ticket.matcher
        except CapacityError as error:
            if not alone:
                return self._admission.shortage(error, submit)  # a running lane will give its memory back
            refusal = EngineError(errors.OVERLOADED, f"the turn does not fit this engine: {error}")
        except EngineError as error:
            refusal = error
        except Exception as error:
            if device_is_lost(error, self.models.device):
                raise
            logger.exception("a turn could not be admitted")
            refusal = EngineError(errors.INTERNAL_ERROR, f"the turn failed: {_shown(error)}")
        else:
            self._suspended.pop(ticket.turn, None)
            self._lanes.append(lane)
            self._tally.admitted(self._clock() - ticket.waits_since)
            return self._admission.holding(lane)
        self._refuse(ticket, refusal)
        return None

    def _refuse(self, ticket: Ticket, refusal: EngineError) -> None:
        """Ends a turn that waits no more and has no lane."""
        if (lane := self._suspended.pop(ticket.turn, None)) is not None:
            self._endings.fail(lane, refusal)
        else:
            self._endings.unpark(ticket.submit)
            self._emit(Failed(ticket.turn, refusal.code, refusal.message, refusal.param))

    def _preempt(self, turn: str) -> None:
        """Takes a lane away between two rounds; its turn waits again."""
        for lane in [lane for lane in self._lanes if lane.submit.turn == turn]:
            self._guarded([lane], partial(self._suspend, lane))

    def _suspend(self, lane: Lane) -> None:
        self._outbox.release()
        try:
            self._executor.catch_up([lane])
        except Exception as error:  # its draft context is not whole now, and will be replayed
            if device_is_lost(error, self.models.device):
                raise
            logger.warning("a lane could not be caught up: %s", _shown(error))
        self._admission.suspend(lane)
        self._lanes.remove(lane)
        self._suspended[lane.submit.turn] = lane
        self._scheduler.preempted(lane.submit.turn, self._clock())
        self._tally.preempted()

    def _give_back(self, command: Suspend) -> None:
        """Takes a turn out between two rounds."""
        turn = command.turn
        if turn in self._cancelled:
            self._end_cancelled()
        ticket = self._scheduler.withdraw(turn)
        lane = self._suspended.pop(turn, None) or next((lane for lane in self._lanes if lane.submit.turn == turn), None)
        if lane is not None:
            frontier = self._captures.ended(lane, always=True)
            self._endings.end(lane, Suspended(command.call, turn, lane.session, frontier, len(lane.generated)))
        elif ticket is not None:
            self._endings.unpark(ticket.submit)
            self._emit(Suspended(command.call, turn, ticket.submit.session, 0, 0))
        else:
            raise not_here(turn)

    def abandon(self, reason: str) -> None:
        """The engine is at its end: every turn fails, those that wait too, and what they had committed is told. Asks
        nothing of the device."""
        self._compiling.close()
        self._outbox.release()
        for ticket in self._scheduler.waiting:
            if ticket.turn not in self._suspended:
                self._emit(Failed(ticket.turn, errors.INTERNAL_ERROR, reason))
        for lane in (*self._lanes, *self._suspended.values()):
            self._endings.tell(tell(lane, len(lane.published), None))
            kept = finished(lane, "failed", self._clock() - lane.admitted_at) if lane.generated else None
            self._emit(Failed(lane.submit.turn, errors.INTERNAL_ERROR, reason, None, kept))

    # ------------------------------------------------------------------------------------------------ prefill

    def _prefill_slice(self, lane: Lane, decoding: bool) -> None:
        """One slice of a prompt; ends early at a boundary where an image is captured.

        A turn that was preempted is replayed to where it stood, and goes on decoding from there.
        """
        start, end = lane.frontier, self._pacer.slice_end(lane, decoding)
        if start < end:
            before = self._clock()
            told = self._executor.prefill(lane, end)
            seconds = self._clock() - before
            self._pacer.measured(end - start, seconds)
            self._tally.slice(end - start, seconds)
            if told:
                self._emit(PromptLogprobs(lane.submit.turn, lane.scored, told))
                lane.scored += len(told)
        self._captures.prefilled(lane)
        if lane.frontier < lane.prefill_end or len(lane.ledger) > lane.prompt_tokens:
            return
        self._admission.share(lane, self._endings.over)
        token, logprobs = self._executor.first_token(lane)
        self._begin(lane)
        self._publish(lane, preview(lane, (token,)), None, logprobs)

    def _begin(self, lane: Lane) -> None:
        if not lane.begun:
            lane.begun = True
            self._emit(Started(lane.submit.turn, lane.hit, lane.reused, lane.prefill_end - lane.reused))

    # ------------------------------------------------------------------------------------------------ decode

    def _decode(self, lanes: list[Lane]) -> None:
        for lane in lanes:
            self._begin(lane)
        done = self._executor.run(lanes, self._outbox.release)
        previews = [preview(lane, licensed) for lane, licensed in zip(lanes, done.licensed, strict=True)]
        self._laps.lap("preview")
        self._executor.commit(done, [len(outcome.kept) for outcome in previews])
        self._laps.lap("commit")
        rows = zip(previews, done.drafted, done.accepted, strict=True)
        self._tally.round([(drafted, accepted) for outcome, drafted, accepted in rows if outcome.kept])
        with self._outbox.holding() if self._beside else contextlib.nullcontext():
            for lane, outcome, accepted, told in zip(lanes, previews, done.accepted, done.logprobs, strict=True):
                if outcome.kept:
                    lane.rounds.append(accepted)
                    self._guarded([lane], partial(self._publish, lane, outcome, accepted, told))
            for lane, error in done.dead_ends:
                self._stop(lane, error)
        self._laps.lap("publish")

    def _publish(self, lane: Lane, outcome: Preview, accepted: int | None, logprobs: tuple[TokenLogprob, ...]) -> None:
        """Appends what was kept to the ledger, tells the client, and ends the turn if it is over."""
        committed, tokens = publish(lane, outcome, accepted, logprobs)
        self._emit(committed)
        self._endings.tell(tokens)
        if lane.finish_reason is not None:
            self._endings.finish(lane)
        elif accepted is not None:
            self._captures.decoded(lane)


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
