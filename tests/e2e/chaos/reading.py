"""A client that gives up nothing: it reads a turn's stream, and where the stream breaks it asks for the rest."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx

from deployment.event_ids import EventId, parse_event_id

AGAIN_SECONDS = 0.3
GIVE_UP_SECONDS = 90.0

PASSING = frozenset({
    "session_unavailable", "replica_lost", "server_replaced", "unavailable", "queue_timeout",
    "session_busy", "session_moved", "no_ingress",
})  # fmt: skip
"""Refusals that a client may meet while one part of the cluster is gone (docs/http.md), and that say: ask again."""

FAULTS = frozenset({"internal_error", "unreadable"})
"""Refusals that nobody may ever meet: what failed is the server."""

NO_INGRESS_SECONDS = 20.0
"""For how long Serve's proxy may answer for an ingress that was killed."""


@dataclass(frozen=True)
class Refusal:
    """`status`: None for a stream's last event. `code`: the error object's; of an answer without one `no_ingress`, if
    it is what Serve's proxy says when a request to the ingress failed, and `unreadable` else. `at`: on the monotonic
    clock."""

    status: int | None
    code: str
    text: str
    at: float = field(default_factory=time.monotonic)

    def is_fault(self, ingress_died: Iterable[float]) -> bool:
        """`ingress_died`: when. The proxy says the same where the ingress lives and raised something."""
        if self.code == "no_ingress":
            return not any(0 <= self.at - died <= NO_INGRESS_SECONDS for died in ingress_died)
        return self.code in FAULTS

    def __str__(self) -> str:
        return f"{self.status or 'stream'} {self.code}: {self.text}"


class Unanswered(Exception):
    """A request was refused, or not answered for `GIVE_UP_SECONDS`. `code`: of the last refusal."""

    def __init__(self, what: str, code: str) -> None:
        super().__init__(what)
        self.code = code


@dataclass(frozen=True)
class Heard:
    """One event. `tokens`: how many it brought, where log-probabilities show that."""

    at: float
    id: EventId
    text: str
    tokens: int | None


@dataclass
class Answer:
    """All that a client heard of a turn. `tries` that broke off or were refused by something that passes; `resumed`:
    connections that brought the rest; `replica`: where the stream began."""

    events: list[Heard] = field(default_factory=list)
    finish: str | None = None
    replica: str = ""
    prefilled: int = 0
    tries: int = 0
    resumed: int = 0
    refusals: list[Refusal] = field(default_factory=list)

    @property
    def turn(self) -> str | None:
        return self.events[0].id.turn if self.events else None

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def start(self) -> int:
        return self.events[0].id.position

    @property
    def end(self) -> EventId:
        return self.events[-1].id

    @property
    def tokens(self) -> int:
        return self.end.position - self.start


def take(client: httpx.Client, path: str, session: str, body: dict[str, Any], key: str | None, answer: Answer) -> None:
    """Takes a turn, whatever it takes. `key`: its idempotency key; without one a retry is marked as one. `answer` is
    filled while it comes."""
    headers = {"idempotency-key": key} if key else {}
    if not path.startswith("/v1/sessions/"):
        headers["x-session-id"] = session

    def request() -> Any:
        if answer.turn is not None:
            return _events(client, session, answer.turn, answer.end)
        retried = {"x-session-retry": "1"} if answer.tries else {}
        return client.stream("POST", path, json={**body, "stream": True}, headers={**headers, **retried})

    _read_all(answer, request)


def follow(client: httpx.Client, session: str, turn: str, answer: Answer) -> None:
    """Reads a turn from its first event, as somebody who came later. `answer` is filled while it comes."""
    _read_all(answer, lambda: _events(client, session, turn, answer.end if answer.events else None))


def _events(client: httpx.Client, session: str, turn: str, after: EventId | None) -> Any:
    params = {"after": str(after)} if after else {}
    return client.stream("GET", f"/v1/sessions/{session}/turns/{turn}/events", params=params)


def _read_all(answer: Answer, request: Any) -> None:
    heard = time.monotonic()
    code = "no_answer"
    while True:
        if answer.tries:
            time.sleep(AGAIN_SECONDS)
        before = len(answer.events)
        with contextlib.suppress(httpx.TransportError), request() as response:
            answer.resumed += bool(answer.events) and response.status_code == 200
            if response.status_code != 200:
                code = _passing(refusal_of(response), answer.refusals)
            else:
                answer.replica = answer.replica or response.headers["x-replica"]
                if _read(answer, response):
                    return
                code = answer.refusals[-1].code if answer.refusals else code
        answer.tries += 1
        if len(answer.events) > before:
            heard = time.monotonic()
        if time.monotonic() - heard > GIVE_UP_SECONDS:
            raise Unanswered(f"turn {answer.turn}: no answer for {GIVE_UP_SECONDS:.0f} s, the last was {code}", code)


def _read(answer: Answer, response: httpx.Response) -> bool:
    """Whether the stream came to its end."""
    place: EventId | None = None
    for line in response.iter_lines():
        if line.startswith("id: "):
            place = parse_event_id(line[4:], "id")
        elif line == "data: [DONE]":
            return True
        elif line.startswith("data: "):
            document = json.loads(line[6:])
            if "error" in document:
                _passing(Refusal(None, document["error"]["code"], document["error"]["message"]), answer.refusals)
                return False
            if place is not None:
                _hear(answer, place, document)
    return False


def _hear(answer: Answer, place: EventId, document: dict[str, Any]) -> None:
    choice = document["choices"][0]
    logprobs = choice["logprobs"]
    tokens = len(logprobs["content"]) if logprobs else None
    answer.events.append(Heard(time.monotonic(), place, choice["delta"].get("content", ""), tokens))
    if choice["finish_reason"] is not None:
        answer.finish = choice["finish_reason"]
        answer.prefilled = document["session"]["prefilled"]


def refusal_of(response: httpx.Response) -> Refusal:
    text = response.read().decode(errors="replace")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return Refusal(response.status_code, response.json()["error"]["code"], text)
    return Refusal(response.status_code, "no_ingress" if response.status_code in (500, 503) else "unreadable", text)


def _passing(refusal: Refusal, refusals: list[Refusal]) -> str:
    """The code, if it says: ask again. Unanswered."""
    refusals.append(refusal)
    if refusal.code not in PASSING:
        raise Unanswered(str(refusal), refusal.code)
    return refusal.code


def asked(
    client: httpx.Client,
    method: str,
    path: str,
    *,
    known: tuple[str, ...] = (),
    refusals: list[Refusal] | None = None,
    **more: Any,
) -> httpx.Response:
    """A request that may be made again. `known`: codes of refusals that are answers, too; all others are added to
    `refusals`."""
    refusals = [] if refusals is None else refusals
    deadline = time.monotonic() + GIVE_UP_SECONDS
    what = "no answer"
    while True:
        with contextlib.suppress(httpx.TransportError):
            response = client.request(method, path, **more)
            if response.status_code == 200:
                return response
            refusal = refusal_of(response)
            if refusal.code in known:
                return response
            _passing(refusal, refusals)
            what = str(refusal)
        if time.monotonic() > deadline:
            raise Unanswered(f"{method} {path}: {what}", "no_answer")
        time.sleep(AGAIN_SECONDS)
