"""Requests as values, the same for both clients: which route, what is sent, and whether it may be sent twice."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Call:
    """`repeatable`: sending it again after an answer that was lost changes nothing. `has_begun`: it asks for the rest
    of an answer, of which something was read."""

    method: str
    path: str
    body: Any = None
    content: bytes | None = None
    params: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = False
    has_begun: bool = False

    def request(self, client: httpx.Client | httpx.AsyncClient, timeout: httpx.Timeout) -> httpx.Request:
        return client.build_request(
            self.method, self.path, json=self.body, content=self.content, params=dict(self.params) or None,
            headers=dict(self.headers), timeout=timeout,
        )  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """A turn to be asked for. `append`: `messages` holds only what is new. `options`: further fields of the body, by
    the names that docs/http.md lists. `key`: under which it is one turn, however often it is asked for."""

    messages: Sequence[Message]
    session: str | None
    append: bool
    options: Mapping[str, Any]
    key: str

    @property
    def ask(self) -> Call:
        body = {**self.options, "messages": list(self.messages), "stream": True}
        body["stream_options"] = {"include_usage": True}
        headers = {"idempotency-key": self.key}
        if self.append and self.session is not None:
            return Call("POST", f"{_session(self.session)}/turns", body, headers=headers, repeatable=True)
        if self.session is not None:
            headers["x-session-id"] = self.session
        return Call("POST", "/v1/chat/completions", body, headers=headers, repeatable=True)

    def follow(self, turn: str, after: str) -> Call:
        assert self.session is not None
        path = f"{_session(self.session)}/turns/{turn}/events"
        return Call("GET", path, params={"after": after, "include_usage": "true"}, repeatable=True, has_begun=True)


def turn(
    messages: Sequence[Message],
    session: str | None,
    append: bool,
    options: Mapping[str, Any] | None,
    idempotency_key: str | None,
) -> Turn:
    """ValueError for what no server could take."""
    if append and session is None:
        raise ValueError("append: an append turn needs a session")
    for name in ("messages", "stream", "stream_options"):
        if name in (options or {}):
            raise ValueError(f"options: {name} is not among them; it is an argument, or this client's own business")
    key = secrets.token_hex(16) if idempotency_key is None else visible("idempotency_key", idempotency_key)
    name = None if session is None else visible("session", session)
    return Turn(messages, name, append, options or {}, key)


def visible(name: str, value: str) -> str:
    """What goes into a header. ValueError."""
    if not is_visible(value):
        raise ValueError(f"{name}: has visible ASCII characters and at least one, got {value[:80]!r}")
    return value


def is_visible(value: str) -> bool:
    return value != "" and all("!" <= character <= "~" for character in value)


# ------------------------------------------------------------------------------------------------ sessions and server


def models() -> Call:
    return Call("GET", "/v1/models", repeatable=True)


def replicas() -> Call:
    return Call("GET", "/v1/replicas", repeatable=True)


def sessions() -> Call:
    return Call("GET", "/v1/sessions", repeatable=True)


def session(name: str) -> Call:
    return Call("GET", _session(name), repeatable=True)


def create(name: str | None) -> Call:
    return Call("POST", "/v1/sessions", {} if name is None else {"id": name})


def fork(
    name: str,
    child: str | None,
    checkpoint: str | None = None,
    turn: str | None = None,
    frontier: int | None = None,
) -> Call:
    """ValueError for more than one place to fork at."""
    fields = {"id": child, "checkpoint": checkpoint, "turn": turn, "frontier": frontier}
    body = {field: value for field, value in fields.items() if value is not None}
    if len(body.keys() - {"id"}) > 1:
        raise ValueError(f"fork: begins at one place, got {', '.join(sorted(body.keys() - {'id'}))}")
    return Call("POST", f"{_session(name)}/fork", body)


def turns(name: str) -> Call:
    return Call("GET", f"{_session(name)}/turns", repeatable=True)


def checkpoints(name: str) -> Call:
    return Call("GET", f"{_session(name)}/checkpoints", repeatable=True)


def checkpoint(name: str, called: str | None) -> Call:
    return Call("POST", f"{_session(name)}/checkpoints", {} if called is None else {"name": called})


def delete_checkpoint(name: str, checkpoint: str) -> Call:
    return Call("DELETE", f"{_session(name)}/checkpoints/{quote(checkpoint, safe='')}")


def migrate(name: str, to: str | None) -> Call:
    return Call("POST", f"{_session(name)}/migrate", {} if to is None else {"to": to})


def export(name: str) -> Call:
    return Call("GET", f"{_session(name)}/export", repeatable=True)


def import_(document: bytes, name: str | None) -> Call:
    return Call("POST", "/v1/sessions/import", content=document, params={} if name is None else {"id": name})


def delete(name: str) -> Call:
    return Call("DELETE", _session(name))


def _session(name: str) -> str:
    return f"/v1/sessions/{quote(name, safe='')}"
