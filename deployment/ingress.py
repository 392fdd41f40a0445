"""The HTTP interface: OpenAI chat completions, sessions, models, health."""

# No `from __future__ import annotations`: FastAPI could not resolve the strings in a class that Serve pickles by value.

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException

from deployment.actors import Cluster
from deployment.errors import Refused, RequestError, invalid, session_exists, unknown_session
from deployment.openai_format import (
    Choices,
    Completion,
    placement_object,
    replica_object,
    session_details,
    sse,
    sse_error,
)
from deployment.ownership import Placement, SessionKey
from deployment.request_reading import body_of, document_of, session_name, tenant_of, turn_request
from deployment.schemas import ForkBody, MigrateBody, TurnBody, parse
from deployment.settings import AppArgs
from deployment.wire import (
    Adopted,
    Closed,
    Delta,
    Opened,
    ReplicaInfo,
    Route,
    SessionInfo,
    TurnEvent,
    TurnRequest,
)
from state.document import open_document
from state.errors import StateError

ATTEMPTS = 3
"""How often a turn is tried whose replica died before it published anything."""

DOCUMENT_TYPE = "application/vnd.dflash.session"

api = FastAPI(title="dflash-serve", docs_url=None, redoc_url=None)


@api.exception_handler(RequestError)
async def _on_request_error(request: Request, error: RequestError) -> JSONResponse:
    return refusal(error.refused)


@api.exception_handler(HTTPException)
async def _on_http_error(request: Request, error: HTTPException) -> JSONResponse:
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    return refusal(Refused(error.status_code, code, f"{request.method} {request.url.path}: {error.detail}"))


@api.exception_handler(RequestValidationError)
async def _on_validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"][1:])
    return refusal(Refused(400, "invalid_request", f"{param}: {first['msg']}", param))


@api.exception_handler(RayActorError)
async def _on_lost_actor(request: Request, error: RayActorError) -> JSONResponse:
    return refusal(Refused(503, "unavailable", "a part of the server is gone and is being replaced; try again"))


@api.exception_handler(Exception)
async def _on_fault(request: Request, error: Exception) -> JSONResponse:
    return refusal(Refused(500, "internal_error", "the server failed on this request; its log says why"))


def refusal(refused: Refused) -> JSONResponse:
    headers = {"retry-after": "1"} if refused.status in (429, 503) else {}
    return JSONResponse(refused.body, refused.status, headers)


_NO_TEXT = Refused(500, "internal_error", "the turn ended before it began")


async def _whole(completion: Completion, events: AsyncGenerator[TurnEvent, None]) -> Response:
    choices = Choices(completion.n)
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Refused):
                return refusal(event)
            choices.take(event)
            if choices.complete:
                return JSONResponse(completion.whole(choices), headers=completion.headers)
    return refusal(_NO_TEXT)


async def _chunks(
    completion: Completion, events: AsyncGenerator[TurnEvent, None], with_usage: bool
) -> AsyncIterator[str]:
    closed: list[Closed] = []
    async with aclosing(events):
        for choice in range(completion.n):
            yield sse(completion.first(choice))
        async for event in events:
            if isinstance(event, Delta):
                yield sse(completion.delta(event))
            elif isinstance(event, Closed):
                closed.append(event)
                yield sse(completion.last(event))
                if len(closed) < completion.n:
                    continue
                if with_usage:
                    yield sse(completion.usage_chunk(closed))
                yield "data: [DONE]\n\n"
            elif isinstance(event, Refused):
                yield sse_error(event)


def _emptiest(replicas: list[ReplicaInfo], owner: str | None) -> str:
    others = [replica for replica in replicas if replica.replica != owner]
    if not others:
        raise RequestError(409, "no_other_replica", "to: there is no other replica to move to", "to")
    return min(others, key=lambda replica: replica.sessions).replica


