"""The HTTP interface: which route leads where, and how a refusal looks. What the routes do is in `turn_api.py` and
`session_api.py`."""

# No `from __future__ import annotations`: FastAPI could not resolve the strings in a class that Serve pickles by value.

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException

from deployment.anthropic_messages.api import MessagesApi
from deployment.api_keys import KeyFile, any_key
from deployment.authentication import Authentication
from deployment.cluster.transport import Cluster
from deployment.errors import Refused, RequestError
from deployment.last_call import LastCall
from deployment.openai_responses.api import ResponsesApi
from deployment.refusal import refusal
from deployment.replica_calls import Replicas
from deployment.server_objects import listed, replica_object
from deployment.session_api import SessionApi
from deployment.settings import AppArgs
from deployment.token_api import TokenApi
from deployment.turn_api import TurnApi
from deployment.wire import ReplicaInfo, Route

VERSION = version("dflash-serve")

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


# The object whose methods the routes are, as FastAPI's routes of Serve find it.
api.add_middleware(Authentication, tenant_of=lambda: serve.get_replica_context().servable_object.tenant_of)


# Serve pickles the class by value where it is decorated: whatever its methods use must be defined above.
@serve.ingress(api)
class Ingress:
    def __init__(self, engine: DeploymentHandle, args: AppArgs) -> None:
        context = serve.get_replica_context()
        cluster = Cluster(context.app_name, args.durable, args.durable_key_env)
        me = context.replica_id.unique_id
        last_call = LastCall(lambda: cluster.is_stopping(me), args.stream_grace_seconds)
        self.connect(Replicas(engine, cluster), cluster, args, last_call)

    def connect(self, replicas: Replicas, cluster: Cluster, args: AppArgs, last_call: LastCall) -> None:
        self.tenant_of = any_key if args.api_keys is None else KeyFile(args.api_keys)
        self._model = model = args.model_id
        self._replicas = replicas
        self._turns = TurnApi(replicas, cluster, model, last_call, args.media_limits)
        self._tokens = TokenApi(replicas, self._turns, model)
        self._messages = MessagesApi(self._turns, self._tokens)
        self._sessions = SessionApi(replicas, cluster, min(args.host_store_bytes, args.import_bytes))
        self._responses = ResponsesApi(self._turns, self._tokens, self._sessions, replicas, model)

    # ------------------------------------------------------------------------------------------------ turns

    @api.post("/v1/chat/completions")
    async def chat_completions(self, request: Request) -> Response:
        return await self._turns.chat(request)

    @api.post("/v1/completions")
    async def completions(self, request: Request) -> Response:
        return await self._turns.complete(request)

    @api.post("/v1/sessions/{name:path}/turns")
    async def append_turn(self, request: Request, name: str) -> Response:
        placement = await self._sessions.placement(request, name)
        return await self._turns.append(request, placement.key)

    @api.get("/v1/sessions/{name:path}/turns/{turn}/events")
    async def turn_events(self, request: Request, name: str, turn: str, include_usage: bool = False) -> Response:
        placement = await self._sessions.placement(request, name)
        return await self._turns.follow(request, placement, turn, include_usage)

    # ------------------------------------------------------------------------------------------------ sessions

    @api.post("/v1/sessions")
    async def create_session(self, request: Request) -> Any:
        return await self._sessions.create(request)

    @api.get("/v1/sessions")
    async def list_sessions(self, request: Request) -> Any:
        return await self._sessions.list(request)

    # Before the route of one session, whose name may hold a slash.
    @api.get("/v1/sessions/{name:path}/export")
    async def export_session(self, request: Request, name: str) -> Response:
        return await self._sessions.export(request, name)

    @api.get("/v1/sessions/{name:path}/turns")
    async def list_turns(self, request: Request, name: str) -> Any:
        return await self._sessions.turns(request, name)

    @api.get("/v1/sessions/{name:path}/checkpoints")
    async def list_checkpoints(self, request: Request, name: str) -> Any:
        return await self._sessions.checkpoints(request, name)

    @api.post("/v1/sessions/{name:path}/checkpoints")
    async def make_checkpoint(self, request: Request, name: str) -> Any:
        return await self._sessions.checkpoint(request, name)

    @api.delete("/v1/sessions/{name:path}/checkpoints/{checkpoint}")
    async def delete_checkpoint(self, request: Request, name: str, checkpoint: str) -> Any:
        return await self._sessions.delete_checkpoint(request, name, checkpoint)

    @api.post("/v1/sessions/import")
    async def import_session(self, request: Request, id: str | None = None) -> Any:
        return await self._sessions.import_(request, id)

    @api.get("/v1/sessions/{name:path}")
    async def get_session(self, request: Request, name: str) -> Any:
        return await self._sessions.show(request, name)

    @api.delete("/v1/sessions/{name:path}")
    async def delete_session(self, request: Request, name: str) -> Any:
        return await self._sessions.delete(request, name)

    @api.post("/v1/sessions/{name:path}/migrate")
    async def migrate_session(self, request: Request, name: str) -> Any:
        return await self._sessions.migrate(request, name)

    @api.post("/v1/sessions/{name:path}/fork")
    async def fork_session(self, request: Request, name: str) -> Any:
        return await self._sessions.fork(request, name)

    @api.post("/v1/responses")
    async def create_response(self, request: Request) -> Response:
        return await self._responses.create(request)

    @api.post("/v1/responses/input_tokens")
    async def count_input_tokens(self, request: Request) -> Any:
        return await self._responses.count(request)

    @api.get("/v1/responses/{name}")
    async def get_response(self, request: Request, name: str) -> Any:
        return await self._responses.show(request, name)

    @api.delete("/v1/responses/{name}")
    async def delete_response(self, request: Request, name: str) -> Any:
        return await self._responses.delete(request, name)

    @api.get("/v1/responses/{name}/input_items")
    async def list_input_items(self, request: Request, name: str) -> Any:
        return await self._responses.inputs(request, name)

    @api.post("/v1/responses/{name}/cancel")
    async def cancel_response(self, request: Request, name: str) -> Any:
        return await self._responses.cancel(request, name)

    @api.post("/v1/messages")
    async def messages(self, request: Request) -> Response:
        return await self._messages.create(request)

    @api.post("/v1/messages/count_tokens")
    async def count_tokens(self, request: Request) -> Response:
        return await self._messages.count(request)

    # ------------------------------------------------------------------------------------------------ tokens

    @api.post("/tokenize")
    async def tokenize(self, request: Request) -> Any:
        return await self._tokens.encode(request)

    @api.post("/detokenize")
    async def detokenize(self, request: Request) -> Any:
        return await self._tokens.decode(request)

    # ------------------------------------------------------------------------------------------------ server

    @api.get("/version")
    async def get_version(self) -> Any:
        return {"version": VERSION}

    @api.get("/v1/models")
    async def list_models(self) -> Any:
        return listed([await self._model_object()])

    @api.get("/v1/models/{name:path}")
    async def get_model(self, name: str) -> Any:
        if name != self._model:
            raise RequestError(404, "model_not_found", f"model: {name!r} is not served; {self._model!r} is", "model")
        return await self._model_object()

    async def _model_object(self) -> dict[str, Any]:
        info: ReplicaInfo = await self._replicas.ask("info", Route(self._model))
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
        return listed([replica_object(replica) for replica in await self._replicas.all()])

    @api.get("/health")
    async def health(self) -> Any:
        return {"status": "ok", "replicas": len(await self._replicas.all())}
