"""One turn while it runs. It belongs to the replica, not to the request: a client that leaves does not tear it down
in the middle of a commit, and whatever was committed is in the session afterwards."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from deployment.engine import errors as engine_errors
from deployment.engine.errors import EngineError
from deployment.engine.messages import Cancel, Captured, Failed, Finished, Started, Submit, TokenLogprob, Tokens
from deployment.engine.service import EngineService
from deployment.errors import Refused, RequestError, of_engine
from deployment.keeper import SessionKeeper
from deployment.session import Session
from deployment.turn_records import turn_record
from deployment.turns import Prompt, TurnText
from deployment.wire import Closed, Delta, Opened, SessionFacts, TokenFact, TurnEvent, TurnRequest

log = logging.getLogger("ray.serve")


class RunningTurn:
    """Pumps the engine's events of one turn into `events`, whose last item is a Closed or a Refused."""

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
        done: Callable[[RunningTurn], None],
        events: asyncio.Queue[TurnEvent] | None = None,
    ) -> None:
        """`events`: the queue of all choices of a request."""
        self.id = submit.turn
        self.abandoned = False
        self.events: asyncio.Queue[TurnEvent] = asyncio.Queue() if events is None else events
        self._choice = submit.sampling.sub
        self._replica = replica
        self._model = model
        self._request = request
        self._submit = submit
        self._prompt = prompt
        self._session = session
        self._service = service
        self._keeper = keeper
        self._text = TurnText(service.tokenizer, prompt.ids[prompt.stable_boundary :])
        self._started: Started | None = None
        self._start_copy: asyncio.Task[None] | None = None
        self._done = done
        if session is not None:
            session.running = self
        self._task = asyncio.create_task(self._run())

    def leave(self) -> None:
        """The reader is gone. The turn ends at its next commit boundary."""
        if not self._task.done():
            self.abandoned = True
            self._service.send(Cancel(self.id))

    async def ended(self) -> None:
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        last: TurnEvent
        try:
            last = await self._pump()
        except RequestError as error:
            last = error.refused
        except EngineError as error:
            last = of_engine(error.code, error.message, error.param)
        except Exception:
            log.exception("turn %s failed", self.id)
            last = Refused(500, engine_errors.INTERNAL_ERROR, "the server failed on this turn; its log says why")
        finally:
            if self._session is not None:
                self._session.running = None
            self._done(self)
        self.events.put_nowait(last)

    async def _pump(self) -> TurnEvent:
        async for event in self._service.turn(self._submit):
            match event:
                case Started():
                    self._started = event
                    self.events.put_nowait(self._opened(event))
                case Tokens():
                    self._say(*self._text.push(event.token_ids, event.text_cut), event.logprobs)
                case Captured(kind="turn_start") if self._session is not None:
                    self._start_copy = asyncio.create_task(self._copy_start(self._session))
                case Finished():
                    closed = await self._finish(event)
                    # Only a cancelled turn ends before it begins: its reader left, or its session was deleted.
                    return closed if self._started else Refused(409, "turn_cancelled", "the turn was cancelled")
                case Failed():
                    await self._fail(event)
                    return of_engine(event.code, event.message, event.param)
                case _:
                    pass
        return Refused(500, engine_errors.INTERNAL_ERROR, "the engine ended this turn without a word")

    async def _copy_start(self, session: Session) -> None:
        """In the background: a turn does not wait for the copy of its own beginning. A fence shows at its end."""
        try:
            await self._keeper.copy(session)
        except (RequestError, EngineError) as error:
            log.warning("no Host replica of the start of turn %s: %s", self.id, error)

    async def _fail(self, failed: Failed) -> None:
        """What was published stays, as of a cancelled turn; why the turn failed matters more than a missing copy."""
        self._say(*self._text.flush())
        if self._session is not None:
            try:
                await self._settle(self._session, failed.committed)
            except (RequestError, EngineError) as error:
                log.warning("no Host replica of the failed turn %s: %s", self.id, error)

    async def _settle(self, session: Session, ended: Finished | None) -> None:
        """Books what the turn committed, and copies it; a session that a turn made and left empty goes with it."""
        if self._start_copy is not None:
            await self._start_copy
        if ended is not None and (ended.token_ids or ended.hidden_ids):
            self._commit(session, ended)
            await self._keeper.copy(session)
        elif not session.turns and not session.lost:
            await self._keeper.abandon(session)

    async def _finish(self, finished: Finished) -> Closed:
        self._say(*self._text.flush())
        if self._session is not None:
            await self._settle(self._session, finished)
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
        )

    def _stop_reason(self, finished: Finished) -> str | int | None:
        if finished.stop_id in self._request.stop_token_ids:
            return finished.stop_id
        return finished.stop_string

    def _commit(self, session: Session, finished: Finished) -> None:
        session.ledger = (*self._prompt.ids, *finished.token_ids, *finished.hidden_ids)
        session.opener = self._prompt.stable_boundary
        session.frontier = finished.frontier
        session.lost = False
        before = session.transcript if self._request.mode == "append" else []
        session.transcript = [*before, *self._request.messages, self._text.message]
        session.foreign = None
        seed = self._submit.sampling.seed
        session.turns.append(turn_record(self._request, self._replica, self.id, seed, self._started, finished))

    def _opened(self, started: Started) -> Opened:
        return Opened(
            replica=self._replica,
            model=self._model,
            seed=self._submit.sampling.seed,
            prompt_tokens=len(self._prompt.ids),
            reused=started.reused,
            session=self._facts(started, None),
        )

    def _facts(self, started: Started, frontier: int | None) -> SessionFacts | None:
        if self._session is None:
            return None
        return SessionFacts(
            id=self._session.key.session,
            epoch=str(self._session.epoch),
            hit=started.hit,
            reused=started.reused,
            prefilled=started.prefilled,
            frontier=frontier,
        )

    def _say(self, reasoning: str, content: str, logprobs: tuple[TokenLogprob, ...] = ()) -> None:
        if reasoning or content or logprobs:
            facts = tuple(self._fact(entry) for entry in logprobs)
            self.events.put_nowait(Delta(reasoning, content, self._choice, facts))

    def _fact(self, entry: TokenLogprob) -> TokenFact:
        data = self._service.tokenizer.spelled
        return TokenFact(data(entry.token), entry.logprob, tuple((data(token), value) for token, value in entry.top))
