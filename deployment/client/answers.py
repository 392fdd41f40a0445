"""What became of an attempt: an answer, another attempt after a pause, or an error that says why there is none."""

from __future__ import annotations

import json
from typing import Any

import httpx

from deployment.client.calls import Call
from deployment.client.errors import ClientError, Refusal, UnexpectedAnswer, refusal_of, worth_another_try
from deployment.client.outage import Outage, retry_after

PROXY_FAULTS = frozenset({500, 502, 503, 504})
"""Of an answer without this interface's error object: somebody on the way found no server behind it."""

_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_CALLERS_FAULT = (httpx.UnsupportedProtocol, httpx.LocalProtocolError)


def pause_after_failure(error: httpx.TransportError, call: Call, outage: Outage) -> float:
    """Seconds to wait before the call is made again. ClientError."""
    reason = str(error) or type(error).__name__
    if isinstance(error, _CALLERS_FAULT):
        raise ClientError(f"{call.method} {call.path} cannot be sent: {reason}") from error
    if not call.repeatable and not isinstance(error, _NEVER_SENT):
        raise ClientError(
            f"{call.method} {call.path}: the connection was lost ({reason}); whether it was done is not known"
        ) from error
    return outage.pause(reason)


def pause_after_answer(
    response: httpx.Response, call: Call, outage: Outage, faults: frozenset[int] = PROXY_FAULTS
) -> float | None:
    """None for a success; else as above. Refusal, UnexpectedAnswer."""
    if response.is_success:
        return None
    refusal = _refusal(response)
    if refusal is None:
        message = f"{response.url} answers {response.status_code}: no reason was given"
        if response.status_code in faults and call.repeatable:
            return outage.pause(message)
        raise UnexpectedAnswer(message)
    if not worth_another_try(refusal) or (refusal.code == "replica_lost" and not call.repeatable):
        raise refusal
    return outage.pause(refusal.message, refusal)


def document_of(response: httpx.Response) -> dict[str, Any]:
    try:
        document = response.json()
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise UnexpectedAnswer(f"{response.url} does not answer with a JSON object")
    return document


def _refusal(response: httpx.Response) -> Refusal | None:
    try:
        document = json.loads(response.content)
    except ValueError:
        return None
    error = document.get("error") if isinstance(document, dict) else None
    return refusal_of(error, response.status_code, retry_after(response.headers))
