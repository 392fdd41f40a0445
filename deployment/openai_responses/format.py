"""A turn of ours as a response, whole or as a stream of its events."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from deployment.answer import Choices
from deployment.errors import Refused
from deployment.last_call import REPLACED, Departing
from deployment.openai_responses.items import item_id, output_text
from deployment.parsing.turn_text import ToolCall
from deployment.pieces import Piece, Text, Thought, joined, pieces
from deployment.wire import Closed, Delta, Opened, Told

_ID = re.compile(r"resp_([0-9a-f]{32}|[0-9a-f]{59})([0-9a-f]{32})")
_NOWHERE = "0" * 32
_SESSION = "resp-"


def session_of(response: str) -> tuple[str, str] | None:
    """Name of the session and id of the turn that a response's id names; None: it is none that is stored."""
    found = _ID.fullmatch(response)
    return None if found is None or found[1] == _NOWHERE else (f"{_SESSION}{found[1]}", found[2])


def session_name(digits: str) -> str:
    """`digits`: 32 hex digits, or 59 of a session that began from an older response."""
    return f"{_SESSION}{digits}"


def response_id(session: str | None, turn: str) -> str:
    return f"resp_{_NOWHERE if session is None else session.removeprefix(_SESSION)}{turn}"


def usage_of(prompt: int, reused: int, completion: int, reasoning: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": reused},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": prompt + completion,
    }


def response_object(
    name: str, model: str, facts: dict[str, Any], status: str, output: list[dict[str, Any]], usage: Any
) -> dict[str, Any]:
    """`facts`: what it repeats of its request, and when that came."""
    reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
    return {
        "id": name,
        "object": "response",
        "status": status,
        "error": None,
        "incomplete_details": reason,
        "model": model,
        "output": output,
        "usage": usage,
        "max_tool_calls": None,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "top_logprobs": 0,
        "service_tier": "default",
        **facts,
    }


def status_of(finish_reason: str) -> str:
    return {"stop": "completed", "length": "incomplete", "failed": "failed"}.get(finish_reason, "cancelled")


@dataclass(frozen=True)
class ResponseFormat:
    opened: Opened
    facts: dict[str, Any]

    @property
    def headers(self) -> dict[str, str]:
        session = self.opened.session
        resumed = {"x-session-resume": session.header} if session else {}
        return {"x-replica": self.opened.replica, "x-turn-id": self.opened.turn, **resumed}

    def whole(self, choices: Choices) -> dict[str, Any]:
        """With the items that a stream of it has."""
        (deltas,), (closed,) = choices.deltas, choices.ended
        stream = _Stream(self.opened.turn)
        for piece in joined([*deltas, closed]):
            deque(stream.write(piece), 0)
        deque(stream.end(), 0)
        return self._ended(closed, stream.output)

    @property
    def begun(self) -> dict[str, Any]:
        return self._response("in_progress", [], None)

    async def events(self, told: AsyncGenerator[Told | Departing, None]) -> AsyncGenerator[str, None]:
        stream = _Stream(self.opened.turn)
        yield stream.event("response.created", response=self.begun)
        yield stream.event("response.in_progress", response=self.begun)
        async with aclosing(told):
            async for one in told:
                event = REPLACED if isinstance(one, Departing) else one.event
                if isinstance(event, Refused):
                    yield stream.event("error", code=event.code, message=event.message, param=event.param)
                    return
                if isinstance(event, Delta | Closed):
                    for piece in pieces(event):
                        for part in stream.write(piece):
                            yield part
                if isinstance(event, Closed):
                    for part in stream.end():
                        yield part
                    response = self._ended(event, stream.output)
                    name = response["status"] if response["status"] in ("completed", "incomplete") else "failed"
                    yield stream.event(f"response.{name}", response=response)

    def _ended(self, closed: Closed, output: list[dict[str, Any]]) -> dict[str, Any]:
        opened = self.opened
        usage = usage_of(opened.prompt_tokens, opened.reused, closed.completion_tokens, closed.reasoning_tokens)
        return self._response(status_of(closed.finish_reason), output, usage)

    def _response(self, status: str, output: list[dict[str, Any]], usage: Any) -> dict[str, Any]:
        session = self.opened.session.id if self.opened.session else None
        name = response_id(session, self.opened.turn)
        return response_object(name, self.opened.model, self.facts, status, output, usage)


@dataclass
class _Stream:
    """Output items one after another, and numbered events of them."""

    turn: str
    output: list[dict[str, Any]] = field(default_factory=list)
    _number: int = 0
    _open: type[Piece] | None = None
    _said: str = ""

    def event(self, kind: str, **fields: Any) -> str:
        data = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"

    def write(self, piece: Piece) -> Iterator[str]:
        if isinstance(piece, ToolCall):
            yield from self.end()
            yield from self._call(piece)
            return
        if self._open is not type(piece):
            yield from self.end()
            self._open, self._said = type(piece), ""
            item = _begun(piece)
            yield self._added({"id": self._name(piece), "type": item["type"], "status": "in_progress", **item})
            yield self._part("response.content_part.added", part=_content(piece, ""))
        self._said += piece.text
        more = {"logprobs": []} if isinstance(piece, Text) else {}
        yield self._part(f"response.{_content(piece, '')['type']}.delta", delta=piece.text, **more)

    def end(self) -> Iterator[str]:
        if self._open is None:
            return
        piece = self._open(self._said)  # pyright: ignore[reportCallIssue] - a call is never open
        content = _content(piece, self._said)
        more = {"logprobs": []} if isinstance(piece, Text) else {}
        yield self._part(f"response.{content['type']}.done", text=self._said, **more)
        yield self._part("response.content_part.done", part=content)
        item = {"id": self._name(piece), "status": "completed", **_begun(piece), "content": [content]}
        self._open = None
        yield self._done(item)

    def _call(self, call: ToolCall) -> Iterator[str]:
        item = {
            "id": self._name(call), "type": "function_call", "status": "in_progress", "call_id": call.id,
            "name": call.name, "arguments": "",
        }  # fmt: skip
        yield self._added(item)
        where = {"item_id": item["id"], "output_index": len(self.output)}
        yield self.event("response.function_call_arguments.delta", **where, delta=call.arguments)
        yield self.event("response.function_call_arguments.done", **where, name=call.name, arguments=call.arguments)
        yield self._done({**item, "status": "completed", "arguments": call.arguments})

    def _added(self, item: dict[str, Any]) -> str:
        return self.event("response.output_item.added", output_index=len(self.output), item=item)

    def _done(self, item: dict[str, Any]) -> str:
        self.output.append(item)
        return self.event("response.output_item.done", output_index=len(self.output) - 1, item=item)

    def _part(self, kind: str, **fields: Any) -> str:
        prefix = "rs" if self._open is Thought else "msg"
        place = {"item_id": item_id(prefix, self.turn, len(self.output)), "output_index": len(self.output)}
        return self.event(kind, **place, content_index=0, **fields)

    def _name(self, piece: Piece) -> str:
        prefix = {Thought: "rs", Text: "msg", ToolCall: "fc"}[type(piece)]
        return item_id(prefix, self.turn, len(self.output))


def _begun(piece: Piece) -> dict[str, Any]:
    if isinstance(piece, Thought):
        return {"type": "reasoning", "summary": [], "content": []}
    return {"type": "message", "role": "assistant", "content": []}


def _content(piece: Piece, text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text} if isinstance(piece, Thought) else output_text(text)
