"""What does a request say? Whose it is, its body within a limit, a session's name, and the turn that is asked for."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from typing import Any

from starlette.requests import Request

from deployment.errors import RequestError, invalid
from deployment.ownership import SessionKey
from deployment.schemas import TurnBody, read_json
from deployment.wire import TurnRequest

MAX_BODY_BYTES = 8 << 20
"""Several times the text of the longest context: a larger one is rendered and tokenised only to be refused."""


def tenant_of(request: Request) -> str:
    """Who asks: a digest of the key in the Authorization header, "" without one."""
    header = request.headers.get("authorization", "")
    scheme, _, token = header.partition(" ")
    key = token.strip() if scheme.lower() == "bearer" else header
    return hashlib.sha256(key.encode()).hexdigest()


def session_name(name: str, param: str) -> str:
    if not 1 <= len(name) <= 128 or not all("!" <= character <= "~" for character in name):
        raise invalid(f"{param}: a session's name has 1 to 128 visible ASCII characters, got {name[:140]!r}", param)
    return name


async def body_of(request: Request, limit: int = MAX_BODY_BYTES) -> bytes:
    """Raises RequestError (413) as soon as the body is known to be too large: before it is read, if it says so."""
    too_large = RequestError(413, "body_too_large", f"the request body is larger than {limit} bytes")
    stated = request.headers.get("content-length", "")
    if stated.isdecimal() and int(stated) > limit:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise too_large
    return bytes(body)


async def document_of(request: Request, *, empty: bool = False) -> Any:
    body = await body_of(request)
    # A large body takes seconds to parse: other requests' streams must not wait for it.
    return {} if empty and not body else await asyncio.to_thread(read_json, body)


def turn_request(body: TurnBody, mode: Any, tenant: str, key: SessionKey | None, must_exist: bool) -> TurnRequest:
    if key is not None and body.n is not None and body.n > 1:
        raise invalid(f"n: a session has one answer a turn, so that n must be 1, got {body.n}", "n")
    return TurnRequest(
        turn=f"turn-{secrets.token_hex(8)}",
        mode=mode,
        messages=tuple(message.model_dump(exclude_none=True) for message in body.messages),
        tenant=tenant,
        priority=body.priority,
        queue_seconds=body.queue_seconds,
        key=key,
        must_exist=must_exist,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        max_tokens=body.token_budget,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        drafting=body.drafting,
        min_p=body.min_p or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=body.bias,
        min_tokens=body.min_tokens or 0,
        reproducible=body.reproducible,
        stop=tuple(body.stop or ()),
        include_stop=body.include_stop_str_in_output,
        n=body.n or 1,
        logprobs=body.alternatives,
        thinking_budget=body.thinking_budget,
        enable_thinking=body.chat_template_kwargs.enable_thinking if body.chat_template_kwargs else None,
        grammar=body.response_format.grammar if body.response_format else None,
    )
