"""How does a turn begin here, or turn out to have begun before? One desk a replica.

repeated    the turn that the request asks for again is found, here or by its session's records (decision 21)
the session is brought here; a running turn that nobody reads makes way, another one refuses the newcomer
the prompt is rendered; then nothing is awaited any more until the turn runs
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from deployment.answer_text import turn_text
from deployment.cluster.not_owned import NotOwned
from deployment.engine.commands import Grammar, Sampling, Submit
from deployment.engine.events import Finished
from deployment.engine.service import EngineService
from deployment.errors import RequestError, invalid, session_busy, turn_not_kept
from deployment.held_turn import HeldTurn, Later
from deployment.hinted_state import HintedState
from deployment.keeper import SessionKeeper
from deployment.locks import Locks
from deployment.ownership import SessionKey
from deployment.prompting import Prompter
from deployment.running import Beside, RunningTurn
from deployment.session import Session
from deployment.session_log import Course, LoggedTurn, courses_of
from deployment.turn_lines import TurnLines
from deployment.turn_log import SessionTurnLog
from deployment.turn_records import request_sha256
from deployment.turn_stream import TurnStream
from deployment.turn_table import KEPT_SECONDS, REPEAT_SECONDS, TurnTable, check_same
from deployment.turns import Prompt, after_thinking, choices, seed_of, thinking_budget, top_k_of
from deployment.wire import NOTHING, Elsewhere, Route, TurnEvent, TurnRequest, without_media
from model.generation_defaults import GenerationDefaults
from state.errors import FormatError
from state.session_record import TurnRecord


class TurnDesk:
    def __init__(
        self,
        replica: str,
        model: str,
        service: EngineService,
        keeper: SessionKeeper,
        prompter: Prompter,
        table: TurnTable,
        detach_seconds: float,
        later: Later,
        unix: Callable[[], float] = time.time,
        lines: TurnLines | None = None,
    ) -> None:
        """`unix`: seconds since 1970, for tests. `lines`: what the log says of turns; by default no texts."""
        self._replica = replica
        self._model = model
        self._service = service
        self._keeper = keeper
        self._prompter = prompter
        self._table = table
        self._detach_seconds = detach_seconds
        self._later = later
        self._unix = unix
        self._lines = lines or TurnLines()
        self._hinted = HintedState(service)
        self._beginning = Locks()

    async def take(self, route: Route, request: TurnRequest) -> HeldTurn | Elsewhere:
        """The request's turn, running or over. Who gets it must read it before awaiting anything else. RequestError,
        EngineError."""
        if request.resumed:
            return await self._begin(route, request)
        name = request.idempotency_key or request.key
        # Two of the same key must not both find that there is no such turn yet.
        async with self._beginning.of((request.tenant, name)) if name else contextlib.nullcontext():
            known = self._table.repeated(request)
            if known is not None and self._is_its_sessions(known):
                return known
            return await self._begin(route, request)

    async def find(self, route: Route, key: SessionKey, turn: str) -> HeldTurn | Elsewhere:
        """A session's turn. RequestError: 404, or 410 if only its record is left."""
        held = self._table.find(turn, key)
        if held is not None and self._is_its_sessions(held):
            return held
        session, _ = await self._keeper.acquire(key, route.placement, must_exist=True)
        held = self._table.find(turn, key)  # a session that was taken over just now brings its running turn along
        if held is not None and self._is_its_sessions(held):
            return held
        record = next((record for record in session.turns if record.id == turn), None)
        if record is None:
            message = f"session {key.session!r} has no turn {turn!r}"
            raise RequestError(404, "turn_not_found", message, "turn")
        return self._recorded(key, record)

    def _is_its_sessions(self, held: HeldTurn) -> bool:
        """A turn that is over may be one of a session that was deleted since, and whose name another one has now."""
        key = held.request.key
        if key is None or held.ended_at is None:
            return True
        session = self._keeper.held(key)
        return session is not None and any(record.id == held.id for record in session.turns)

    def _recorded(self, key: SessionKey, record: TurnRecord) -> HeldTurn | Elsewhere:
        """The turn of a record, or who has it. RequestError (410) if nobody does any more."""
        held = self._table.find(record.id, key)
        if held is not None:
            return held
        if record.replica == self._replica:
            raise turn_not_kept(record.id)
        return Elsewhere(record.replica, record.id)

    async def _begin(self, route: Route, request: TurnRequest) -> HeldTurn | Elsewhere:
        prompt = None
        if not request.needs_its_session:
            # Before the session is touched: a prompt that cannot be served must not create one.
            prompt = await self._prompter.alone(request)
            request = without_media(request)
            if request.key is None:
                return await self._run(request, prompt, None)
        session = await self._session(route, request)
        if isinstance(session, HeldTurn | Elsewhere):
            return session
        ledger = session.ledger
        if request.mode == "append":
            prompt = await self._prompter.appended(request, session)
        elif prompt is None:
            prompt = await self._prompter.alone(request, session)
        if request.mode == "history":
            prompt = await self._prompter.in_session(prompt, session)
        request = without_media(request)
        if self._keeper.held(session.key) is not session or not session.free or session.ledger is not ledger:
            raise session_busy(session.key.session, "another request came first")
        return await self._run(request, prompt, session)

    async def _session(self, route: Route, request: TurnRequest) -> Session | HeldTurn | Elsewhere:
        """The request's session, owned by this replica and free for a turn; or the turn itself, if its records have it
        under the request's key, or if it runs already, since its ingress has lost sight of it. RequestError (409) if it
        is not free; `OwnedElsewhere`."""
        if request.key is None:
            raise invalid("an append turn needs a session", "session")
        must_exist = request.must_exist or request.mode == "append"
        while True:
            session, _ = await self._keeper.acquire(
                request.key,
                route.placement,
                must_exist=must_exist,
                anew=request.mode == "history",
                accept_durable=request.accept_durable,
                alone=request.store is False,
            )
            _check_stored(request, session)
            # A session that was taken over just now brings its turn along, which may be this one, asked for again.
            held = self._table.find(request.turn, request.key) or self._table.repeated(request)
            if held is not None and self._is_its_sessions(held):
                return held
            if (known := self._recorded_before(session, request)) is not None:
                return known
            _check_newest(request, session)  # who comes too late to go on here ends nothing
            running = session.running
            if running is not None and running.left:
                running.cancel()
            if not await session.idle():
                raise session_busy(request.key.session, _what_runs(session))
            # A turn whose end was waited for takes its session along if it never committed anything.
            if self._keeper.held(request.key) is session:
                return session

    def _recorded_before(self, session: Session, request: TurnRequest) -> HeldTurn | Elsewhere | None:
        """The turn that the request asks for again, by the session's records: that with its key, or for a retry without
        one, that with the same body; or the turn itself, whose ingress has not heard that it began before its replica
        died."""
        same = request_sha256(request) if request.repeated and request.idempotency_key is None else None
        now = self._unix()
        since = now - REPEAT_SECONDS
        for record in reversed(session.turns):
            key_is_free = record.ended_at + KEPT_SECONDS < now
            if session.keyed and key_is_free:
                return None  # nobody has taken it away yet
            if record.id == request.turn or (record.request_sha256 == same and record.ended_at >= since):
                return self._recorded(session.key, record)
            key = request.idempotency_key
            if key is not None and record.idempotency_key == key and not key_is_free:
                check_same(request, record.request_sha256, session.key, record.id)
                return self._recorded(session.key, record)
        return None

    async def _run(self, request: TurnRequest, prompt: Prompt, session: Session | None) -> HeldTurn:
        engine_id = _engine_id(session)
        if engine_id is None and request.hint is not None:
            engine_id = await self._hinted.engine_id(request.tenant, request.hint)
        return self.start(request, prompt, session, engine_id)

    def start(
        self,
        request: TurnRequest,
        prompt: Prompt,
        session: Session | None,
        engine_id: str | None = None,
    ) -> HeldTurn:
        """A turn that runs, its choices side by side. `engine_id`: where the engine keeps their state. RequestError:
        503 if its session is another replica's by now, 400 for what no log can hold."""
        seed = seed_of(request.seed) if request.draws is None else request.draws
        turn_log: SessionTurnLog | None = None
        if session is not None:
            try:
                turn_log = SessionTurnLog.begin(self._keeper, session, request, prompt, seed)
            except NotOwned:
                what = f"session {session.key.session!r} was moved or deleted while this turn was about to begin"
                raise RequestError(409, "session_moved", f"{what}; ask again", "session") from None
            except FormatError as error:
                raise invalid(f"the request cannot be kept in its session's log: {error}") from None
        submit = self._submit(request, prompt, engine_id, seed)
        return self._hold(request, prompt, session, submit, turn_log, courses_of(request.resumed))

    def resume(self, session: Session, logged: LoggedTurn) -> None:
        """The newest turn that a session's log tells: it goes on, or is told as it went. One that was over before its
        first token leaves nothing to be told."""
        request, prompt, began = logged.request(session.key), logged.prompt(session.media), logged.began
        over = [logged.finished(choice) for choice in logged.choices]
        said = any(one.token_ids for one in over if one is not None)
        if logged.over and (not said or self._table.find(request.turn, session.key) is not None):
            return
        turn_log = SessionTurnLog(self._keeper, session, request.turn, began.order.sequence)
        submit = self._submit(request, prompt, _engine_id(session), began.seed)
        courses = [logged.course(choice) for choice in logged.choices]
        self._hold(request, prompt, session, submit, turn_log, courses, over)

    def _hold(
        self,
        request: TurnRequest,
        prompt: Prompt,
        session: Session | None,
        submit: Submit,
        turn_log: SessionTurnLog | None,
        courses: Sequence[Course],
        over: Sequence[Finished | None] = (),
    ) -> HeldTurn:
        """`courses`: how each choice went before; `over`: how those ended that did."""
        tokenizer = self._service.tokenizer
        stream = TurnStream(request.turn, request.n, len(prompt.ids), partial(turn_text, tokenizer, request, prompt))
        held = HeldTurn(request, stream, self._detach_seconds if request.outlives_its_reader else 0.0, self._later)
        courses = courses or [Course() for _ in range(request.n)]
        over = over or [None] * request.n
        beside = Beside(running=over.count(None))
        held.run(
            RunningTurn(
                self._replica, self._model, request, choice, prompt, session, self._service, self._keeper, stream,
                partial(self._ended, held, session, choice.sampling.sub, end),
                turn_log and turn_log.of(choice.sampling.sub), course, end, beside,
            )
            for choice, course, end in zip(choices(submit, request.n), courses, over, strict=True)
        )  # fmt: skip
        if session is not None and beside.running:
            session.running = held
            self._keeper.copies.turn_began(session)
        ends = [course.ended.at for course in courses if course.ended is not None]
        self._table.add(held, max(0.0, self._unix() - max(ends)) if ends and not beside.running else None)
        return held

    def _ended(
        self, held: HeldTurn, session: Session | None, choice: int, over: Finished | None, last: TurnEvent
    ) -> None:
        """One of its choices is over. `over`: it was before, elsewhere."""
        if over is None:
            self._lines.ended(held, choice, session, last)
        if held.stream.over:
            held.over()
            self._table.ended(held)

    def _submit(self, request: TurnRequest, prompt: Prompt, engine_id: str | None, seed: int) -> Submit:
        return Submit(
            turn=request.turn,
            prompt_ids=prompt.ids,
            media=prompt.media,
            sampling=_sampling(request, self._service.generation_defaults, seed),
            max_tokens=request.max_tokens,
            stop_ids=request.stop_token_ids,
            ignore_eos=request.ignore_eos,
            session=engine_id,
            stable_boundary=prompt.stable_boundary if engine_id and request.mode != "prompt" else 0,
            system_boundary=prompt.system_boundary,
            drafting=request.drafting,
            tenant=request.tenant,
            priority=request.priority,
            queue_seconds=request.queue_seconds,
            stop_strings=request.stop,
            include_stop_string=request.include_stop,
            thinking=thinking_budget(self._service.tokenizer, prompt, request.thinking_budget),
            grammar=after_thinking(self._service.tokenizer, prompt.opener, _grammar(request)),
        )


