"""What does a request say? Whose it is, its body within a limit, a session's name, and the turn that is asked for."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from starlette.requests import Request

from deployment.completion_schema import CompletionBody
from deployment.engine.tool_grammar import functions_of
from deployment.errors import RequestError, invalid
from deployment.hints import hint_of
from deployment.json_reading import read_json
from deployment.ownership import SessionKey
from deployment.schemas import GenerationBody, TurnBody
from deployment.tool_use import ToolUse
from deployment.wire import TurnRequest

T = TypeVar("T")

MAX_BODY_BYTES = 8 << 20
"""Several times the text of the longest context: a larger one is rendered and tokenised only to be refused."""
SMALL_BYTES = 32 << 10
"""A body of so many is read in a few milliseconds."""
MAX_KEY = 255
"""Characters of an idempotency key: as many as a session's document has room for (`state/FORMAT.md`)."""


def tenant_of(request: Request) -> str:
    """Who asks, as `authentication.py` has found out."""
    return request.state.tenant


def session_name(name: str, param: str) -> str:
    return visible_name(name, param, "a session's name")


def visible_name(name: str, param: str, what: str) -> str:
    if not 1 <= len(name) <= 128 or not all("!" <= character <= "~" for character in name):
        raise invalid(f"{param}: {what} has 1 to 128 visible ASCII characters, got {name[:140]!r}", param)
    return name


async def body_of(request: Request, limit: int = MAX_BODY_BYTES) -> bytearray:
    """As it was collected, since a document may be as large as half the memory. Raises RequestError (413) as soon as
    the body is known to be too large: before it is read, if it says so."""
    too_large = body_too_large(limit)
    stated = request.headers.get("content-length", "")
    if stated.isdecimal() and int(stated) > limit:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise too_large
    return body


def body_too_large(limit: int, part: str = "") -> RequestError:
    return RequestError(413, "body_too_large", f"the request body {part}is larger than {limit} bytes")


async def document_of(request: Request, *, empty: bool = False) -> Any:
    body = await body_of(request)
    return {} if empty and not body else await document_in(body)


async def document_in(body: bytearray) -> Any:
    return await beside(len(body), read_json, body)


async def beside(body_bytes: int, function: Callable[..., T], *args: Any) -> T:
    """What a function returns that looks at all of a body. A large one takes seconds: other requests' streams must not
    wait for it, nor a small one for the threads that are busy with large ones."""
    if body_bytes <= SMALL_BYTES:
        return function(*args)
    return await asyncio.to_thread(function, *args)


@dataclass(frozen=True)
class Asking:
    """Who asks for a turn, and how, by the request's headers and the fields that do not change the text.

    `must_exist`: an unknown session is refused instead of made. `idempotency_key`, `repeated`: decision 21. `hint`:
    decision 19; an explicit session needs none. `accept_durable`: an older state will do, if the newest is lost.
    """

    tenant: str
    key: SessionKey | None = None
    must_exist: bool = False
    idempotency_key: str | None = None
    repeated: bool = False
    hint: str | None = None
    accept_durable: bool = False


def asking_of(request: Request, document: Any, key: SessionKey | None = None) -> Asking:
    """`key`: the session that the path names; without one, a header may. Raises RequestError (400)."""
    headers = request.headers
    tenant, must_exist = tenant_of(request), key is not None
    if key is None:
        name = headers.get("x-session-id")
        key = None if name is None else SessionKey(tenant, session_name(name, "x-session-id"))
        must_exist = _required(headers.get("x-session-require"), key)
    hint = hint_of(headers, document) if key is None and isinstance(document, dict) else None
    accepted = headers.get("x-session-accept")
    if accepted not in (None, "durable"):
        raise invalid(f"x-session-accept: must be 'durable', got {accepted!r}", "x-session-accept")
    return Asking(tenant, key, must_exist, _idempotency_key(headers), _repeated(headers), hint, accepted is not None)


def _required(value: str | None, key: SessionKey | None) -> bool:
    if value not in (None, "existing"):
        raise invalid(f"x-session-require: must be 'existing', got {value!r}", "x-session-require")
    if value is not None and key is None:
        raise invalid("x-session-require: needs an x-session-id", "x-session-require")
    return value is not None


def _idempotency_key(headers: Mapping[str, str]) -> str | None:
    key = headers.get("idempotency-key")
    if key is not None and not (1 <= len(key) <= MAX_KEY and all("!" <= character <= "~" for character in key)):
        message = f"Idempotency-Key: has 1 to {MAX_KEY} visible ASCII characters, got {key[:80]!r}"
        raise invalid(message, "Idempotency-Key")
    return key


def _repeated(headers: Mapping[str, str]) -> bool:
    """Whether the client says that it has sent this request before."""
    mark = headers.get("x-session-retry")
    if mark not in (None, "0", "1"):
        raise invalid(f"x-session-retry: must be 1 for a retry, got {mark!r}", "x-session-retry")
    tries = headers.get("x-stainless-retry-count", "0")
    if not (tries.isascii() and tries.isdecimal()):
        message = f"x-stainless-retry-count: must count earlier tries, got {tries[:80]!r}"
        raise invalid(message, "x-stainless-retry-count")
    return mark == "1" or tries.strip("0") != ""


