"""Each route of the interface: what it is for, its body, its answer, and the statuses with which it refuses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from deployment.anthropic_messages.schema import MessagesBody
from deployment.anthropic_messages.schema import PromptBody as MessagesPrompt
from deployment.completion_schema import CompletionBody
from deployment.openai_responses.schema import PromptBody as ResponsesPrompt
from deployment.openai_responses.schema import ResponsesBody
from deployment.openapi import adopted, answers, session_answers
from deployment.request_reading import MAX_KEY
from deployment.schemas import CheckpointBody, ForkBody, MigrateBody, NewSessionBody, TurnBody
from deployment.session_api import DOCUMENT_TYPE
from deployment.token_api import TextBody, TokensBody


@dataclass(frozen=True)
class Parameter:
    """In the query or a header. `schema`: of JSON Schema."""

    name: str
    where: str
    schema: dict[str, Any]
    help: str


@dataclass(frozen=True)
class Operation:
    """`body`: models of which one is sent, or a media type; without `needs_body` it may be left out. `answer`: a model
    or a media type. `streams`: server-sent events, where the body says `stream`."""

    help: str
    answer: type[BaseModel] | str
    refuses: tuple[int, ...] = ()
    body: tuple[type[BaseModel], ...] | str = ()
    needs_body: bool = True
    streams: bool = False
    takes: tuple[Parameter, ...] = ()
    error: type[BaseModel] = answers.Error


def _header(name: str, help: str, **schema: Any) -> Parameter:
    return Parameter(name, "header", {"type": "string", **schema}, help)


def _query(name: str, help: str, **schema: Any) -> Parameter:
    return Parameter(name, "query", schema, help)


_KEY = _header(
    "Idempotency-Key",
    "The request with the same key is the same turn.",
    minLength=1,
    maxLength=MAX_KEY,
    pattern="^[!-~]*$",
)
_RETRY = (
    _header("X-Session-Retry", "1: this request was sent before.", enum=["0", "1"]),
    _header("X-Stainless-Retry-Count", "The same, as OpenAI's and Anthropic's clients say it.", pattern="^[0-9]+$"),
)
_DURABLE = _header("X-Session-Accept", "An older state of the session will do.", enum=["durable"])
_SESSION = (
    _header("X-Session-Id", "The turn is one of this session.", minLength=1, maxLength=128, pattern="^[!-~]*$"),
    _header("X-Session-Require", "An unknown session is refused, not made.", enum=["existing"]),
)
_TURN = (*_SESSION, _KEY, *_RETRY, _DURABLE)

_ANY_TURN = (400, 404, 409, 410, 413, 422, 429, 503)
_OF_SESSION = (404, 503)

_MESSAGES = Operation(
    "A turn in Anthropic's form.",
    adopted.MessageAnswer,
    (400, 404, 413, 429, 529),
    (MessagesBody,),
    streams=True,
    takes=_TURN,
    error=adopted.MessageError,
)

OPERATIONS = {
    "POST /v1/chat/completions": Operation(
        "One turn from the full history; with X-Session-Id, a turn of that session.",
        answers.ChatCompletion, _ANY_TURN, (TurnBody,), streams=True, takes=_TURN,
    ),
    "POST /v1/completions": Operation(
        "A text completion of one prompt or several.",
        answers.TextCompletion, _ANY_TURN, (CompletionBody,), streams=True, takes=(_KEY, *_RETRY),
    ),
    "POST /v1/responses": Operation(
        "A response; a stored one is a turn of a session, in which those that follow it go on.",
        adopted.Response, _ANY_TURN, (ResponsesBody,), streams=True, takes=(_KEY, *_RETRY, _DURABLE),
    ),
    "POST /v1/responses/input_tokens": Operation(
        "How many tokens a response's prompt would have.",
        adopted.InputTokens, (400, 404, 409, 413, 429, 503), (ResponsesPrompt,),
    ),
    "GET /v1/responses/{name}": Operation("A stored response.", adopted.Response, (400, 404, 409, 503)),
    "DELETE /v1/responses/{name}": Operation(
        "Deletes a stored response, with the session that it is in.", adopted.DeletedResponse, (404, 409, 503)
    ),
    "GET /v1/responses/{name}/input_items": Operation(
        "What a stored response was asked.",
        adopted.InputItems, (404, 409, 503),
        takes=(_query("order", "Newest first unless it is asc.", enum=["asc", "desc"]),),
    ),
    "POST /v1/responses/{name}/cancel": Operation(
        "Ends a response that runs; what it said stays.", adopted.Response, (404, 409, 503)
    ),
    "POST /v1/messages": _MESSAGES,
    "POST /v1/messages/count_tokens": replace(
        _MESSAGES, help="How many tokens a message's prompt would have.", answer=adopted.TokenCount,
        body=(MessagesPrompt,), streams=False, takes=(),
    ),
    "POST /v1/sessions": Operation(
        "A session before its first turn.",
        session_answers.Created, (400, 409, 413, 429, 503), (NewSessionBody,), needs_body=False,
    ),
    "GET /v1/sessions": Operation("The sessions of whoever asks.", session_answers.Sessions, (503,)),
    "GET /v1/sessions/{name}": Operation(
        "A session with transcript and turns.", session_answers.SessionDetails, _OF_SESSION
    ),
    "DELETE /v1/sessions/{name}": Operation("Deletes a session.", session_answers.Deleted, (404, 409, 503)),
    "POST /v1/sessions/{name}/turns": Operation(
        "An append turn: messages holds only what is new.",
        answers.ChatCompletion, _ANY_TURN, (TurnBody,), streams=True, takes=(_KEY, *_RETRY, _DURABLE),
    ),
    "GET /v1/sessions/{name}/turns": Operation("A session's turns, oldest first.", session_answers.Turns, _OF_SESSION),
    "GET /v1/sessions/{name}/turns/{turn}/events": Operation(
        "A turn's stream of events from its first one, or from after the one that was had last.",
        "text/event-stream", (400, 404, 409, 410, 503),
        takes=(
            _header("Last-Event-Id", "The id of that event."),
            _query("after", "The same; it counts for more than the header.", type="string"),
            _query("include_usage", "A last chunk says what was used.", type="boolean"),
            _query("continuous_usage_stats", "With it, each chunk says what was used so far.", type="boolean"),
        ),
    ),
    "GET /v1/sessions/{name}/checkpoints": Operation(
        "A session's checkpoints.", session_answers.Checkpoints, _OF_SESSION
    ),
    "POST /v1/sessions/{name}/checkpoints": Operation(
        "Keeps where a session stands, under a name.",
        session_answers.MadeCheckpoint, (400, 404, 409, 413, 503), (CheckpointBody,), needs_body=False,
    ),
    "DELETE /v1/sessions/{name}/checkpoints/{checkpoint}": Operation(
        "Deletes a checkpoint.", session_answers.DeletedCheckpoint, (404, 409, 503)
    ),
    "POST /v1/sessions/{name}/fork": Operation(
        "A second session with the same past, or a part of it.",
        session_answers.Forked, (400, 404, 409, 413, 429, 503), (ForkBody,), needs_body=False,
    ),
    "POST /v1/sessions/{name}/migrate": Operation(
        "Moves a session to another replica; a turn that runs goes on there.",
        session_answers.Migrated, (400, 404, 409, 413, 503), (MigrateBody,), needs_body=False,
    ),
    "GET /v1/sessions/{name}/export": Operation("A session as a document.", DOCUMENT_TYPE, (404, 409, 503)),
    "POST /v1/sessions/import": Operation(
        "A new session out of a document.",
        session_answers.Imported, (400, 409, 413, 429, 503), DOCUMENT_TYPE,
        takes=(_query("id", "Its name; without one it has the document's.", type="string"),),
    ),
    "POST /tokenize": Operation(
        "The tokens of a text, or of a conversation as a turn would have it.",
        answers.Tokenized, (400, 404, 413, 429, 503), (TextBody, TurnBody),
    ),
    "POST /detokenize": Operation("The text of tokens.", answers.Detokenized, (400, 404, 413, 503), (TokensBody,)),
    "GET /version": Operation("The server's version.", answers.Version),
    "GET /v1/models": Operation("The model that is served.", answers.Models, (503,)),
    "GET /v1/models/{name}": Operation("The same by its name.", answers.Model, (404, 503)),
    "GET /v1/replicas": Operation("The engines that answer.", answers.Replicas, (503,)),
    "GET /metrics": Operation("What the application does, for Prometheus.", "text/plain"),
    "GET /health": Operation("Whether anybody can be served.", answers.Health, (503,)),
}  # fmt: skip
"""By method and path."""