def _sampling(request: TurnRequest, defaults: GenerationDefaults, seed: int) -> Sampling:
    """How its tokens are chosen: what the request does not say is as the model's makers have it (decision 12)."""

    def chosen(name: str) -> Any:
        given = getattr(request, name)
        return getattr(defaults, name) if given is None else given

    return Sampling(
        temperature=chosen("temperature"),
        top_k=top_k_of(chosen("top_k")),
        top_p=chosen("top_p"),
        seed=seed,
        min_p=chosen("min_p"),
        repetition_penalty=chosen("repetition_penalty"),
        presence_penalty=chosen("presence_penalty"),
        frequency_penalty=chosen("frequency_penalty"),
        logit_bias=request.logit_bias,
        min_tokens=request.min_tokens,
        reproducible=request.reproducible,
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if request.echo else None,
        logprobs_mode=request.logprobs_mode,
    )


def _check_stored(request: TurnRequest, session: Session) -> None:
    """Where a session is kept is said when it is made: what lies elsewhere already cannot be taken back."""
    stored = not session.alone
    if request.store not in (None, stored):
        how = "is kept on disk and on a second node, where there are any" if stored else "was made with store: false"
        message = f"store: {str(request.store).lower()}, but session {session.key.session!r} {how}"
        raise RequestError(409, "session_kept_otherwise", message, "store")


def _engine_id(session: Session | None) -> str | None:
    """Where the engine keeps the state of a turn's session; None: it keeps none."""
    return None if session is None or session.keyed else session.engine_id


def _check_newest(request: TurnRequest, session: Session | None) -> None:
    """RequestError (409) if another turn than the one that the request follows is its session's newest by now."""
    if request.follows is None or session is None:
        return
    newest = session.turns[-1].id if session.turns else NOTHING
    if newest != request.follows:
        after = f"after turn {request.follows}" if request.follows else "and has turns"
        message = f"session {session.key.session!r} has gone on {after}"
        raise RequestError(409, "session_moved_on", message, "session")


def _grammar(request: TurnRequest) -> Grammar | None:
    """What the answer must match. A response format binds a turn that may call nothing."""
    return request.grammar or (request.tools.grammar if request.tools is not None else None)


def _what_runs(session: Session) -> str:
    if session.running is None:
        return "it is being moved"
    turn = session.running.id
    return f"turn {turn} is running; GET /v1/sessions/{session.key.session}/turns/{turn}/events follows it"
