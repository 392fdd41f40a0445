"""The HTTP interface: which route leads where, and how a refusal looks. What the routes do is in `turn_api.py` and
`session_api.py`."""

# No `from __future__ import annotations`: FastAPI could not resolve the strings in a class that Serve pickles by value.

import asyncio
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection

from deployment.anthropic_messages.api import MessagesApi
from deployment.anthropic_messages.format import refusal as messages_refusal
from deployment.api_keys import KeyFile, any_key
from deployment.authentication import Authentication
from deployment.cluster.transport import Cluster
from deployment.console.files import PAGE, console_file
from deployment.errors import Refused, RequestError
from deployment.last_call import LastCall
from deployment.leaving_clients import LeavingClients
from deployment.logs import set_up
from deployment.metrics.page import CONTENT_TYPE
from deployment.metrics.scrape import scraped
from deployment.metrics.turns import TurnMetrics
from deployment.openai_responses.api import ResponsesApi
from deployment.openapi.document import document
from deployment.path_names import PathNames, route_path
from deployment.refusal import refusal
from deployment.replica_calls import Replicas
from deployment.schemas import StreamOptions
from deployment.server_objects import listed, model_object, replica_object
from deployment.session_api import SessionApi
from deployment.settings import AppArgs
from deployment.token_api import TokenApi
from deployment.turn_api import TurnApi
from deployment.web_pages import WebPages
from deployment.wire import ReplicaInfo

VERSION = version("dflash-serve")

api = FastAPI(openapi_url=None)


def _refusal(request: HTTPConnection, refused: Refused) -> JSONResponse:
    """In the form of the interface that was asked; counted by the ingress whose request it is."""
    serve.get_replica_context().servable_object.metrics.refused(refused)
    return messages_refusal(refused) if route_path(request.scope).startswith("/v1/messages") else refusal(refused)


@api.exception_handler(RequestError)
async def _on_request_error(request: Request, error: RequestError) -> JSONResponse:
    return _refusal(request, error.refused)


@api.exception_handler(HTTPException)
async def _on_http_error(request: Request, error: HTTPException) -> JSONResponse:
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    refused = Refused(error.status_code, code, f"{request.method} {request.url.path}: {error.detail}")
    answer = _refusal(request, refused)
    answer.headers.update(error.headers or {})  # of a method that is not allowed, those that are
    return answer


@api.exception_handler(RequestValidationError)
async def _on_validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"][1:])
    return _refusal(request, Refused(400, "invalid_request", f"{param}: {first['msg']}", param))


@api.exception_handler(RayActorError)
async def _on_lost_actor(request: Request, error: RayActorError) -> JSONResponse:
    message = "a part of the server is gone and is being replaced; try again"
    return _refusal(request, Refused(503, "unavailable", message))


@api.exception_handler(Exception)
async def _on_fault(request: Request, error: Exception) -> JSONResponse:
    return _refusal(request, Refused(500, "internal_error", "the server failed on this request; its log says why"))


# The object whose methods the routes are, as FastAPI's routes of Serve find it.
api.add_middleware(
    Authentication,
    tenant_of=lambda: serve.get_replica_context().servable_object.tenant_of,
    refusal=_refusal,
)
api.add_middleware(
    WebPages,
    names=lambda: serve.get_replica_context().servable_object.host_names,
    refusal=_refusal,
)
api.add_middleware(LeavingClients)
api.add_middleware(PathNames)  # the outermost: who asks for a path without a key is told by the path that is served