# Serve pickles the class by value where it is decorated: whatever its methods use must be defined above.
@serve.ingress(api)
class Ingress:
    """Validates, finds the session's owner, and writes what the owner says."""

    def __init__(self, engine: DeploymentHandle, args: AppArgs) -> None:
        self._engine = engine
        self._model = args.model_id
        self._cluster = Cluster(serve.get_replica_context().app_name, args.host_store_bytes)
        # What a host store could not hold could not outlive its replica either.
        self._document_limit = args.host_store_bytes

    # ------------------------------------------------------------------------------------------------ turns

    @api.post("/v1/chat/completions")
    async def chat_completions(self, request: Request) -> Response:
        body = parse(TurnBody, await document_of(request))
        name = request.headers.get("x-session-id")
        key = None if name is None else SessionKey(tenant_of(request), session_name(name, "x-session-id"))
        require = request.headers.get("x-session-require")
        if require not in (None, "existing"):
            raise invalid(f"x-session-require: must be 'existing', got {require!r}", "x-session-require")
        if require is not None and key is None:
            raise invalid("x-session-require: needs an x-session-id", "x-session-require")
        return await self._turn(body, "history", tenant_of(request), key, must_exist=require is not None)

    @api.post("/v1/sessions/{name:path}/turns")
    async def append_turn(self, request: Request, name: str) -> Response:
        key = await self._existing(request, name)
        body = parse(TurnBody, await document_of(request))
        return await self._turn(body, "append", key.tenant, key, must_exist=True)

    async def _turn(self, body: TurnBody, mode: Any, tenant: str, key: SessionKey | None, must_exist: bool) -> Response:
        if body.model is not None and body.model != self._model:
            raise RequestError(
                404, "model_not_found", f"model: {body.model!r} is not served; {self._model!r} is", "model"
            )
        events = self._events(turn_request(body, mode, tenant, key, must_exist))
        # The first event is awaited before anything is sent, so that a refusal keeps its status.
        first = await anext(events)
        if not isinstance(first, Opened):
            await events.aclose()
            return refusal(first if isinstance(first, Refused) else _NO_TEXT)
        completion = Completion(f"chatcmpl-{secrets.token_hex(12)}", first, body.n or 1)
        if body.stream:
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            chunks = _chunks(completion, events, with_usage)
            return StreamingResponse(chunks, media_type="text/event-stream", headers=completion.headers)
        return await _whole(completion, events)

    async def _events(self, turn: TurnRequest) -> AsyncGenerator[TurnEvent, None]:
        """Events of a turn. If its replica dies before the first one, another replica is asked."""
        for attempt in range(ATTEMPTS):
            placement = await self._cluster.locate(turn.key) if turn.key is not None else None
            affinity = str(turn.key) if turn.key is not None else turn.turn
            route = Route(affinity, placement.owner if placement else None, placement)
            stream: Any = self._engine.options(stream=True).take_turn.remote(route, turn)
            published = False
            try:
                async for event in stream:
                    published = True
                    yield event
                return
            except RayActorError:
                if published or attempt + 1 == ATTEMPTS:
                    message = "the replica that ran this turn is gone; what it had committed before the turn is kept"
                    yield Refused(503, "replica_lost", message)
                    return
            finally:
                stream.cancel()

    # ------------------------------------------------------------------------------------------------ sessions

    @api.get("/v1/sessions")
    async def list_sessions(self, request: Request) -> Any:
        placements = await self._cluster.sessions(tenant_of(request))
        return {"object": "list", "data": [placement_object(placement) for placement in placements]}

    # Before the route of one session, whose name may hold a slash.
    @api.get("/v1/sessions/{name:path}/export")
    async def export_session(self, request: Request, name: str) -> Response:
        key = await self._existing(request, name)
        placement = await self._cluster.locate(key)
        if placement is None:
            raise unknown_session(name)
        answer = await self._ask("export_session", self._route(placement), key)
        if isinstance(answer, Refused):
            return refusal(answer)
        return Response(answer.document.tobytes(), media_type=DOCUMENT_TYPE)

    @api.post("/v1/sessions/import")
    async def import_session(self, request: Request, id: str | None = None) -> Any:
        """The new session belongs to whoever imports it; the document names no tenant."""
        name = None if id is None else session_name(id, "id")
        body = await body_of(request, self._document_limit)
        try:
            document = await asyncio.to_thread(open_document, body)
        except StateError as error:
            raise RequestError(400, "bad_state", f"document: {error}", "document") from None
        key = SessionKey(tenant_of(request), name or document.manifest.session.id)
        if await self._cluster.locate(key) is not None:
            raise session_exists(key.session)
        answer = await self._ask("import_session", Route(str(key)), key, np.frombuffer(body, np.uint8))
        if isinstance(answer, Refused):
            return refusal(answer)
        return {
            "id": key.session,
            "object": "session.imported",
            "replica": answer.replica,
            "epoch": str(answer.epoch),
            "frontier": answer.frontier,
        }

    @api.get("/v1/sessions/{name:path}")
    async def get_session(self, request: Request, name: str) -> Any:
        key = await self._existing(request, name)
        placement = await self._cluster.locate(key)
        if placement is None:
            raise unknown_session(name)
        known = await self._ask("session_info", self._route(placement), key)
        return session_details(placement, known if isinstance(known, SessionInfo) else None)

    @api.delete("/v1/sessions/{name:path}")
    async def delete_session(self, request: Request, name: str) -> Any:
        key = await self._existing(request, name)
        placement = await self._cluster.locate(key)
        if placement is None or not await self._ask("delete", self._route(placement), key):
            raise unknown_session(name)
        return {"id": name, "object": "session.deleted", "deleted": True}

    @api.post("/v1/sessions/{name:path}/migrate")
    async def migrate_session(self, request: Request, name: str) -> Any:
        key = await self._existing(request, name)
        body = parse(MigrateBody, await document_of(request, empty=True))
        placement = await self._cluster.locate(key)
        if placement is None:
            raise unknown_session(name)
        replicas = await self._replicas()
        target = _emptiest(replicas, placement.owner) if body.to is None else body.to
        if target not in [replica.replica for replica in replicas]:
            raise RequestError(404, "replica_not_found", f"to: there is no replica {target!r}", "to")
        answer = await self._ask("adopt", Route(str(key), target, placement), key)
        if isinstance(answer, Refused):
            return refusal(answer)
        if not isinstance(answer, Adopted):
            raise RequestError(503, "replica_lost", f"to: replica {target!r} is gone", "to")
        return {
            "id": name,
            "object": "session.migrated",
            "from": placement.owner,
            "to": answer.replica,
            "epoch": str(answer.epoch),
            "hit": answer.hit,
            "frontier": answer.frontier,
        }

    @api.post("/v1/sessions/{name:path}/fork")
    async def fork_session(self, request: Request, name: str) -> Any:
        key = await self._existing(request, name)
        body = parse(ForkBody, await document_of(request, empty=True))
        child = SessionKey(key.tenant, secrets.token_hex(16) if body.id is None else session_name(body.id, "id"))
        placement = await self._cluster.locate(key)
        if placement is None:
            raise unknown_session(name)
        answer = await self._ask("fork", self._route(placement), key, child)
        if isinstance(answer, Refused):
            return refusal(answer)
        return {
            "id": child.session,
            "object": "session.forked",
            "parent": name,
            "replica": answer.replica,
            "epoch": str(answer.epoch),
            "frontier": answer.frontier,
        }

    async def _existing(self, request: Request, name: str) -> SessionKey:
        """A name that cannot be one is unknown like any other."""
        key = SessionKey(tenant_of(request), name)
        if await self._cluster.locate(key) is None:
            raise unknown_session(name)
        return key

    # ------------------------------------------------------------------------------------------------ server

    @api.get("/v1/models")
    async def list_models(self) -> Any:
        return {"object": "list", "data": [await self._model_object()]}

    @api.get("/v1/models/{name:path}")
    async def get_model(self, name: str) -> Any:
        if name != self._model:
            raise RequestError(404, "model_not_found", f"model: {name!r} is not served; {self._model!r} is", "model")
        return await self._model_object()

    async def _model_object(self) -> dict[str, Any]:
        info: ReplicaInfo = await self._ask("info", Route(self._model))
        return {
            "id": self._model,
            "object": "model",
            "created": 0,
            "owned_by": "dflash-serve",
            "max_model_len": info.context_limit,
            "speculative": info.backend,
        }

    @api.get("/v1/replicas")
    async def list_replicas(self) -> Any:
        return {"object": "list", "data": [replica_object(replica) for replica in await self._replicas()]}

    @api.get("/health")
    async def health(self) -> Any:
        return {"status": "ok", "replicas": len(await self._replicas())}

    async def _replicas(self) -> list[ReplicaInfo]:
        """Replicas that answer. A call to a dead one, not yet noticed by Serve, fails as a whole: ask again."""
        for _ in range(ATTEMPTS):
            try:
                return await self._engine.broadcast("info").results_async(timeout_s=10)
            except (RayActorError, TimeoutError):
                continue
        raise RequestError(503, "unavailable", "the replicas do not answer")

    def _route(self, placement: Placement) -> Route:
        return Route(str(placement.key), placement.owner, placement)

    async def _ask(self, method: str, route: Route, *args: Any) -> Any:
        try:
            return await getattr(self._engine, method).remote(route, *args)
        except RayActorError:
            raise RequestError(503, "replica_lost", "the replica that was asked is gone; try again") from None
