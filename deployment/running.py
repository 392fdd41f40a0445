"""One choice of a turn while it runs. It belongs to the replica, not to the request: a client that leaves does not tear
it down in the middle of a commit, and whatever was committed is in the session afterwards.

It may begin in the middle: what it had committed elsewhere is told again, and the engine goes on after it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from deployment.answer_text import told_in_all, turn_text
from deployment.cluster.not_owned import NotOwned
from deployment.engine import errors as engine_errors
from deployment.engine.commands import Cancel, Submit, Suspend, TokenLogprob
from deployment.engine.errors import EngineError
from deployment.engine.events import Captured, Failed, Finished, PromptLogprobs, Round, Started, Suspended, Tokens
from deployment.engine.service import EngineService
from deployment.errors import TURN_CANCELLED, Refused, RequestError, of_engine
from deployment.keeper import SessionKeeper
from deployment.parsing.turn_text import Said
from deployment.session import Session
from deployment.session_log import Course
from deployment.turn_log import NoLog, SessionTurnLog, TurnLog
from deployment.turn_records import turn_record
from deployment.turn_stream import TurnStream
from deployment.turns import Prompt
from deployment.wire import Closed, Delta, Moved, Opened, SessionFacts, TokenFact, TurnEvent, TurnRequest

log = logging.getLogger("ray.serve")


@dataclass
class Beside:
    """The choices of one turn. `running`: those that are not over; the last of them leaves the turn in its session.
    `said`: books it there as one of them went."""

    running: int = 1
    said: dict[int, Callable[[], None]] = field(default_factory=dict)


class RunningTurn:
    """One choice of a request: pumps the engine's events into `stream`, ending with a Closed, a Refused or a Moved."""

    def __init__(
        self,
        replica: str,
        model: str,
        request: TurnRequest,
        submit: Submit,
        prompt: Prompt,
        session: Session | None,
        service: EngineService,
        keeper: SessionKeeper,
        stream: TurnStream,
        done: Callable[[TurnEvent], None],
        turn_log: TurnLog | None = None,
        course: Course | None = None,
        over: Finished | None = None,
        beside: Beside | None = None,
    ) -> None:
        """`stream`: that of all choices of the request. `done` is called with this one's last event. `course`: how it
        went before, elsewhere. `over`: how it ended there, so that it is only told. `beside`: None of a single one."""
        self._choice = submit.sampling.sub
        self._replica = replica
        self._model = model
        self._request = request
        self._submit = submit
        self._prompt = prompt
        self._session = session
        self._service = service
        self._keeper = keeper
        self._stream = stream
        self._log: TurnLog = NoLog() if turn_log is None else turn_log
        self._course = Course() if course is None else course
        self._over = over
        self._beside = Beside() if beside is None else beside
        self._cancelled = self._gone = False
        self._untold: list[Round] = []
        self._scores: list[TokenLogprob] = []
        self._published = 0
        self._text = turn_text(service.tokenizer, request, prompt, self._choice)
        self._created = int(time.time())
        self._started: Started | None = None
        self._start_copy: asyncio.Task[None] | None = None
        self._done = done
        self._elsewhere: asyncio.Future[Moved | None] | None = None
        self._suspended = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def cancel(self) -> None:
        """Ends the turn at its next commit boundary; one that is suspended, once it goes on here."""
        self._cancelled = True
        if not self._task.done() and self._over is None:
            self._service.send(Cancel(self._submit.turn))

    async def ended(self) -> None:
        await asyncio.wait([self._task])

    @property
    def _named(self) -> dict[str, str]:
        """For its lines in the log."""
        named = {"turn": self._request.turn}
        if self._session is None:
            return named
        return {**named, "session": self._session.key.session, "epoch": str(self._session.epoch)}

    # -------------------------------------------------------------------------------------------- moving

    async def suspend(self) -> None:
        """Stops the turn at its next commit boundary, until `go_on`; all copies of its log have its last round then. It
        may have ended instead. EngineError."""
        self._elsewhere = asyncio.get_running_loop().create_future()
        try:
            await self._service.call(Suspend(secrets.token_hex(8), self._submit.turn))
        except EngineError as error:
            self._elsewhere = None
            if error.code != engine_errors.UNKNOWN_TURN:
                raise
            await self.ended()
            return
        stopped = asyncio.create_task(self._suspended.wait())
        await asyncio.wait([stopped, self._task], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()

    def go_on(self, elsewhere: Moved | None) -> None:
        """After `suspend`: the turn goes on, here (None) or where its session is now."""
        if self._elsewhere is not None and not self._elsewhere.done():
            self._elsewhere.set_result(elsewhere)

    def moved(self) -> None:
        """The session has another owner: nothing that comes now may be logged or told."""
        self._gone = True
        self.go_on(elsewhere=Moved())
        self.cancel()

    # -------------------------------------------------------------------------------------------- running

    async def _run(self) -> None:
        last = await self._last_event()
        # Before anybody hears of the end, since the next turn may follow at once.
        if self._over is None:
            self._beside.running -= 1
        if self._session is not None and self._over is None and not self._beside.running:
            self._session.running = None
        self._stream.publish(last)
        self._done(last)

    async def _last_event(self) -> TurnEvent:
        if self._over is not None:
            return self._retold(self._over)
        try:
            while (last := await self._pump()) is None:
                self._suspended.set()
                elsewhere = await self._elsewhere if self._elsewhere is not None else Moved()
                if elsewhere is not None:
                    return elsewhere
                self._elsewhere = None
                self._suspended.clear()
            return last
        except NotOwned:
            self.cancel()
            return Moved()
        except RequestError as error:
            return error.refused
        except EngineError as error:
            return of_engine(error.code, error.message, error.param)
        except Exception:
            log.exception("turn %s failed", self._submit.turn, extra=self._named)
            return Refused(500, engine_errors.INTERNAL_ERROR, "the server failed on this turn; its log says why")

    async def _pump(self) -> TurnEvent | None:
        """None: the turn was suspended, and everything that it committed is told."""
        submit = self._submit
        if self._course.rounds:
            submit = replace(submit, resumed=self._course.resumed)
        async for event in self._service.turn(submit):
            if self._gone:
                return Moved()
            match event:
                case PromptLogprobs():
                    self._scores.extend(event.logprobs)
                case Started():
                    if self._cancelled:  # before the engine knew the turn, or while it was suspended
                        self.cancel()
                    self._begin(event)
                case Round():
                    self._course.rounds.append(event)
                    self._untold.append(event)
                    self._log.round(event)
                case Tokens():
                    await self._log.told()
                    self._begin_again()
                    self._tell(event.token_ids, event.logprobs, event.text_cut)
                case Captured() if self._session is not None:
                    self._copy_soon(self._session, event)
                case Finished():
                    await self._log.ended(event)
                    self._begin_again()
                    closed = await self._finish(event)
                    # Only a cancelled turn ends before it begins: its reader left, or its session was deleted.
                    return closed if self._started else TURN_CANCELLED
                case Failed():
                    await self._keep_of_failed(event)
                    return of_engine(event.code, event.message, event.param)
                case Suspended():
                    await self._log.told()
                    return None
                case _:
                    pass
        return Refused(500, engine_errors.INTERNAL_ERROR, "the engine ended this turn without a word")

    def _begin_again(self) -> None:
        """A turn of which nothing is left to be drawn does not start once more."""
        if self._started is None and self._course.rounds:
            self._begin(Started(self._submit.turn, "none", 0, len(self._prompt.ids)))

    def _begin(self, started: Started) -> None:
        """The first event of the stream; and of a turn that has run elsewhere, all that was told there."""
        if self._started is not None:
            return  # it was suspended, and stayed
        self._started = started
        self._stream.publish(self._opened(started))
        ids = self._course.token_ids
        logprobs = [entry for one in self._course.rounds for entry in one.logprobs]
        for rounds, published in self._course.told():
            self._untold = list(rounds)
            new = slice(self._published, published)
            whole = self._over is not None and published == len(self._over.token_ids)
            self._tell(ids[new], logprobs[new], self._over.text_cut if self._over is not None and whole else 0)

    def _retold(self, over: Finished) -> TurnEvent:
        self._begin(Started(self._submit.turn, "none", 0, len(self._prompt.ids)))
        if self._session is not None and over.token_ids:
            self._beside.said[self._choice] = partial(self._commit, self._session, over)
        if over.finish_reason == "failed":
            return Refused(500, engine_errors.INTERNAL_ERROR, "the turn failed; the log of its server says why")
        return self._closed(over, self._text.flush())

    def _tell(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob], text_cut: int) -> None:
        said = self._text.push(token_ids, text_cut)
        facts = tuple(self._fact(entry) for entry in logprobs)
        self._published += len(token_ids)
        position = len(self._prompt.ids) + self._published
        rounds = () if isinstance(self._log, SessionTurnLog) else tuple(self._untold)
        self._untold = []
        self._stream.publish(
            Delta(
                said.reasoning, said.content, self._choice, facts, tuple(token_ids), position, text_cut, rounds,
                said.calls,
            )
        )  # fmt: skip

    def _copy_soon(self, session: Session, captured: Captured) -> None:
        """In the background: a turn does not wait for the copy of its own beginning, or of its way."""
        on_the_way = captured.frontier > len(self._prompt.ids)
        if captured.kind == "turn_start" or (captured.kind == "tap" and on_the_way):
            self._start_copy = asyncio.create_task(self._copy(session))

    async def _copy(self, session: Session) -> None:
        try:
            await self._keeper.copies.copy(session)
        except (RequestError, EngineError) as error:
            log.warning("no image on the way of turn %s: %s", self._submit.turn, error, extra=self._named)

    # -------------------------------------------------------------------------------------------- the end

    async def _keep_of_failed(self, failed: Failed) -> None:
        """What was published stays, as of a cancelled turn; why the turn failed matters more than a missing copy."""
        ended = failed.committed or Finished(
            self._submit.turn, "failed", (), None, len(self._prompt.ids), 0, (), 0.0, 0.0
        )
        await self._log.ended(ended)
        if self._session is not None:
            await self._settle(self._session, ended)

    async def _settle(self, session: Session, ended: Finished) -> None:
        """Books what the turn committed, and copies it; a session that a turn made and left empty goes with it. Of
        several choices the first one that said anything is booked, since nothing goes on from them. The log has all of
        the turn by now: it ended as it did, also where there is no copy."""
        if self._start_copy is not None:
            await self._start_copy
        said = self._beside.said
        if ended.token_ids or ended.hidden_ids:
            said[self._choice] = partial(self._commit, session, ended)
        if self._beside.running > 1:
            return
        try:
            if said:
                said[min(said)]()
                await self._keeper.copies.turn_ended(session)
            elif not session.turns and not session.created:
                await self._keeper.ending.abandon(session)
        except (RequestError, EngineError) as error:
            log.warning("no image of turn %s, which is over: %s", self._submit.turn, error, extra=self._named)

    async def _finish(self, finished: Finished) -> Closed:
        rest = self._text.flush()
        if self._session is not None:
            await self._settle(self._session, finished)
        return self._closed(finished, rest)

    def _closed(self, finished: Finished, rest: Said) -> Closed:
        """`rest`: what waited for the end."""
        facts = self._facts(self._started, finished.frontier) if self._started else None
        return Closed(
            finish_reason=finished.finish_reason,
            completion_tokens=len(finished.token_ids),
            rounds=finished.rounds,
            acceptance_length=finished.acceptance_length,
            seconds=finished.seconds,
            session=facts,
            choice=self._choice,
            stop_reason=self._stop_reason(finished),
            reasoning=rest.reasoning,
            content=rest.content,
            calls=len(self._text.calls),
            reasoning_tokens=self._text.reasoning_tokens,
        )

    def _stop_reason(self, finished: Finished) -> str | int | None:
        if finished.stop_id in self._request.stop_token_ids:
            return finished.stop_id
        return finished.stop_string

    def _commit(self, session: Session, finished: Finished) -> None:
        seed, turn = self._submit.sampling.seed, self._request.turn
        record = turn_record(self._request, self._replica, turn, seed, self._started, finished, time.time())
        session.book(self._prompt, finished, told_in_all(self._request, self._text), record)

    # -------------------------------------------------------------------------------------------- what is told

    def _opened(self, started: Started) -> Opened:
        return Opened(
            replica=self._replica,
            model=self._model,
            seed=self._submit.sampling.seed,
            prompt_tokens=len(self._prompt.ids),
            reused=min(started.reused, len(self._prompt.ids)),
            session=self._facts(started, None),
            turn=self._request.turn,
            choices=self._request.n,
            created=self._created,
            echo=self._echo() if self._request.echo else (),
        )

    def _echo(self) -> tuple[TokenFact, ...]:
        first, *others = (TokenFact(self._service.tokenizer.spelled(token), None, ()) for token in self._prompt.ids)
        return (first, *(map(self._fact, self._scores) if self._scores else others))

    def _facts(self, started: Started, frontier: int | None) -> SessionFacts | None:
        if self._session is None or self._session.keyed:
            return None
        return SessionFacts(
            id=self._session.key.session,
            epoch=str(self._session.epoch),
            hit=started.hit,
            reused=started.reused,
            prefilled=started.prefilled,
            frontier=frontier,
        )

    def _fact(self, entry: TokenLogprob) -> TokenFact:
        data = self._service.tokenizer.spelled
        return TokenFact(data(entry.token), entry.logprob, tuple((data(token), value) for token, value in entry.top))
