"""One engine as a Serve replica: prompts in, text out, and the sessions it owns."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from ray import serve
from ray.exceptions import RayActorError

from deployment.actors import Cluster
from deployment.engine import errors as engine_errors
from deployment.engine.errors import EngineError
from deployment.engine.messages import Facts, Fork, Inspect, Sampling, Submit
from deployment.engine.service import EngineService
from deployment.errors import (
    Refused,
    RequestError,
    invalid,
    of_engine,
    session_busy,
    unknown_session,
)
from deployment.keeper import SessionKeeper
from deployment.ownership import Epoch, Placement, SessionKey
from deployment.running import RunningTurn
from deployment.session import Session
from deployment.settings import AppArgs
from deployment.turn_records import turn_object
from deployment.turns import (
    Prompt,
    after_thinking,
    append,
    choices,
    full_history,
    seed_of,
    think_is_open,
    thinking_budget,
    top_k_of,
)
from deployment.wire import (
    Adopted,
    Closed,
    ExportedSession,
    HandedOver,
    NotHere,
    Opened,
    ReplicaInfo,
    Route,
    SessionInfo,
    TurnEvent,
    TurnRequest,
)
from state.fingerprint import Mismatch

PEER_SECONDS = 10.0

log = logging.getLogger("ray.serve")


class ServePeers:
    """Calls to a named replica of the own deployment. Serve has no such call: the callee checks that it was meant."""

    def __init__(self, deployment: str, app: str) -> None:
        self._handle = serve.get_deployment_handle(deployment, app)

    async def hand_over(self, placement: Placement) -> HandedOver | NotHere | Refused:
        """A dead or silent owner is NotHere: the host stores are asked next."""
        owner = placement.owner or ""
        route = Route(str(placement.key), owner)
        try:
            return await asyncio.wait_for(self._call("hand_over", route, placement), PEER_SECONDS)
        except (RayActorError, TimeoutError) as error:
            log.warning("replica %s did not hand over %s: %r", owner, placement.key, error)
            return NotHere(owner)

    async def release(self, placement: Placement) -> None:
        route = Route(str(placement.key), placement.owner)
        try:
            await asyncio.wait_for(self._call("release", route, placement), PEER_SECONDS)
        except (RayActorError, TimeoutError) as error:
            log.warning("replica %s was not told that %s has moved: %r", placement.owner, placement.key, error)

    async def _call(self, method: str, route: Route, placement: Placement) -> Any:
        return await getattr(self._handle, method).remote(route, placement)


class EngineReplica:
    """A Serve deployment (`deployment/app.py` binds it). Refusals are values, so that no traceback is a user's."""

    def __init__(self, args: AppArgs) -> None:
        context = serve.get_replica_context()
        self._id = context.replica_id.unique_id
        self._model = args.model_id
        self._accept_new_weights = args.accept_new_weights
        self._service = EngineService.start(args.engine_options())
        self._cluster = Cluster(context.app_name, args.host_store_bytes)
        self._cluster.start_host_store()
        self._keeper = SessionKeeper(
            self._id, self._service, self._cluster, ServePeers(context.deployment, context.app_name)
        )
        self._turns: set[RunningTurn] = set()

    async def check_health(self) -> None:
        await self._service.call(Inspect(secrets.token_hex(8)))

    async def __del__(self) -> None:
        # Serve calls this for a replica whose constructor failed, too.
        service: EngineService | None = getattr(self, "_service", None)
        if service is not None:
            service.close()

    # ------------------------------------------------------------------------------------------------ turns

    async def take_turn(self, route: Route, request: TurnRequest) -> AsyncIterator[TurnEvent]:
        """Runs one turn, its choices side by side. Each ends with a Closed, or all of them with a Refused; a caller
        that stops reading cancels them."""
        try:
            turns = await self._begin(route, request)
        except RequestError as error:
            yield error.refused
            return
        except EngineError as error:
            yield of_engine(error.code, error.message, error.param)
            return
        opened, open_choices = False, len(turns)
        try:
            while True:
                event = await turns[0].events.get()
                if isinstance(event, Opened) and opened:
                    continue
                opened = opened or isinstance(event, Opened)
                yield event
                open_choices -= isinstance(event, Closed)
                if isinstance(event, Refused) or not open_choices:
                    return
        finally:
            for turn in turns:
                turn.leave()

    async def _begin(self, route: Route, request: TurnRequest) -> list[RunningTurn]:
        # Long messages take seconds to render and tokenise: other turns' text must not wait for them.
        if request.mode == "history":
            # Before the session is touched: a prompt that cannot be served must not create one.
            prompt = await asyncio.to_thread(self._history_prompt, request)
            session = await self._idle_session(route, request) if request.key else None
            return self._start(request, prompt, session)
        session = await self._idle_session(route, request)
        ledger = self._ledger(session)
        prompt = await asyncio.to_thread(self._append_prompt, request, session)
        if self._keeper.held(session.key) is not session or not session.free or session.ledger is not ledger:
            raise session_busy(session.key.session, "another request came first")
        return self._start(request, prompt, session)

    async def _idle_session(self, route: Route, request: TurnRequest) -> Session:
        """The request's session, owned by this replica and free for a turn. RequestError (409) if it is not."""
        if request.key is None:
            raise invalid("an append turn needs a session", "session")
        must_exist = request.must_exist or request.mode == "append"
        while True:
            session, _ = await self._keeper.acquire(request.key, route.placement, must_exist=must_exist)
            if not await self._keeper.idle(session):
                what = f"turn {session.running.id} is running" if session.running else "it is being moved"
                raise session_busy(request.key.session, what)
            # A turn whose end was waited for takes its session along if it never committed anything.
            if self._keeper.held(request.key) is session:
                return session

    def _history_prompt(self, request: TurnRequest) -> Prompt:
        service = self._service
        try:
            prompt = full_history(
                service.chat_template,
                service.tokenizer,
                request.messages,
                enable_thinking=request.enable_thinking,
                limit=service.context_limit,
            )
        except ValueError as error:
            raise invalid(f"messages: {error}", "messages") from None
        self._check_length(prompt)
        return prompt

    def _ledger(self, session: Session) -> tuple[int, ...]:
        """What an append turn goes on from."""
        self._keeper.check_found(session)
        if not session.ledger:
            raise unknown_session(session.key.session)
        if session.foreign is not None:
            self._check_foreign(session, session.foreign.mismatch)
        return session.ledger

    def _check_foreign(self, session: Session, mismatch: Mismatch) -> None:
        """Decision 23: what an append turn may go on from. RequestError (409) naming the field."""
        if mismatch.matter == "weights" and self._accept_new_weights:
            return
        raise RequestError(
            409,
            engine_errors.FINGERPRINT_MISMATCH,
            f"session {session.key.session!r} was made with {mismatch.field} {mismatch.stored!r}, but "
            f"{mismatch.here!r} is served here; send the full history",
            mismatch.field,
        )

    def _append_prompt(self, request: TurnRequest, session: Session) -> Prompt:
        service = self._service
        try:
            prompt = append(
                service.chat_template,
                service.tokenizer,
                session.ledger,
                request.messages,
                think_is_open=think_is_open(service.tokenizer, session.ledger[session.opener :]),
                enable_thinking=request.enable_thinking,
            )
        except ValueError as error:
            raise invalid(f"messages: {error}", "messages") from None
        self._check_length(prompt)
        return prompt

    def _check_length(self, prompt: Prompt) -> None:
        limit = self._service.context_limit
        if len(prompt.ids) >= limit:
            raise RequestError(
                400,
                engine_errors.CONTEXT_LENGTH_EXCEEDED,
                f"messages: the prompt has {len(prompt.ids)} tokens, but the context limit is {limit} tokens, "
                f"of which at least one must be left for the answer",
                "messages",
            )

    def _start(self, request: TurnRequest, prompt: Prompt, session: Session | None) -> list[RunningTurn]:
        """One running turn a choice; the first of them is the request's own turn."""
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
        submit = Submit(
            turn=request.turn,
            prompt_ids=prompt.ids,
            sampling=sampling,
            max_tokens=request.max_tokens,
            stop_ids=request.stop_token_ids,
            ignore_eos=request.ignore_eos,
            session=session.engine_id if session else None,
            stable_boundary=prompt.stable_boundary if session else 0,
            system_boundary=prompt.system_boundary,
            drafting=request.drafting,
            tenant=request.tenant,
            priority=request.priority,
            queue_seconds=request.queue_seconds,
            stop_strings=request.stop,
            include_stop_string=request.include_stop,
            thinking=thinking_budget(self._service.tokenizer, prompt, request.thinking_budget),
            grammar=after_thinking(self._service.tokenizer, prompt.ids[prompt.stable_boundary :], request.grammar),
        )
        events: asyncio.Queue[TurnEvent] = asyncio.Queue()
        turns = [
            RunningTurn(
                self._id, self._model, request, choice, prompt, session, self._service, self._keeper,
                self._turns.discard, events,
            )
            for choice in choices(submit, request.n)
        ]  # fmt: skip
        self._turns.update(turns)
        return turns

    # ------------------------------------------------------------------------------------------------ sessions

    async def adopt(self, route: Route, key: SessionKey) -> Adopted | NotHere | Refused:
        """Brings an existing session here."""
        if route.replica not in (None, self._id):
            return NotHere(self._id)
        try:
            session, hit = await self._keeper.acquire(key, route.placement, must_exist=True)
        except RequestError as error:
            return error.refused
        return Adopted(self._id, session.epoch, hit, session.frontier)

    async def hand_over(self, route: Route, placement: Placement) -> HandedOver | NotHere | Refused:
        """Gives a session to the replica that asks; `release` follows once that one has it."""
        if route.replica != self._id:
            return NotHere(self._id)
        return await self._keeper.give(placement.key, placement)

    async def release(self, route: Route, placement: Placement) -> None:
        if route.replica == self._id:
            await self._keeper.release(placement.key, placement)

    async def fork(self, route: Route, key: SessionKey, child_key: SessionKey) -> Adopted | Refused:
        """Gives `child_key` all that the session is now. The child lives here, sharing the parent's pages."""
        try:
            session, _ = await self._keeper.acquire(key, route.placement, must_exist=True)
            return await self._fork(session, child_key)
        except RequestError as error:
            return error.refused
        except EngineError as error:
            return of_engine(error.code, error.message, error.param)

    async def _fork(self, session: Session, child_key: SessionKey) -> Adopted | Refused:
        if not await self._keeper.idle(session):
            raise session_busy(session.key.session, "a turn is running; it can be forked between turns")
        self._keeper.check_found(session)
        child = await self._keeper.create(child_key, like=session)
        try:
            await self._fork_state(session, child)
        except (EngineError, RequestError):
            await self._keeper.abandon(child)
            raise
        await self._keeper.copy(child)
        return Adopted(self._id, child.epoch, "device", child.frontier)

    async def _fork_state(self, session: Session, child: Session) -> None:
        fork = Fork(secrets.token_hex(8), session.engine_id, child.engine_id)
        try:
            await self._service.call(fork)
        except EngineError as error:
            if error.code != engine_errors.UNKNOWN_SESSION:
                raise
            # Without state on the device or in a host store, the child is whole by its ledger.
            with contextlib.suppress(RequestError, EngineError):
                await self._keeper.bring_back(session)
                await self._service.call(fork)

    async def export_session(self, route: Route, key: SessionKey) -> ExportedSession | Refused:
        """The session as a document for its client."""
        try:
            session, _ = await self._keeper.acquire(key, route.placement, must_exist=True)
            return ExportedSession(await self._keeper.document(session))
        except RequestError as error:
            return error.refused
        except EngineError as error:
            return of_engine(error.code, error.message, error.param)

    async def import_session(self, route: Route, key: SessionKey, document: np.ndarray) -> Adopted | Refused:
        """A new session, made of a document."""
        try:
            session = await self._keeper.create_imported(key, await asyncio.to_thread(document.tobytes))
        except RequestError as error:
            return error.refused
        except EngineError as error:
            return of_engine(error.code, error.message, error.param)
        return Adopted(self._id, session.epoch, "disk", session.frontier)

    async def delete(self, route: Route, key: SessionKey) -> bool:
        """False if there is no such session. A running turn is cancelled."""
        session = self._keeper.held(key)
        if session is not None:
            if session.running is not None:
                session.running.leave()
                await session.running.ended()
            await self._keeper.forget(session)
        return await self._cluster.delete(key) is not None

    async def session_info(self, route: Route, key: SessionKey) -> SessionInfo | NotHere:
        """What the owner knows; NotHere if that is not this replica."""
        session = self._keeper.held(key)
        if session is None or (route.placement is not None and route.placement.epoch != session.epoch):
            return NotHere(self._id)
        return SessionInfo(
            replica=self._id,
            epoch=session.epoch,
            tokens=len(session.ledger),
            frontier=session.frontier,
            running=session.running.id if session.running else None,
            transcript=tuple(session.transcript),
            turns=tuple(turn_object(turn) for turn in session.turns),
        )

    async def owned(self) -> list[tuple[str, SessionKey, Epoch]]:
        """For a directory that is being rebuilt."""
        return [(self._id, session.key, session.epoch) for session in self._keeper.owned()]

    async def info(self, route: Route | None = None) -> ReplicaInfo:
        answer = await self._service.call(Inspect(secrets.token_hex(8)))
        assert isinstance(answer, Facts)
        return ReplicaInfo(
            replica=self._id,
            pid=os.getpid(),
            node=self._cluster.node,
            model=self._model,
            backend=self._service.options.backend,
            context_limit=self._service.context_limit,
            sessions=len(self._keeper),
            running=len(self._turns),
            engine=answer.facts,
        )
