"""Where does a turn get the memory it runs in, how does it give it up, and how does it go on later?

    open      what another turn with the same prompt left for it; else the tenant's deepest checkpoint that is a prefix
              of the prompt; else an empty state, where also a turn begins whose prompt is scored
    suspend   a checkpoint of the turn's own, if an image is free; else nothing but the lane's ledger
    replay    a turn that ran elsewhere stands here as one that was suspended: its ledger and no memory
    resume    that checkpoint; else the tenant's deepest one that is a prefix of the ledger; else an empty state. What
              is missing is prefilled again up to the last commit boundary: nothing is drawn or published twice

Nothing is taken unless all is there; checkpoints of idle sessions make room, then those of suspended turns.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import partial

from deployment.engine import errors
from deployment.engine.errors import EngineError
from deployment.engine.lane import Lane
from deployment.engine.loading import Models
from deployment.engine.messages import CheckpointKind, Hit, Resumed, Submit
from deployment.engine.placing import spans_of
from deployment.engine.publication import replay
from deployment.engine.scheduler import LANES, Holding, Shortage
from deployment.engine.sessions import SessionTable
from deployment.engine.stop_strings import StopStrings
from deployment.engine.thinking import ThinkingLimit
from state.checkpoint import Checkpoint
from state.coverage import Form
from state.errors import CapacityError, CoverageError
from state.geometry import PAGE_TOKENS, pages_for
from state.media import rope_delta
from state.memory import SequenceMemory, StateMemory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Opened:
    """`hit`: None where a turn goes on from a checkpoint that was kept for it. `private`: as of a lane."""

    memory: SequenceMemory
    hit: Hit | None
    private: bool


class Admission:
    """Opens, suspends and resumes lanes."""

    def __init__(self, models: Models, memory: StateMemory, sessions: SessionTable) -> None:
        self._models = models
        self._memory = memory
        self._sessions = sessions

    def budget(self, submit: Submit) -> int:
        """Tokens that a turn may publish (decision 7)."""
        left = self._models.context - len(submit.prompt_ids)
        return left if submit.max_tokens is None else min(left, submit.max_tokens)

    def check_size(self, submit: Submit) -> None:
        """Refuses a turn that would not fit even if nothing else were here, before it makes others wait."""
        wanted = pages_for(len(submit.prompt_ids) + self.budget(submit))
        pages = self._memory.target.pages
        if wanted > pages:
            raise EngineError(
                errors.OVERLOADED,
                f"the turn's prompt and answer need {wanted} pages of {PAGE_TOKENS} tokens, but this engine has "
                f"{pages}; a smaller max_tokens may fit",
                "max_tokens",
            )

    def open(self, submit: Submit, row: int, alone: bool, now: float) -> Lane:
        """A lane with memory of its own. `CapacityError` if there is no room now. `alone`: no other lane runs, so that
        nothing is gained by waiting."""
        prompt = submit.prompt_ids
        reach = len(prompt) if submit.sampling.prompt_logprobs is None else 0
        opened = self._with_room(submit, prompt, reach, len(prompt) + self.budget(submit), alone)
        self._sessions.unpark(submit.turn)
        lane = self._lane(submit, row, opened.memory, opened.hit or "device", now)
        lane.private = opened.private
        return lane

    def replay(self, submit: Submit, resumed: Resumed, now: float) -> Lane:
        """A turn that has run elsewhere, without memory; `resume` gives it some. Raises EngineError for a turn that
        could not have committed what it says."""
        lane = self._lane(submit, 0, SequenceMemory(slot=-1, pages=[], draft_pages=[]), "none", now)
        lane.suspended = True
        replay(lane, resumed)
        if resumed.token_ids:
            lane.scored = lane.prompt_tokens  # what was asked of the prompt came before its first token
            lane.memory.settle(len(lane.ledger) - 1)
        return lane

    def _lane(self, submit: Submit, row: int, memory: SequenceMemory, hit: Hit, now: float) -> Lane:
        ends = frozenset(self._models.defaults.eos_ids)
        return Lane(
            submit=submit,
            row=row,
            memory=memory,
            ledger=list(submit.prompt_ids),
            budget=self.budget(submit),
            stop_ids=frozenset(submit.stop_ids) | (frozenset() if submit.ignore_eos else ends),
            hit=hit,
            reused=memory.frontier,
            admitted_at=now,
            session=submit.session,
            boundary=submit.stable_boundary if submit.session else 0,
            system_boundary=submit.system_boundary,
            imaged=memory.frontier,
            stop_strings=self._stop_strings(submit),
            thinking=ThinkingLimit(submit.thinking) if submit.thinking is not None else None,
            spans=spans_of(submit.media),
            rope_delta=rope_delta(submit.media),
        )

    def _stop_strings(self, submit: Submit) -> StopStrings | None:
        if not submit.stop_strings:
            return None
        return StopStrings(
            submit.stop_strings,
            self._models.tokenizer.bytes_of,
            include=submit.include_stop_string,
            min_tokens=submit.sampling.min_tokens,
        )

    def share(self, lane: Lane, over: Container[str]) -> None:
        """Keeps the state of a prompt that has just been prefilled for the turns that follow, but not for those that
        are `over`. It never makes room for it: a turn that finds none prefills."""
        for turn in lane.submit.followers:
            if turn in over or self._sessions.parked(turn) is not None:
                continue
            try:
                self._sessions.park(turn, self._captured(lane, "prompt", "turn_start"), private=lane.private)
            except Exception as error:  # also that of a device
                logger.info("a prompt will be prefilled again: %s", error)
                return

    def suspend(self, lane: Lane) -> None:
        """Takes a lane's memory away. Its draft context must have caught up."""
        if lane.frontier:
            form = "prompt" if lane.prefilling else "decode"
            try:
                self._sessions.park(lane.submit.turn, self._captured(lane, form, "turn_end"), private=lane.private)
            except Exception as error:  # also that of a device: the ledger is enough
                logger.info("a suspended turn will be replayed: %s", error)
        # what was captured already is not captured again
        lane.boundary = lane.boundary if lane.boundary > lane.frontier else 0
        lane.system_boundary = lane.system_boundary if lane.system_boundary > lane.frontier else 0
        lane.pending = 0
        lane.suspended = True
        self._memory.close(lane.memory)

    def _captured(self, lane: Lane, form: Form, kind: CheckpointKind) -> Checkpoint:
        ledger = lane.ledger[: lane.frontier + (form == "decode")]
        return self._memory.capture(lane.memory, ledger, form, kind, media=lane.submit.media)

    def resume(self, lane: Lane, row: int, alone: bool, now: float) -> None:
        """Gives a suspended lane memory again. `CapacityError` if there is no room now."""
        submit = lane.submit
        tokens = lane.prompt_tokens + lane.budget
        opened = self._with_room(submit, lane.ledger, lane.reusable, tokens, alone)
        self._sessions.unpark(submit.turn)
        lane.memory, lane.row, lane.suspended, lane.private = opened.memory, row, False, opened.private
        lane.imaged = lane.frontier
        if opened.hit is not None and not lane.begun:
            lane.hit, lane.reused = opened.hit, lane.frontier  # nothing was told yet: its prompt begins anew
        if not lane.begun and submit.resumed is not None:
            lane.admitted_at = now

    def shortage(self, error: CapacityError, submit: Submit) -> Shortage:
        """What is missing beyond all that could be evicted for this turn."""
        source = self._source(submit, submit.prompt_ids)
        can_evict = self._sessions.evictable(error.pool, submit.session, submit.turn, source)
        return Shortage(error.pool, max(1, error.wanted - error.free - can_evict), self._sessions.changes)

    def still_short(self, shortage: Shortage | None) -> bool:
        """Whether a turn that lacked memory lacks it still: nothing was freed, and nothing came that it could share."""
        return shortage is not None and shortage.changes == self._sessions.changes

    def holding(self, lane: Lane) -> Holding:
        """What a lane would give back."""
        held = {LANES: 1, self._memory.images.name: 1, self._memory.target.name: len(lane.memory.pages)}
        if self._memory.draft:
            held[self._memory.draft.name] = len(lane.memory.draft_pages)
        return held

    def _with_room(self, submit: Submit, ledger: Sequence[int], reach: int, tokens: int, alone: bool) -> _Opened:
        take = partial(self._restore, submit, ledger, reach, tokens)
        try:
            # the checkpoint to go on from is not evicted for the turn that waits for it
            source = self._source(submit, ledger[: reach + 1])
            opened = self._sessions.with_room(take, keep=submit.session, turn=submit.turn, source=source)
        except CapacityError:
            if not alone:
                raise
            opened = self._sessions.with_room(take, keep=None)
        if submit.session and opened.hit is not None:
            self._sessions.settle(submit.session)
        return opened

    def _restore(self, submit: Submit, ledger: Sequence[int], reach: int, tokens: int) -> _Opened:
        """Memory that stands at a prefix of `ledger`, of at most `reach` tokens. `CapacityError`.

        A checkpoint that is not whole is a miss: it is released, and the next deepest is tried.
        """
        own = self._sessions.parked(submit.turn)
        if own is not None and own.frontier <= reach:
            try:
                private = self._sessions.is_parked_private(submit.turn)
                return _Opened(self._memory.restore(own, tokens), None, private)
            except CoverageError as error:
                logger.warning("a suspended turn is replayed: %s", error)
                self._sessions.unpark(submit.turn)
        reachable = ledger[: reach + 1]
        private = submit.session is not None and self._sessions.is_private(submit.session)
        while (found := self._deepest(submit, reachable)) is not None:
            checkpoint, hit = found
            try:
                return _Opened(self._memory.restore(checkpoint, tokens), hit, private)
            except CoverageError as error:
                logger.warning("a checkpoint is not used: %s", error)
                self._sessions.discard(checkpoint)
        return _Opened(self._memory.open(tokens), "none", private)

    def _source(self, submit: Submit, ledger: Sequence[int]) -> Checkpoint | None:
        found = self._deepest(submit, ledger)
        return found[0] if found is not None else None

    def _deepest(self, submit: Submit, ledger: Sequence[int]) -> tuple[Checkpoint, Hit] | None:
        return self._sessions.deepest_prefix(submit.session, ledger, submit.tenant, submit.media)
