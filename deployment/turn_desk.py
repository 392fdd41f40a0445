"""How does a turn begin here, or turn out to have begun before? One desk a replica.

repeated    the turn that the request asks for again is found, here or by its session's records (decision 21)
the session is brought here; a running turn that nobody reads makes way, another one refuses the newcomer
the prompt is rendered; then nothing is awaited any more until the turn runs
"""

from __future__ import annotations

import asyncio
import contextlib

from deployment.engine.messages import Sampling, Submit
from deployment.engine.service import EngineService
from deployment.errors import RequestError, invalid, session_busy, turn_not_kept
from deployment.held_turn import HeldTurn, Later
from deployment.hinted_state import HintedState
from deployment.keeper import SessionKeeper
from deployment.locks import Locks
from deployment.ownership import SessionKey
from deployment.prompting import Prompter
from deployment.running import RunningTurn
from deployment.session import Session
from deployment.turn_stream import TurnStream
from deployment.turn_table import TurnTable, check_same
from deployment.turns import Prompt, TurnText, after_thinking, choices, seed_of, thinking_budget, top_k_of
from deployment.wire import Elsewhere, Route, TurnRequest
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
    ) -> None:
        self._replica = replica
        self._model = model
        self._service = service
        self._keeper = keeper
        self._prompter = prompter
        self._table = table
        self._detach_seconds = detach_seconds
        self._later = later
        self._hinted = HintedState(service)
        self._beginning = Locks()

    async def take(self, route: Route, request: TurnRequest) -> HeldTurn | Elsewhere:
        """The request's turn, running or over. Who gets it must read it before awaiting anything else. RequestError,
        EngineError."""
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
        if record.replica != self._replica:
            return Elsewhere(record.replica, record.id)
        held = self._table.find(record.id, key)
        if held is None:
            raise turn_not_kept(record.id)
        return held

    async def _begin(self, route: Route, request: TurnRequest) -> HeldTurn | Elsewhere:
        if request.mode != "append":
            # Before the session is touched: a prompt that cannot be served must not create one.
            prompt = await asyncio.to_thread(self._prompter.alone, request)
            session = await self._session(route, request) if request.key else None
            if isinstance(session, HeldTurn | Elsewhere):
                return session
            return await self._run(request, prompt, session)
        session = await self._session(route, request)
        if isinstance(session, HeldTurn | Elsewhere):
            return session
        self._keeper.check_found(session)
        ledger = session.ledger
        prompt = await asyncio.to_thread(self._prompter.appended, request, session)
        if self._keeper.held(session.key) is not session or not session.free or session.ledger is not ledger:
            raise session_busy(session.key.session, "another request came first")
        return await self._run(request, prompt, session)

    async def _session(self, route: Route, request: TurnRequest) -> Session | HeldTurn | Elsewhere:
        """The request's session, owned by this replica and free for a turn, or the turn that its records have under
        the request's key. RequestError (409) if it is not free."""
        if request.key is None:
            raise invalid("an append turn needs a session", "session")
        must_exist = request.must_exist or request.mode == "append"
        while True:
            session, _ = await self._keeper.acquire(request.key, route.placement, must_exist=must_exist)
            if (known := self._recorded_key(session, request)) is not None:
                return known
            running = session.running
            if running is not None and running.unread:
                running.cancel()
            if not await self._keeper.idle(session):
                raise session_busy(request.key.session, _what_runs(session))
            # A turn whose end was waited for takes its session along if it never committed anything.
            if self._keeper.held(request.key) is session:
                return session

    def _recorded_key(self, session: Session, request: TurnRequest) -> HeldTurn | Elsewhere | None:
        """The turn with the request's key, by the session's records."""
        if request.idempotency_key is None:
            return None
        for record in reversed(session.turns):
            if record.idempotency_key == request.idempotency_key:
                check_same(request, record.request_sha256, session.key, record.id)
                return self._recorded(session.key, record)
        return None

    async def _run(self, request: TurnRequest, prompt: Prompt, session: Session | None) -> HeldTurn:
        engine_id = session.engine_id if session else None
        if session is None and request.hint is not None:
            engine_id = await self._hinted.engine_id(request.tenant, request.hint)
        return self.start(request, prompt, session, engine_id)

    def start(
        self, request: TurnRequest, prompt: Prompt, session: Session | None, engine_id: str | None = None
    ) -> HeldTurn:
        """A turn that runs, its choices side by side. `engine_id`: where the engine keeps their state."""
        tokenizer = self._service.tokenizer
        stream = TurnStream(request.turn, request.n, len(prompt.ids), lambda: TurnText(tokenizer, prompt.opener))
        held = HeldTurn(request, stream, self._detach_seconds if request.outlives_its_reader else 0.0, self._later)
        held.run(
            RunningTurn(
                self._replica, self._model, request, choice, prompt, session, self._service, self._keeper, stream,
                lambda: self._ended(held),
            )
            for choice in choices(self._submit(request, prompt, engine_id), request.n)
        )  # fmt: skip
        if session is not None:
            session.running = held
        self._table.add(held)
        return held

    def _ended(self, held: HeldTurn) -> None:
        """One of its choices is over."""
        if held.stream.over:
            held.over()
            self._table.ended(held)

    def _submit(self, request: TurnRequest, prompt: Prompt, engine_id: str | None) -> Submit:
        defaults = self._service.generation_defaults
        sampling = Sampling(
            temperature=defaults.temperature if request.temperature is None else request.temperature,
            top_k=top_k_of(defaults.top_k if request.top_k is None else request.top_k),
            top_p=defaults.top_p if request.top_p is None else request.top_p,
            seed=seed_of(request.seed),
            min_p=request.min_p,
            repetition_penalty=request.repetition_penalty,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            logit_bias=request.logit_bias,
            min_tokens=request.min_tokens,
            reproducible=request.reproducible,
            logprobs=request.logprobs,
        )
        return Submit(
            turn=request.turn,
            prompt_ids=prompt.ids,
            sampling=sampling,
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
            grammar=after_thinking(self._service.tokenizer, prompt.opener, request.grammar),
        )


def _what_runs(session: Session) -> str:
    if session.running is None:
        return "it is being moved"
    turn = session.running.id
    return f"turn {turn} is running; GET /v1/sessions/{session.key.session}/turns/{turn}/events follows it"
