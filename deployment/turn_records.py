"""What is kept of a turn that is over, for its session's document and for `GET /v1/sessions/{id}`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields, replace
from typing import Any

from deployment.engine.events import Finished, Started
from deployment.tool_use import ToolUse
from deployment.wire import TurnRequest
from state.session_record import TurnRecord

_IDENTITY = {
    "turn", "mode", "messages", "key", "must_exist", "tenant", "seed", "idempotency_key", "repeated", "hint",
    "media", "resumed", "accept_durable", "draws", "note", "follows", "store",
}  # fmt: skip
"""What a record says elsewhere, as messages do of media, or what says only who asked."""

WHILE_NEWEST = "while_newest"
"""What a note, which is a JSON object, has under this name goes once another turn follows."""


def canonical_request(request: TurnRequest) -> dict[str, Any]:
    """What a turn was asked for beside its messages: every field that is not at its default, as plain data."""
    asked = {
        field.name: getattr(request, field.name)
        for field in fields(request)
        if field.name not in _IDENTITY and getattr(request, field.name) != field.default
    }
    if request.grammar is not None:
        asked["grammar"] = asdict(request.grammar)
    if request.tools is not None:
        asked["tools"] = asdict(request.tools)
    return json.loads(json.dumps(asked))  # tuples become lists


def request_sha256(request: TurnRequest) -> bytes:
    """Tells a repeated request from another one (decision 21): messages, seed and all other fields, no identity."""
    whole = {**canonical_request(request), "seed": request.seed, "mode": request.mode, "messages": request.messages}
    text = json.dumps(whole, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def tools_sha256(tools: ToolUse | None) -> str | None:
    """Tells the tools of two turns apart; None: no tools."""
    return None if tools is None else hashlib.sha256(tools.source.encode()).hexdigest()


def _kept(asked: dict[str, Any]) -> dict[str, Any]:
    """An agent has a turn every few seconds, and its tools are long: of them the digest stays."""
    tools = asked.get("tools")
    return asked if tools is None else {**asked, "tools": {**tools, "source": tools_sha256(ToolUse(**tools))}}


def turn_record(
    request: TurnRequest,
    replica: str,
    turn: str,
    seed: int,
    started: Started | None,
    finished: Finished,
    ended_at: float,
) -> TurnRecord:
    """`ended_at`: seconds since 1970."""
    return TurnRecord(
        id=turn,
        mode=request.mode,
        replica=replica,
        request=_kept(canonical_request(request)) | ({"note": request.note} if request.note else {}),
        request_sha256=request_sha256(request),
        seed=seed,
        idempotency_key=request.idempotency_key,
        start=finished.prompt_tokens,
        published=len(finished.token_ids),
        finish_reason=finished.finish_reason,
        frontier=finished.frontier,
        hit=started.hit if started else "none",
        reused=started.reused if started else 0,
        prefilled=started.prefilled if started else 0,
        acceptance_length=finished.acceptance_length,
        ended_at=ended_at,
    )


def followed(record: TurnRecord) -> TurnRecord:
    """What stays of a turn's record when another turn follows. All copies have the records of all turns, and tools that
    each one's note repeated would soon be most of them. A session that came in a document may have any note."""
    note = record.request.get("note")
    if not isinstance(note, str) or WHILE_NEWEST not in note:
        return record
    try:
        told = json.loads(note)
    except (ValueError, RecursionError):
        return record
    if not isinstance(told, dict):
        return record
    told.pop(WHILE_NEWEST, None)
    return replace(record, request={**record.request, "note": json.dumps(told)})


def turn_object(record: TurnRecord) -> dict[str, Any]:
    """A turn as the interface shows it."""
    shown = asdict(record) | {"prompt_tokens": record.start, "completion_tokens": record.published}
    for name in ("start", "published", "request_sha256", "idempotency_key"):
        del shown[name]
    return shown
