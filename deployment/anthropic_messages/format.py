"""A turn of ours as a message of the Anthropic interface, whole or as a stream of its events."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse

from deployment.answer import Choices
from deployment.engine import errors as engine
from deployment.errors import TURN_CANCELLED, Refused
from deployment.last_call import REPLACED, Departing
from deployment.parsing.turn_text import ToolCall
from deployment.pieces import Piece, Text, Thought, joined, pieces
from deployment.wire import Closed, Delta, Opened, Told

PING = 'event: ping\ndata: {"type": "ping"}\n\n'
"""In silence, so that nobody on the way takes the connection for dead."""

_ERRORS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
           404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error",
           529: "overloaded_error"}  # fmt: skip


# ------------------------------------------------------------------------------------------------ refusals


_WHOLE = ("stop", "length")
"""How a turn ends whose answer is all that the model had to say, or all that it was let."""


def new_request_id() -> str:
    """Every answer has one, and a refusal too."""
    return f"req_{secrets.token_hex(12)}"


def status_of(refused: Refused) -> int:
    """529 is this interface's word for a server that has no room now."""
    if refused.status == 503 or (refused.code == engine.OVERLOADED and refused.param is None):
        return 529
    return 400 if refused.status in (409, 410, 422) else refused.status


def error_object(refused: Refused, request: str) -> dict[str, Any]:
    status = status_of(refused)
    kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": refused.message}, "request_id": request}


def refusal(refused: Refused) -> JSONResponse:
    status, request = status_of(refused), new_request_id()
    headers = {"request-id": request} | ({"retry-after": "1"} if status in (429, 529) else {})
    return JSONResponse(error_object(refused, request), status, headers)


# ------------------------------------------------------------------------------------------------ answers


@dataclass(frozen=True)
class MessageFormat:
    opened: Opened
    request: str

    @property
    def headers(self) -> dict[str, str]:
        session = self.opened.session
        resumed = {"x-session-id": session.id, "x-session-resume": session.header} if session else {}
        return {"request-id": self.request, "x-replica": self.opened.replica, "x-turn-id": self.opened.turn, **resumed}

    def whole(self, choices: Choices) -> dict[str, Any]:
        """RequestError for an answer that was cut off, which this interface has no word for."""
        (deltas,), (closed,) = choices.deltas, choices.ended
        if closed.finish_reason not in _WHOLE:
            raise TURN_CANCELLED.error
        content = [_block(piece) for piece in joined([*deltas, closed])]
        usage = {**self._input, "output_tokens": closed.completion_tokens}
        return {**self._message, "content": content, **_ending(closed), "usage": usage}

    async def events(self, told: AsyncGenerator[Told | Departing, None]) -> AsyncGenerator[str, None]:
        blocks = _Blocks()
        yield _event("message_start", message={**self._message, "usage": {**self._input, "output_tokens": 0}})
        yield PING
        async with aclosing(told):
            async for one in told:
                event = REPLACED if isinstance(one, Departing) else one.event
                match event:
                    case Delta() | Closed():
                        for piece in pieces(event):
                            for part in blocks.write(piece):
                                yield part
                    case Refused():
                        yield _event("error", **error_object(event, self.request))
                        return
                    case _:
                        pass
                if isinstance(event, Closed):
                    for part in blocks.end():
                        yield part
                    if event.finish_reason not in _WHOLE:
                        yield _event("error", **error_object(TURN_CANCELLED, self.request))
                        return
                    usage = {**self._input, "output_tokens": event.completion_tokens}
                    yield _event("message_delta", delta=_ending(event), usage=usage)
        yield _event("message_stop")

    @property
    def _message(self) -> dict[str, Any]:
        return {
            "id": f"msg_{self.opened.turn}",
            "type": "message",
            "role": "assistant",
            "model": self.opened.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    @property
    def _input(self) -> dict[str, int]:
        """Tokens that were computed, and those that were not computed again."""
        opened = self.opened
        return {
            "input_tokens": opened.prompt_tokens - opened.reused,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": opened.reused,
        }


class _Blocks:
    """Content blocks of a stream, one after another."""

    def __init__(self) -> None:
        self._index = -1
        self._open: type[Piece] | None = None
        self._thought = ""

    def write(self, piece: Piece) -> Iterator[str]:
        if self._open is not type(piece) or isinstance(piece, ToolCall):
            yield from self.end()
            self._index += 1
            self._open = type(piece)
            yield _event("content_block_start", index=self._index, content_block=_beginning(piece))
        if isinstance(piece, Thought):
            self._thought += piece.text
        yield self._delta(_addition(piece))

    def end(self) -> Iterator[str]:
        if self._open is None:
            return
        if self._thought:
            yield self._delta({"type": "signature_delta", "signature": _signature(self._thought)})
        yield _event("content_block_stop", index=self._index)
        self._open, self._thought = None, ""

    def _delta(self, delta: dict[str, Any]) -> str:
        return _event("content_block_delta", index=self._index, delta=delta)


def _event(kind: str, **fields: Any) -> str:
    data = json.dumps({"type": kind, **fields}, ensure_ascii=False, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n"


def _block(piece: Piece) -> dict[str, Any]:
    match piece:
        case Thought(text):
            return {"type": "thinking", "thinking": text, "signature": _signature(text)}
        case Text(text):
            return {"type": "text", "text": text}
        case ToolCall():
            return {**_beginning(piece), "input": json.loads(piece.arguments)}


def _beginning(piece: Piece) -> dict[str, Any]:
    match piece:
        case Thought():
            return {"type": "thinking", "thinking": "", "signature": ""}
        case Text():
            return {"type": "text", "text": ""}
        case ToolCall():
            return {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}


def _addition(piece: Piece) -> dict[str, Any]:
    match piece:
        case Thought(text):
            return {"type": "thinking_delta", "thinking": text}
        case Text(text):
            return {"type": "text_delta", "text": text}
        case ToolCall():
            return {"type": "input_json_delta", "partial_json": piece.arguments}


def _signature(thought: str) -> str:
    """Clients send it back with the thinking, and expect one; it proves nothing."""
    return hashlib.sha256(thought.encode()).hexdigest()


def _ending(closed: Closed) -> dict[str, Any]:
    stop = closed.stop_reason if isinstance(closed.stop_reason, str) else None
    if closed.calls and closed.finish_reason == "stop" and stop is None:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    reason = "stop_sequence" if stop is not None else {"length": "max_tokens", "stop": "end_turn"}[closed.finish_reason]
    return {"stop_reason": reason, "stop_sequence": stop}
