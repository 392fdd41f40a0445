"""What one event of a chat completion's stream says. Anything else is an UnexpectedAnswer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from deployment.client.errors import Refusal, UnexpectedAnswer, refusal_of
from deployment.client.events import Called, Ended, Resume, Usage
from deployment.client.sse_reading import ServerEvent
from deployment.errors import RequestError
from deployment.event_ids import EventId, parse_event_id


@dataclass(frozen=True)
class Chunk:
    """What an event brings of one choice; with `ended` its last one."""

    place: EventId
    model: str
    content: str
    reasoning: str
    logprobs: tuple[dict[str, Any], ...]
    calls: tuple[Called, ...]
    ended: Ended | None


@dataclass(frozen=True)
class Done:
    """All was said."""


@dataclass(frozen=True)
class GoOn:
    """This connection ends here, and the turn does not: it is to be followed on another one."""


def read_event(event: ServerEvent) -> Chunk | Usage | Refusal | Done | GoOn:
    if event.name == "resume":
        return GoOn()
    if event.data == "[DONE]":
        return Done()
    try:
        document = json.loads(event.data)
        if "error" in document:
            told: Chunk | Usage | Refusal | None = refusal_of(document["error"])
        elif document["choices"]:
            told = _chunk(parse_event_id(event.id, "id"), document)
        else:
            told = _usage(document["usage"])
    except (KeyError, TypeError, ValueError, AttributeError, RequestError):
        told = None
    if told is None:
        raise UnexpectedAnswer(f"an event is none of a chat completion: {event.data[:200]!r}, id {event.id[:80]!r}")
    return told


def _chunk(place: EventId, document: dict[str, Any]) -> Chunk:
    (shown,) = document["choices"]
    delta = shown["delta"]
    return Chunk(
        place=place,
        model=str(document["model"]),
        content=_text(delta.get("content")),
        reasoning=_text(delta.get("reasoning_content")),
        logprobs=tuple((shown.get("logprobs") or {}).get("content") or ()),
        calls=tuple(_called(call, place.choice or 0) for call in delta.get("tool_calls") or ()),
        ended=None if shown["finish_reason"] is None else _ended(shown, place.choice or 0, document),
    )


def _called(call: dict[str, Any], choice: int) -> Called:
    """A call, which comes in one piece."""
    function = call["function"]
    told = (call["id"], function["name"], function["arguments"])
    if not all(isinstance(text, str) for text in told) or type(call["index"]) is not int:
        raise ValueError("a call has an id, a name, arguments and an index")
    return Called(*told, index=call["index"], choice=choice)


def _text(value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise ValueError("text must be a string")
    return value or ""


def _ended(shown: dict[str, Any], choice: int, document: dict[str, Any]) -> Ended:
    meta, session = document["meta_info"], document.get("session")
    return Ended(
        finish_reason=shown["finish_reason"],
        stop_reason=shown.get("stop_reason"),
        seed=meta["seed"],
        rounds=tuple(meta["rounds"]),
        acceptance_length=meta["spec_accept_length"],
        seconds=meta["seconds"],
        replica=meta["replica"],
        choice=choice,
        resume=None if session is None else _resume(session),
    )


def _resume(session: dict[str, Any]) -> Resume:
    return Resume(
        session=session["id"],
        hit=session["hit"],
        reused=session["reused"],
        prefilled=session["prefilled"],
        epoch=session["epoch"],
        frontier=session["frontier"],
    )


def _usage(usage: dict[str, Any]) -> Usage:
    return Usage(
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
    )