def turn_request(body: TurnBody, mode: Literal["history", "append"], asking: Asking) -> TurnRequest:
    if asking.key is not None and body.n is not None and body.n > 1:
        raise invalid(f"n: a session has one answer a turn, so that n must be 1, got {body.n}", "n")
    return replace(
        _generation(body, mode, asking),
        messages=tuple(message.model_dump(exclude_none=True) for message in body.messages),
        max_tokens=body.token_budget,
        logprobs=body.alternatives,
        thinking_budget=body.thinking_budget,
        enable_thinking=body.thinks,
        preserve_thinking=body.preserves_thinking,
        tools=tool_use(body),
        continues=continues(body, mode),
    )


def continues(body: TurnBody, mode: Literal["history", "append"]) -> bool:
    """Raises RequestError (400) where there is nothing to go on with."""
    if not body.continue_final_message:
        if body.add_generation_prompt is False:
            message = "add_generation_prompt: false is possible only with continue_final_message"
            raise invalid(message, "add_generation_prompt")
        return False
    last = body.messages[-1]
    wrong = ""
    if body.add_generation_prompt:
        wrong = "an answer is begun or continued; set add_generation_prompt to false"
    elif mode == "append":
        wrong = "an append turn brings new messages only; send the full history to go on with its last one"
    elif last.role != "assistant" or last.tool_calls:
        wrong = "the last message must be the assistant's, without tool_calls"
    if wrong:
        raise invalid(f"continue_final_message: {wrong}", "continue_final_message")
    return True


def tool_use(body: TurnBody) -> ToolUse | None:
    """Raises RequestError (400) for a choice that needs other tools, or that leaves no room for the answer's format."""
    choice = body.tool_choice or "auto"
    if not body.tools:
        if choice in ("none", "auto"):
            return None
        raise invalid("tool_choice: needs tools to choose from", "tool_choice")
    if body.grammar and choice != "none":
        message = 'response_format: an answer that may be a call has no other form; set tool_choice to "none"'
        raise invalid(message, "response_format")
    source = json.dumps(body.tools, ensure_ascii=False)
    if isinstance(choice, str):
        return ToolUse(source, choice, None, body.parallel_tool_calls)
    name = choice.function.name
    if name not in functions_of(body.tools):
        raise invalid(f"tool_choice: {name!r} is none of the functions of tools", "tool_choice")
    return ToolUse(source, "function", name, body.parallel_tool_calls)


def completion_requests(body: CompletionBody, asking: Asking) -> list[TurnRequest]:
    """One a prompt. Each has a key of its own, so that a retry finds all of them."""
    if asking.key is not None:
        message = "x-session-id: a text completion belongs to no session; use /v1/chat/completions, or prompt_cache_key"
        raise invalid(message, "x-session-id")
    if body.stream and (len(body.prompts) > 1 or body.wanted == 0):
        raise invalid("stream: is possible for one prompt and at least one token; leave it out", "stream")
    turns: list[TurnRequest] = []
    for index, prompt in enumerate(body.prompts):
        turn = replace(
            _generation(body, "prompt", asking),
            prompt=prompt,
            max_tokens=body.token_budget,
            logprobs=body.logprobs,
            echo=body.echo,
            ignore_eos=body.ignore_eos or body.scores_only,
        )
        if index and asking.idempotency_key is not None:
            turn = replace(turn, idempotency_key=_key_of_prompt(asking.idempotency_key, index))
        turns.append(turn)
    return turns


def _key_of_prompt(key: str, index: int) -> str:
    """With its spaces it is none that a client can choose, and no longer than such a one. It begins as the client's
    does, since a refusal names it."""
    return f"{key[: MAX_KEY // 2]} {index} {hashlib.sha256(key.encode()).hexdigest()}"


def _generation(body: GenerationBody, mode: Literal["history", "append", "prompt"], asking: Asking) -> TurnRequest:
    return TurnRequest(
        turn=secrets.token_hex(16),
        mode=mode,
        messages=(),
        tenant=asking.tenant,
        key=asking.key,
        must_exist=asking.must_exist,
        accept_durable=asking.accept_durable,
        idempotency_key=asking.idempotency_key,
        repeated=asking.repeated,
        hint=asking.hint,
        store=body.store,
        priority=body.priority,
        queue_seconds=body.queue_seconds,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        drafting=body.drafting,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=body.bias,
        min_tokens=body.min_tokens or 0,
        reproducible=body.reproducible,
        logprobs_mode=body.logprobs_mode,
        stop=tuple(body.stop or ()),
        include_stop=body.include_stop_str_in_output,
        n=body.n or 1,
        grammar=body.grammar,
    )
