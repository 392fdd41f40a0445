"""One choice of a turn while it runs. It belongs to the replica, not to the request: a client that leaves does not tear
it down in the middle of a commit, and whatever was committed is in the session afterwards."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from deployment.engine import errors as engine_errors
from deployment.engine.errors import EngineError
from deployment.engine.messages import Cancel, Captured, Failed, Finished, Started, Submit, TokenLogprob, Tokens
from deployment.engine.service import EngineService
from deployment.errors import Refused, RequestError, of_engine
from deployment.keeper import SessionKeeper
from deployment.session import Session
from deployment.turn_records import turn_record
from deployment.turn_stream import TurnStream
from deployment.turns import Prompt, TurnText
from deployment.wire import Closed, Delta, Opened, SessionFacts, TokenFact, TurnEvent, TurnRequest

log = logging.getLogger("ray.serve")


class TurnLog(Protocol):
    """Where a turn's rounds are written before anybody is told of them."""

    async def committed(self, tokens: Tokens) -> None:
        """Returns once every copy of the log has the round."""
        ...


class NoLog:
    """For a turn that dies with its replica."""

    async def committed(self, tokens: Tokens) -> None:
        pass


class RunningTurn:
    """One choice of a request: pumps the engine's events into `stream`, ending with a Closed or a Refused."""

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
        done: Callable[[], None],
        turn_log: TurnLog | None = None,
    ) -> None:
        """`stream`: that of all choices of the request. `done` is called when this one is over."""
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
        self._text = TurnText(service.tokenizer, prompt.opener)
        self._created = int(time.time())
        self._started: Started | None = None
        self._start_copy: asyncio.Task[None] | None = None
        self._done = done
        self._task = asyncio.create_task(self._run())

    def cancel(self) -> None:
        """Ends the turn at its next commit boundary."""
        if not self._task.done():
            self._service.send(Cancel(self._submit.turn))

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
            log.exception("turn %s failed", self._submit.turn)
            last = Refused(500, engine_errors.INTERNAL_ERROR, "the server failed on this turn; its log says why")
        # Before anybody hears of the end, since the next turn may follow at once.
        if self._session is not None:
            self._session.running = None
        self._stream.publish(last)
        self._done()

    async def _pump(self) -> TurnEvent:
        async for event in self._service.turn(self._submit):
            match event:
                case Started():
                    self._started = event
                    self._stream.publish(self._opened(event))
                case Tokens():
                    await self._log.committed(event)
                    self._stream.publish(self._delta(event))
                case Captured(kind="turn_start") if self._session is not None:
                    self._start_copy = asyncio.create_task(self._copy_start(self._session))
                case Finished():
                    closed = await self._finish(event)
                    # Only a cancelled turn ends before it begins: its reader left, or its session was deleted.
                    return closed if self._started else Refused(409, "turn_cancelled", "the turn was cancelled")
                case Failed():
                    await self._keep_of_failed(event)
                    return of_engine(event.code, event.message, event.param)
                case _:
                    pass
        return Refused(500, engine_errors.INTERNAL_ERROR, "the engine ended this turn without a word")

    async def _copy_start(self, session: Session) -> None:
        """In the background: a turn does not wait for the copy of its own beginning. A fence shows at its end."""
        try:
            await self._keeper.copy(session)
        except (RequestError, EngineError) as error:
            log.warning("no Host replica of the start of turn %s: %s", self._submit.turn, error)

    async def _keep_of_failed(self, failed: Failed) -> None:
        """What was published stays, as of a cancelled turn; why the turn failed matters more than a missing copy."""
        if self._session is not None:
            try:
                await self._settle(self._session, failed.committed)
            except (RequestError, EngineError) as error:
                log.warning("no Host replica of the failed turn %s: %s", self._submit.turn, error)

    async def _settle(self, session: Session, ended: Finished | None) -> None:
        """Books what the turn committed, and copies it; a session that a turn made and left empty goes with it."""
        if self._start_copy is not None:
            await self._start_copy
        if ended is not None and (ended.token_ids or ended.hidden_ids):
            self._commit(session, ended)
            await self._keeper.copy(session)
        elif not session.turns and not session.lost and not session.created:
            await self._keeper.abandon(session)

    async def _finish(self, finished: Finished) -> Closed:
        reasoning, content = self._text.flush()
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
            reasoning=reasoning,
            content=content,
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
        turn = self._request.turn
        session.turns.append(turn_record(self._request, self._replica, turn, seed, self._started, finished))

    def _opened(self, started: Started) -> Opened:
        return Opened(
            replica=self._replica,
            model=self._model,
            seed=self._submit.sampling.seed,
            prompt_tokens=len(self._prompt.ids),
            reused=started.reused,
            session=self._facts(started, None),
            turn=self._request.turn,
            choices=self._request.n,
            created=self._created,
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

    def _delta(self, tokens: Tokens) -> Delta:
        reasoning, content = self._text.push(tokens.token_ids, tokens.text_cut)
        facts = tuple(self._fact(entry) for entry in tokens.logprobs)
        position = tokens.start + len(tokens.token_ids)
        return Delta(reasoning, content, self._choice, facts, tokens.token_ids, position, tokens.text_cut)

    def _fact(self, entry: TokenLogprob) -> TokenFact:
        data = self._service.tokenizer.spelled
        return TokenFact(data(entry.token), entry.logprob, tuple((data(token), value) for token, value in entry.top))