# Serve pickles the class by value where it is decorated: whatever its methods use must be defined above.
@serve.ingress(api)
class Ingress:
    def __init__(self, engine: DeploymentHandle, args: AppArgs) -> None:
        context = serve.get_replica_context()
        me = context.replica_id.unique_id
        set_up(args.logs, context)
        cluster = Cluster(context.app_name, args.durable, args.durable_key_env, args.logs)
        last_call = LastCall(lambda: cluster.is_stopping(me), args.stream_grace_seconds)
        self.connect(Replicas(engine, cluster), cluster, args, last_call)

    def connect(self, replicas: Replicas, cluster: Cluster, args: AppArgs, last_call: LastCall) -> None:
        self.tenant_of = any_key if args.api_keys is None else KeyFile(args.api_keys)
        self.host_names = args.host_names if args.api_keys is None else None
        self._model = model = args.model_id
        self._models = models = args.model_ids
        self._replicas = replicas
        self._cluster = cluster
        self.metrics = TurnMetrics()
        self._turns = TurnApi(replicas, cluster, models, last_call, args.media_limits, self.metrics)
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

    @api.post("/v1/sessions/{name:long_name}/turns")
    async def append_turn(self, request: Request, name: str) -> Response:
        placement = await self._sessions.placement(request, name)
        return await self._turns.append(request, placement.key)

    @api.get("/v1/sessions/{name:long_name}/turns/{turn:name}/events")
    async def turn_events(
        self,
        request: Request,
        name: str,
        turn: str,
        include_usage: bool = False,
        continuous_usage_stats: bool = False,
    ) -> Response:
        placement = await self._sessions.placement(request, name)
        usage = StreamOptions(include_usage=include_usage, continuous_usage_stats=continuous_usage_stats).usage_told
        return await self._turns.follow(request, placement, turn, usage)

    # ------------------------------------------------------------------------------------------------ sessions

    @api.post("/v1/sessions")
    async def create_session(self, request: Request) -> Any:
        return await self._sessions.create(request)

    @api.get("/v1/sessions")
    async def list_sessions(self, request: Request) -> Any:
        return await self._sessions.list(request)

    # Before the route of one session, whose name may be written with its slashes.
    @api.get("/v1/sessions/{name:long_name}/export")
    async def export_session(self, request: Request, name: str) -> Response:
        return await self._sessions.export(request, name)

    @api.get("/v1/sessions/{name:long_name}/turns")
    async def list_turns(self, request: Request, name: str) -> Any:
        return await self._sessions.turns(request, name)

    @api.get("/v1/sessions/{name:long_name}/checkpoints")
    async def list_checkpoints(self, request: Request, name: str) -> Any:
        return await self._sessions.checkpoints(request, name)

    @api.post("/v1/sessions/{name:long_name}/checkpoints")
    async def make_checkpoint(self, request: Request, name: str) -> Any:
        return await self._sessions.checkpoint(request, name)

    @api.delete("/v1/sessions/{name:long_name}/checkpoints/{checkpoint:name}")
    async def delete_checkpoint(self, request: Request, name: str, checkpoint: str) -> Any:
        return await self._sessions.delete_checkpoint(request, name, checkpoint)

    @api.post("/v1/sessions/import")
    async def import_session(self, request: Request, id: str | None = None) -> Any:
        return await self._sessions.import_(request, id)

    @api.get("/v1/sessions/{name:long_name}")
    async def get_session(self, request: Request, name: str) -> Any:
        return await self._sessions.show(request, name)

    @api.delete("/v1/sessions/{name:long_name}")
    async def delete_session(self, request: Request, name: str) -> Any:
        return await self._sessions.delete(request, name)

    @api.post("/v1/sessions/{name:long_name}/migrate")
    async def migrate_session(self, request: Request, name: str) -> Any:
        return await self._sessions.migrate(request, name)

    @api.post("/v1/sessions/{name:long_name}/fork")
    async def fork_session(self, request: Request, name: str) -> Any:
        return await self._sessions.fork(request, name)

    @api.post("/v1/responses")
    async def create_response(self, request: Request) -> Response:
        return await self._responses.create(request)

    @api.post("/v1/responses/input_tokens")
    async def count_input_tokens(self, request: Request) -> Any:
        return await self._responses.count(request)

    @api.get("/v1/responses/{name:name}")
    async def get_response(self, request: Request, name: str) -> Any:
        return await self._responses.show(request, name)

    @api.delete("/v1/responses/{name:name}")
    async def delete_response(self, request: Request, name: str) -> Any:
        return await self._responses.delete(request, name)

    @api.get("/v1/responses/{name:name}/input_items")
    async def list_input_items(self, request: Request, name: str) -> Any:
        return await self._responses.inputs(request, name)

    @api.post("/v1/responses/{name:name}/cancel")
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

    @api.get("/openapi.json", include_in_schema=False)
    async def get_description(self, request: Request) -> Any:
        return await asyncio.to_thread(document, request.app, VERSION)

    # The page and its files are no part of the interface that is described; whoever reads them knows nothing yet.
    @api.get("/console", include_in_schema=False)
    async def console(self) -> Response:
        return console_file(PAGE)

    @api.get("/console/{name:name}", include_in_schema=False)
    async def console_part(self, name: str) -> Response:
        return console_file(name)

    @api.get("/version")
    async def get_version(self) -> Any:
        return {"version": VERSION}

    @api.get("/v1/models")
    async def list_models(self) -> Any:
        info: ReplicaInfo = await self._replicas.ask_any("info", self._model)
        return listed([model_object(name, self._model, info) for name in self._models])

    @api.get("/v1/models/{name:long_name}")
    async def get_model(self, name: str) -> Any:
        self._turns.check_model(name)
        return model_object(name, self._model, await self._replicas.ask_any("info", self._model))

    @api.get("/v1/replicas")
    async def list_replicas(self) -> Any:
        return listed([replica_object(replica) for replica in await self._replicas.all()])

    @api.get("/health")
    async def health(self) -> Any:
        return {"status": "ok", "replicas": await self._replicas.answering()}

    @api.get("/metrics")
    async def prometheus(self) -> Response:
        return Response(await scraped(self.metrics, self._replicas, self._cluster), media_type=CONTENT_TYPE)
